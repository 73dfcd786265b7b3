"""Tables of fixed sizes say the same as tight ones; steps over buffers that batches share give one process's result."""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.batch.active import active_plan, site_inputs
from cp_rewrite.batch.buffers import buffers_of
from cp_rewrite.batch.marks import is_part
from cp_rewrite.capacity import Capacity
from cp_rewrite.documents import Documents
from cp_rewrite.kernels.flash.varlen import launches_of
from cp_rewrite.kernels.select import Tables
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.plan_input import PlanInput
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.gathered import gathered_route
from cp_rewrite.planning.routes.push import push_route
from cp_rewrite.planning.routes.route import fits, fixed_tables
from tests.end_to_end import test_fewer_tokens, test_neighbours, test_scans
from tests.end_to_end.test_end_to_end import LIMIT, TOKENS, make_batch, plain_step
from tests.helpers import packed_model
from tests.helpers.models import build_model
from tests.helpers.one_process import step_of_ranks
from tests.helpers.packed import make_schedule
from tests.helpers.packs import batches
from tests.helpers.pool import Pool
from tests.helpers.tolerances import relative_error

MASKS = (PackedMask(), PackedMask(False), PackedMask(True, (9, None)), PackedMask(False, (3, 0)))
FIXED = {kind: route.fixed for kind, route in ROUTES.items() if route.fixed is not None}
ROOM = Capacity(documents=12, pieces=90, rows=700)


@given(batches(), st.sampled_from(MASKS), st.integers(1, 4), st.sampled_from(("contiguous", "dual_chunk", "balanced")))
def test_tables_say_the_same(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str) -> None:
    schedule, _ = make_schedule(rows, world_size, layout, mask)
    assume(schedule.expanded.max(initial=0) <= ROOM.rows)
    for rank in range(world_size):
        tight, fixed = schedule.attention(rank), fixed_tables(schedule, rank, mask, ROOM)
        assert tuple(fixed) == tuple(tight)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "pieces"):
            assert len(fixed[name]) == ROOM.pieces + name.startswith("cu_")
            assert fixed[name].dtype == tight[name].dtype
        used = np.diff(tight["cu_seqlens_q"]) > 0
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            lengths = np.diff(fixed[name])
            np.testing.assert_array_equal(lengths[: len(used)], np.diff(tight[name]))
            assert not lengths[len(used) :].any()
        pieces = tight["pieces"]
        assert (pieces[pieces[:, 1] > pieces[:, 0]][:, 4:6] == fixed["launches"][0, :2]).all()
        (launch,) = launches_of(Tables(*(torch.from_numpy(a) for a in fixed.values())), schedule.local_rows)
        assert (launch.stop, launch.gaps, launch.dirty) == (schedule.local_rows, True, True)
        assert (launch.max_q, launch.max_k) == (schedule.local_rows, ROOM.rows)


@given(batches(), st.sampled_from(MASKS), st.integers(1, 4), st.sampled_from(sorted(FIXED)))
def test_routes_say_the_same(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, exchange: str) -> None:
    world_size = 1 if exchange == "local" else world_size
    schedule, indices = make_schedule(rows, world_size, "balanced", mask)
    assume(schedule.expanded.max(initial=0) <= ROOM.rows)
    sizes: set[Any] = set()
    routes = [FIXED[exchange](schedule, rank, ROOM) for rank in range(world_size)]
    for rank, route in enumerate(routes):
        assert tuple(route) == ROUTES[exchange].names
        sizes.add(tuple(len(array) for array in route.values()))
        used = int(schedule.expanded[rank])
        if exchange == "push":
            check_push(schedule, rank, routes, indices)
            continue
        tight = ROUTES[exchange].arrays(schedule, rank)
        np.testing.assert_array_equal(route["kv_rows"][:used], tight["kv_rows"][:used])
        np.testing.assert_array_equal(route["sum_ptr"], tight["sum_ptr"])
        np.testing.assert_array_equal(route["sum_rows"][: tight["sum_ptr"][-1]], tight["sum_rows"])
        assert np.isin(route["kv_rows"][used:], tight["kv_rows"][:used] if used else [0]).all()
    assert len(sizes) == 1


