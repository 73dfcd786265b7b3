"""Rows through symmetric memory on the GPUs of one host, against the route on plain tensors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import peers
from cp_rewrite.kernels.flash import fa4
from cp_rewrite.kernels.flash.varlen import BackwardOverlap
from cp_rewrite.kernels.peers import group_reasons
from cp_rewrite.kernels.select import Params, Tables, capabilities, device_facts
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops import pushed
from cp_rewrite.ops.attention import fill_gaps
from cp_rewrite.ops.exchanges.push import give_back as return_kv
from cp_rewrite.ops.exchanges.push import take as push_kv
from cp_rewrite.ops.local_rows import as_rows, split_kv
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.routes.gathered import gathered_route
from cp_rewrite.planning.routes.push import PUSH, push_route
from cp_rewrite.planning.schedule import Schedule
from tests.end_to_end.test_conformance_gpu import free_port
from tests.helpers.packed import make_schedule
from tests.helpers.tolerances import relative_error

pytestmark = pytest.mark.gpu

HEADS, DIM, DIM_V = 3, 16, 24
_ops: Any = torch.ops.cp_rewrite


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
def test_exchange_over_symmetric_memory() -> None:
    world_size = min(4, torch.cuda.device_count())
    mp.spawn(_rank, (world_size, free_port()), nprocs=world_size)  # type: ignore[no-untyped-call]


def _rank(rank: int, world_size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    assert group_reasons(name) == ()
    for lengths, layout, mask in (
        ([3000, 70, 1, 900], "balanced", PackedMask()),
        ([5000], "dual_chunk", PackedMask()),  # grows the channels
        ([300] * 20, "contiguous", PackedMask(False, (50, 20))),
        ([8192], "balanced", PackedMask(False)),
    ):
        schedule, _ = make_schedule([Documents.from_lengths(lengths)], world_size, layout, mask)
        for dtype in (torch.bfloat16, torch.float32):
            _check(schedule, rank, world_size, name, dtype)
    if "flash_attn.cute" in device_facts(torch.device("cuda", rank)).modules and capabilities("fa4").overlaps_exchange:
        for case in OVERLAPPED:
            _check_overlap(*case, rank, world_size, name)
    _replay(rank, world_size, name)
    dist.destroy_process_group()


def _inputs(schedule: Schedule, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """kv rows (R, C) and gradients of expanded rows (E, C) of every rank, the same in all processes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = HEADS * (DIM + DIM_V)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device="cuda").to(dtype)

    kv = [draw(schedule.local_rows) for _ in range(schedule.world_size)]
    return kv, [draw(max(2, int(size))) for size in schedule.expanded]


def _tensors(schedule: Schedule, rank: int) -> list[torch.Tensor]:
    route = push_route(schedule, rank)
    tensors = [(torch.from_numpy(route[tensor.name]), tensor.on_host) for tensor in PUSH.tensors]
    return [x if on_host else x.cuda() for x, on_host in tensors]