def check_push(schedule: Any, rank: int, routes: list[Any], indices: Any) -> None:
    used = int(schedule.expanded[rank])
    filled = min(ROOM.rows, used + 256) if used else 0
    got = np.full(ROOM.rows, -1)
    for owner, route in enumerate(routes):
        stop = route["ends"][2]
        for row, target in zip(route["sends"][:stop], route["targets"][:stop], strict=True):
            if target >> 32 == rank:
                assert got[target & 0xFFFFFFFF] == -1
                got[target & 0xFFFFFFFF] = owner * schedule.local_rows + row
    np.testing.assert_array_equal(got[:used], gathered_route(schedule, rank)["kv_rows"][:used])
    # What a kernel may load past the end is tokens of this rank; after that nothing is written.
    mine = got[used:filled]
    assert (mine // schedule.local_rows == rank).all()
    assert (np.concatenate(indices[rank])[mine % schedule.local_rows] >= 0).all()
    assert (got[filled:] == -1).all()
    tight, route = push_route(schedule, rank, cut=False), routes[rank]
    np.testing.assert_array_equal(route["holder_ptr"], tight["holder_ptr"])
    sums = slice(tight["holder_ptr"][-1])
    np.testing.assert_array_equal(route["holders"][sums], tight["holders"][sums])
    assert len(route["expanded"]) == len(route["copied"]) == route["capacity"][0] == ROOM.rows
    assert not route["place"].any()


def test_what_does_not_fit_is_named() -> None:
    schedule, _ = make_schedule([Documents.from_lengths([30, 15, 15, 4])], 2, "contiguous", PackedMask())
    with pytest.raises(ValueError, match=re.escape("capacity.rows is 20, but this batch needs 34 on some rank")):
        fixed_tables(schedule, 0, PackedMask(), Capacity(8, 8, 20))
    with pytest.raises(ValueError, match=re.escape("capacity.pieces is 2, but this batch needs 3 on some rank")):
        fixed_tables(schedule, 0, PackedMask(), Capacity(8, 2, 400))
    with pytest.raises(TypeError, match=re.escape("capacity.rows must be a whole number, got 4.5")):
        Capacity(3, 3, 4.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("capacity.pieces must be >= 2, got 0")):
        Capacity(3, 0, 4)
    with pytest.raises(TypeError, match="capacity must be a cp_rewrite"):
        cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), capacity=7)  # type: ignore[arg-type]


def test_batches_share_buffers() -> None:
    sharding = cp.Sharding(1, {"x": 0}, cp.CuSeqlens("cu_seqlens"), capacity=Capacity(4, 8, 64))
    seen = []
    for lengths in ([5, 3], [2, 2, 4], [8]):
        x, cu = torch.arange(8.0) + len(lengths), torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        with sharding.shard({"x": x, "cu_seqlens": cu, "flag": 3}) as local:
            tables = [active_plan(sharding).tensor(key) for key in site_inputs(PackedMask(), "local")]
            assert torch.equal(local["x"], x)
            assert local["cu_seqlens"].tolist() == [*cu.tolist(), *[8] * (5 - len(cu))]
            assert torch.equal(tables[0][: len(cu)], cu)
            seen.append([t.data_ptr() for t in (*tables, local["x"], local["cu_seqlens"])])
    assert seen[0] == seen[1] == seen[2]
    assert len(buffers_of(sharding).keys) == len(seen[0]) + 1  # x as the model reads it
    many = torch.tensor([0, 1, 2, 3, 4, 8], dtype=torch.int32)
    bad: dict[str, tuple[str, Any]] = {
        "capacity.documents is 4, cu_seqlens has 5": ("cu_seqlens", many),
        "flag must not change from batch to batch: it was 3, is 4": ("flag", 4),
        "with capacity, x keeps its shape and dtype, (8,)": ("x", torch.arange(8)),
        "with capacity, x is copied to a buffer, so it can't require a gradient": ("x", torch.ones(8).requires_grad_()),
    }
    for message, (name, value) in bad.items():
        batch = {"x": torch.ones(8), "cu_seqlens": cu, "flag": 3, name: value}
        with pytest.raises(ValueError, match=re.escape(message)), sharding.shard(batch):
            pass