def _split(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = kv.split([HEADS * DIM, HEADS * DIM_V], 1)
    return k.unflatten(1, (HEADS, DIM)), v.unflatten(1, (HEADS, DIM_V))


def _check(schedule: Schedule, rank: int, world_size: int, group: str, dtype: torch.dtype) -> None:
    route, exchange = _tensors(schedule, rank), Exchange("push", group, world_size)
    for call in range(5):  # over the same memory
        kv, grads = _inputs(schedule, dtype, call)
        k, v = _split(kv[rank])
        used = int(schedule.expanded[rank])
        expected = torch.cat(kv)[torch.from_numpy(gathered_route(schedule, rank)["kv_rows"]).cuda().long()]
        if call % 2:  # ranks out of step
            torch.cuda._sleep(3_000_000 * (rank if call == 1 else world_size - rank))
        got = push_kv(k, v, route, exchange)
        assert torch.equal(got[:used], expected[:used])
        dk, dv = return_kv(grads[rank], k, v, route, exchange)
        total = torch.zeros(world_size * schedule.local_rows, kv[0].shape[1], device="cuda")
        for reader in range(world_size):
            size = int(schedule.expanded[reader])
            slots = torch.from_numpy(gathered_route(schedule, reader)["kv_rows"]).cuda().long()[:size]
            total.index_add_(0, slots, grads[reader][:size].float())
        want = total[rank * schedule.local_rows : (rank + 1) * schedule.local_rows]
        again = return_kv(grads[rank], k, v, route, exchange)
        for got_grad, want_grad, repeat in zip((dk, dv), _split(want), again, strict=True):
            torch.testing.assert_close(got_grad.float(), want_grad, rtol=1e-2, atol=1e-2)
            assert torch.equal(got_grad, repeat)


OVERLAPPED: tuple[tuple[list[int], str, PackedMask, tuple[int, int]], ...] = (
    ([3000, 70, 1, 900, 4221], "balanced", PackedMask(), (16, 4)),
    ([8192], "balanced", PackedMask(), (8, 8)),
    ([8000, 100], "dual_chunk", PackedMask(), (16, 4)),
    ([5000, 3000], "contiguous", PackedMask(True, (700, 0)), (8, 1)),
    ([5000, 3000], "dual_chunk", PackedMask(False, (300, 200)), (8, 1)),  # several launches
    ([1024] * 8, "balanced", PackedMask(), (16, 4)),  # no row travels
    ([1500, 100, 4000, 2700, 1200], "contiguous", PackedMask(), (8, 2)),  # in place at the end of a rank's rows
    ([700] * 9 + [1234], "balanced", PackedMask(), (8, 2)),
    ([100] * 40 + [1100], "contiguous", PackedMask(), (16, 4)),  # few rows: no cut
    ([16384], "balanced", PackedMask(), (8, 8)),  # stages
)


def _check_overlap(
    lengths: list[int], layout: str, mask: PackedMask, heads: tuple[int, int], rank: int, world_size: int, group: str
) -> None:
    """An exchange that overlaps with the kernel gives, bit for bit, what exchanges before and after it give, eager and
    replayed; gradients of grouped heads, of which finer parts travel, what such an exchange after it gives."""
    schedule, _ = make_schedule([Documents.from_lengths(lengths)], world_size, layout, mask)
    route, exchange = _tensors(schedule, rank), Exchange("push", group, world_size)
    arrays = {name: torch.from_numpy(array) for name, array in schedule.attention(rank).items()}
    tables = Tables(**{name: x.cuda() if name.startswith("cu_") else x for name, x in arrays.items()})
    generator = torch.Generator("cuda").manual_seed(rank)
    shapes = [(schedule.local_rows, n, 128) for n in (heads[0], heads[0], heads[1], heads[1])]
    q, dout, k, v = (torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes)
    numbers, params = (0.1, 0.0, "fa4", True), Params(0.1, 0.0, True)
    inputs = tables.cu_seqlens_q, tables.cu_seqlens_k, tables.pieces, tables.launches, route

    def apart(in_parts: bool = True) -> tuple[torch.Tensor, ...]:
        keys = split_kv(push_kv(k, v, route, exchange), heads[1], 128, 128)
        out, lse = fa4.forward(q, *keys, tables, params)
        dq, dk, dv = fa4.backward(dout, q, *keys, out, lse, tables, params)
        grads = return_kv(as_rows(dk, dv, *keys), k, v, route, exchange)
        out = fill_gaps(out, lse)
        named: dict[str, torch.Tensor] = PUSH.bind(route)._asdict()
        if heads[0] == heads[1] or not int(named["capacity"]):
            return out, lse, dq, *grads
        finer = _finer(
            lambda into: fa4.backward(dout, q, *keys, out, lse, tables, params, into), keys, k, v, named, in_parts
        )
        for x, y in zip(grads, finer, strict=True):
            assert relative_error(y, x) < 2**-8
        return out, lse, dq, *finer

    def overlapped(keep: bool, k: torch.Tensor = k, v: torch.Tensor = v) -> tuple[torch.Tensor, ...]:
        out, lse, kv = _ops.pushed_attention.default(q, k, v, *inputs, *numbers, keep, group, None)
        back = _ops.pushed_attention_backward.default
        return out, lse, *back(dout, q, k, v, kv if keep else None, out, lse, *inputs, *numbers, group)

    def same(expected: tuple[torch.Tensor, ...], got: tuple[torch.Tensor, ...], what: object) -> None:
        for name, want, found in zip(("out", "lse", "dq", "dk", "dv"), expected, got, strict=True):
            assert torch.equal(want, found), (lengths, layout, what, name)

    def in_stages(sizes: tuple[int, ...]) -> None:
        expected = apart(in_parts=False)
        if int(PUSH.bind(route).capacity):
            with pytest.MonkeyPatch.context() as patch:
                for name in ("forward_sizes", "backward_sizes"):
                    patch.setattr(pushed, name, lambda *_: sizes)
                for call in range(4):
                    torch.cuda._sleep(3_000_000 * (rank if call % 2 else world_size - rank))  # ranks out of step
                    same(expected, overlapped(call > 1), (sizes, call))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = overlapped(False)
                for _ in range(3):
                    graph.replay()
                same(expected, captured, (sizes, "replayed"))

    expected = apart()
    for sizes in ((2, 2), (1, 2, 1), (2, 6), (2, 3, 3), (2, 2, 2, 2)):
        if sum(sizes) == heads[1] and not schedule.launch.any():
            in_stages(sizes)
    for call in range(4):
        torch.cuda._sleep(3_000_000 * (rank if call % 2 else world_size - rank))  # ranks out of step
        same(expected, overlapped(call > 1), call)
    strided = [torch.cat([x, x], 1)[:, : heads[1]] for x in (k, v)]
    for keep in (False, True):
        same(expected, overlapped(keep, *strided), "rows that lie apart")
    # Rows with holes travel as copies; deterministic torch fills new memory first.
    with_holes = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)]
    torch.use_deterministic_algorithms(True)
    for _ in range(4):
        same(expected, overlapped(False, *with_holes), "copies")
    torch.use_deterministic_algorithms(False)
    for keep in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = overlapped(keep)
        for x in (q, dout, k, v):
            x.mul_(0.5)
        for _ in range(3):
            graph.replay()
        same(apart(), captured, "replayed")