def test_buffers_live_as_long_as_an_annotation_that_uses_them() -> None:
    first, second = (cp.Sharding(1, {"x": 0}, cp.CuSeqlens("cu"), capacity=Capacity(4, 8, 65)) for _ in range(2))
    buffers = weakref.ref(buffers_of(first))
    assert buffers_of(second) is buffers()
    copied = copy.deepcopy(second)
    assert copied == second
    del first
    gc.collect()
    assert buffers() is not None
    del second
    gc.collect()
    assert buffers() is None
    assert not buffers_of(copied).keys


@pytest.mark.parametrize("outside", [False, True])
def test_a_backward_after_the_next_batch_is_an_error_of_ours(outside: bool) -> None:
    sharding = cp.Sharding(1, {"x": 0}, cp.CuSeqlens("cu"), inner="eager", capacity=Capacity(5, 8, 64))
    torch._dynamo.reset()
    model: Any = torch.compile(Offsets(lambda h, cu, d: h[:, 0] ** 2), backend=cp.backend(sharding), fullgraph=True)
    batch = {"x": torch.arange(14), "cu": torch.tensor([0, 5, 14]), "weight": torch.arange(14.0)}
    with sharding.shard(batch) as local:
        weight = local.pop("weight")
        out = model(**local)
        loss = (out * weight).sum() if outside else out.sum()
    with pytest.raises(RuntimeError) as raised, sharding.shard(batch):
        loss.backward()
    said = "".join((str(raised.value), *getattr(raised.value, "__notes__", ())))
    assert "cp_rewrite: with capacity, batches share their tensors" in said


def run_fixed(mesh: DeviceMesh, batches_: list[dict[str, Tensor]]) -> list[tuple[float, dict[str, Tensor]]]:
    room = Capacity(documents=16, pieces=24, rows=400)
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="aot_eager", capacity=room)
    model = build_model("tiny")
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    results, addresses = [], set()
    for batch in batches_:
        model.zero_grad()
        with sharding.shard(batch, shift_labels=True) as local:
            loss = compiled(**local).loss
            addresses.add(tuple(active_plan(sharding).tensor(key).data_ptr() for key in buffers_of(sharding).keys
                                if isinstance(key, PlanInput)))  # fmt: skip
        total, grads = step_of_ranks(model, loss, sharding)
        results.append((total, grads if sharding.rank == 0 else {}))
    assert len(addresses) == 1
    return results


def test_steps_match_one_process(pool: Pool) -> None:
    rows = [make_batch([lengths]) for lengths in ([40, 23, 1, 56], [120], [7] * 17 + [1], [60, 60])]
    for batch, (loss, grads) in zip(rows, pool.run(2, run_fixed, rows)[0], strict=True):
        expected, wanted = plain_step("tiny", batch)
        assert abs(loss - expected) <= LIMIT * abs(expected)
        assert all(relative_error(grads[name], wanted[name]) <= LIMIT for name in wanted)


def other_documents(lengths: list[list[int]]) -> dict[str, Tensor]:
    """Rows of 24 tokens with documents of these lengths."""
    batch = packed_model.packed_batch(len(lengths), 24)
    rows = [torch.tensor(row) for row in lengths]
    batch["doc_ids"] = torch.stack([torch.repeat_interleave(torch.arange(len(row)), row) for row in rows])
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(int(n)) for n in row]) for row in rows])
    return batch


MOVING = {
    "neighbours": (test_neighbours.Neighbours, ["short_conv", "roll", "turned", "dilated_conv", "of_transformers"]),
    "fewer": (test_fewer_tokens.Fewer, ["silu_before_slice", "differences", "dpo", "two"]),
    "scans": (test_scans.model_of, ["cumsum", "of_equal_ones", "joined", "from_behind"]),
}