def _finer(
    backward: Any,
    keys: tuple[torch.Tensor, ...],
    k: torch.Tensor,
    v: torch.Tensor,
    route: dict[str, torch.Tensor],
    in_parts: bool,
) -> list[torch.Tensor]:
    """dk and dv, of which parts are MXINT15, in plain steps; those of rows in place (early ones too: `in_parts`) are
    whole where no other rank holds them."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    source, early, whole = route["place"].tolist()
    early *= in_parts
    here = slice(source, source + early + whole)
    sums = [torch.empty_like(x) for x in (k, v)]
    buffer = torch.empty_like(as_rows(*keys, *keys))
    grads = (sums[0][here], sums[1][here]) if whole else split_kv(buffer, k.shape[1], k.shape[2], v.shape[2])
    held, listed = route["holder_ptr"][source : source + early + whole + 1], -1
    if early:  # of the expanded rows that are read in place; all others are parts
        _, _, cut, second, _ = route["stages"].tolist()
        listed = cut if second else 0
        counts = torch.full((buffer.shape[0],), 2, dtype=torch.int32, device=held.device)
        counts[listed : listed + early] = held.diff()
        held = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    backward(BackwardOverlap(grads, mxint15=True, holder_ptr=held if early + whole else None, own=int(early > 0)))
    if early:
        for into, grad in zip(sums, grads, strict=True):
            into[here] = grad[listed : listed + early]
    lists = [route[name] for name in ("partners", "capacity", "holder_ptr", "holders")]
    expanded = buffer[: route["copied"].shape[0]]
    back = peers.Return(expanded, *lists, group=group, mxint15=True)
    back.rows.copy_(expanded)
    back.written()
    back.sum_up(sums[0], sums[1], here, listed=listed)
    return sums


def _replay(rank: int, world_size: int, group: str) -> None:
    """Both directions in a CUDA graph. The device numbers the calls, so replays wait for peers as eager calls do."""
    schedule, _ = make_schedule([Documents.from_lengths([2000, 48])], world_size, "balanced", PackedMask())
    route, exchange = _tensors(schedule, rank), Exchange("push", group, world_size)
    kv, grads = _inputs(schedule, torch.bfloat16, 0)
    k, v = (x.contiguous() for x in _split(kv[rank]))

    def step() -> tuple[Any, Any]:
        return push_kv(k, v, route, exchange), return_kv(grads[rank], k, v, route, exchange)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    used = int(schedule.expanded[rank])
    for seed in range(1, 4):
        kv, new = _inputs(schedule, torch.bfloat16, seed)
        for target, source in zip((k, v, grads[rank]), (*_split(kv[rank]), new[rank]), strict=True):
            target.copy_(source)
        graph.replay()
        slots = torch.from_numpy(gathered_route(schedule, rank)["kv_rows"]).cuda().long()[:used]
        assert torch.equal(captured[0][:used], torch.cat(kv)[slots])
        expected = return_kv(grads[rank], k, v, route, exchange)
        assert all(torch.equal(a, b) for a, b in zip(captured[1], expected, strict=True))