def run_moving(mesh: DeviceMesh, case: str, batches_: list[dict[str, Tensor]]) -> list[tuple[float, dict[str, Tensor]]]:
    room = Capacity(documents=16, pieces=24, rows=400)
    sharding = cp.Sharding(
        mesh, packed_model.TOKENS, cp.DocumentIds("doc_ids"), "balanced", inner="aot_eager", capacity=room
    )
    torch._dynamo.reset()
    make, names = MOVING[case]
    model = make(names).double()
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    results, addresses = [], set()
    for batch in batches_:
        model.zero_grad()
        with sharding.shard(batch) as local:
            loss = compiled(**local)
            addresses.add(tuple(active_plan(sharding).tensor(key).data_ptr() for key in buffers_of(sharding).keys
                                if isinstance(key, PlanInput)))  # fmt: skip
        loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss.item() / (1 if is_part(loss) else mesh.size()), grads))
    assert len(addresses) == 1
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", MOVING)
@pytest.mark.parametrize("ranks", [2, 3])
def test_moved_tokens_and_running_sums_match_one_process(pool: Pool, case: str, ranks: int) -> None:
    rows = [[[9, 8, 7], [24]], [[24], [3] * 8], [[1, 1, 20, 2], [12, 12]]]
    found = pool.run(ranks, run_moving, case, [*map(other_documents, rows)])
    make, names = MOVING[case]
    for i, lengths in enumerate(rows):
        model = make(names).double()
        loss = model(**other_documents(lengths))
        loss.backward()
        assert sum(results[i][0] for results in found) == pytest.approx(loss.item(), rel=1e-9)
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(found[0][i][1][name], p.grad, rtol=1e-7, atol=1e-9, msg=name)


def test_masks_and_exchanges_that_need_the_host_are_refused() -> None:
    assert all(fits(mask) for mask in MASKS)
    assert not any(fits(PackedMask(False, window)) for window in ((3, 5), (3, None), (None, 5)))
    sharding = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), capacity=ROOM)
    batch = make_batch([[10, 6]])
    ring = dataclasses.replace(sharding, exchange="p2p")
    refused = cp.explain(build_model("tiny"), ring, shift_labels=True)(**batch)
    assert "EXCHANGE: p2p: with capacity, rows travel by all_gather, or by needed where GPUs" in str(refused)
    assert "all_gather: capacity is set" in str(cp.explain(build_model("tiny"), sharding, shift_labels=True)(**batch))


class Offsets(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Attention in documents that offsets tell apart. `read`: (tokens, offsets, each token's document) -> a loss."""

    def __init__(self, read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(20, 8), read

    def forward(self, x: Tensor, cu: Tensor) -> Tensor:
        index = torch.arange(x.shape[0])
        document = torch.searchsorted(cu, index, right=True) - 1
        h = self.table(x)
        mask = (document[:, None] == document[None]) & (index[:, None] >= index)
        h = torch.nn.functional.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], mask)[0, 0]
        return self.read(h, cu, document)


def reads_of_offsets() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def place(h: Tensor, cu: Tensor, d: Tensor) -> Tensor:
        return (h * (torch.arange(len(h)) - cu[d])[:, None]).sum()

    return {
        "place": place,
        "length": lambda h, cu, d: (h / cu.diff()[d][:, None]).sum() + (h / (cu[1:] - cu[:-1])[d][:, None]).sum(),
        "tokens": lambda h, cu, d: h.sum() / cu[-1],
        "checkpointed": lambda h, cu, d: checkpoint(place, h, cu, d, use_reentrant=False),  # type: ignore[return-value]
        "ends": lambda h, cu, d: h[cu[1:] - 1].mean(),
        "count": lambda h, cu, d: h.sum() / (len(cu) - 1),
        "mean_length": lambda h, cu, d: h.sum() / cu.diff().float().mean(),
        "last_begins": lambda h, cu, d: h.sum() / cu[:-1][-1],
        "checkpointed_ends": lambda h, cu, d: checkpoint(  # type: ignore[return-value]
            lambda h, cu: h[cu[1:] - 1].mean(), h, cu, use_reentrant=False
        ),
    }


@pytest.mark.parametrize("name", reads_of_offsets())
def test_offsets_that_are_filled_up_are_not_counted(name: str) -> None:
    model, capacity = Offsets(reads_of_offsets()[name]), Capacity(5, 8, 64)
    sharding = cp.Sharding(2, {"x": 0}, cp.CuSeqlens("cu"), exchange="all_gather", capacity=capacity)
    torch._dynamo.reset()
    report = cp.explain(model, sharding)(x=torch.arange(14), cu=torch.tensor([0, 5, 14]))
    expected = set[str]() if name in ("place", "length", "tokens", "checkpointed") else {"CAPACITY"}
    assert {refusal.reason.name for refusal in report.refusals} == expected, str(report)
