"""Exchange, attention and gradients on the GPUs of one host, against fp32 attention over the whole row on one."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import AttentionSpec, choose, device_facts
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.exchange import ROUTES
from cp_rewrite.pull import pull_route
from cp_rewrite.schedule import Schedule
from tests.packed import make_schedule
from tests.tolerances import relative_error, tolerance

HEADS, HEADS_KV, DIM = 8, 2, 64
GAPS = Documents.from_cu_seqlens([0, 640, 673, 2000], 2600, [0, 704, 768, 2200])
CASES = (
    (Documents.from_lengths([700, 33, 1, 1500, 300]), "balanced", PackedMask()),
    (Documents.from_lengths([2000, 48], 2600), "dual_chunk", PackedMask()),
    (
        Documents.from_cu_seqlens([0, 640, 673, 2000], 2600, [0, 704, 768, 2200]),
        "contiguous",
        PackedMask(False, (90, 40)),
    ),
)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
def test_attention_across_gpus() -> None:
    world_size = min(4, torch.cuda.device_count())
    mp.spawn(run_rank, (world_size, free_port(), "cuda"), nprocs=world_size)  # type: ignore[no-untyped-call]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_rank(rank: int, world_size: int, port: int, device_type: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    exchanges = ("pull", "needed", "all_gather") if device_type == "cuda" else ("needed", "all_gather")
    for documents, layout, mask in CASES:
        for exchange in exchanges:
            for keep_kv in (False, True):
                check(rank, world_size, device, documents, layout, mask, exchange, keep_kv)
    dist.barrier()
    dist.destroy_process_group()


def check(
    rank: int,
    world_size: int,
    device: torch.device,
    documents: Documents,
    layout: str,
    mask: PackedMask,
    exchange: str,
    keep_kv: bool,
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = choose(AttentionSpec(dtype, DIM, DIM, HEADS, HEADS_KV), device_facts(device))
    assert choice.kernel is not None
    params = Params(DIM**-0.5)
    schedule, indices = make_schedule([documents], world_size, layout, mask)
    index = torch.from_numpy(indices[rank][0]).to(device)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(documents.total, heads, DIM, generator=generator).to(dtype).to(device)
        for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)
    ]
    valid = index >= 0
    # Rows that hold no token hold NaN: nothing may read them.
    local = [x[index].masked_fill(~valid[:, None, None], torch.nan) for x in whole]
    q, k, v = (x.requires_grad_() for x in local[:3])
    tables, route = tensors(schedule, rank, exchange, device)
    where = exchange, dist.group.WORLD.group_name, world_size  # type: ignore[union-attr]
    out, _ = attend(q, k, v, tables, route, where, params, choice.kernel, keep_kv)
    out.backward(local[3])
    expected = oracle(whole, documents, mask, params)
    for name, got, want in zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), expected, strict=True):
        assert got is not None
        error = relative_error(got[valid], want[index[valid]])
        assert error <= tolerance(dtype), f"{exchange}, {layout}, {name}: {error:.2e}"
    assert not out[~valid].any()


def tensors(
    schedule: Schedule, rank: int, exchange: str, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tables, route) of one rank, on its device but for what stays on the host."""
    route = pull_route(schedule, rank) if exchange == "pull" else schedule.route(exchange, rank)
    arrays = {**schedule.attention(rank), **{name: route[name] for name in ROUTES[exchange]}}
    host = ("pieces", "launches", "splits", "capacity")
    moved = [torch.from_numpy(a) if n in host else torch.from_numpy(a).to(device) for n, a in arrays.items()]
    return moved[:4], moved[4:]


def oracle(
    whole: list[torch.Tensor], documents: Documents, mask: PackedMask, params: Params
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv of the whole row, in fp32 on this device."""
    schedule, _ = make_schedule([documents], 1, "contiguous", mask)
    tables = Tables(*(torch.from_numpy(a) for a in schedule.attention(0).values()))
    rows = torch.from_numpy(schedule.route("local", 0)["kv_rows"]).to(whole[0].device).long()
    q, k, v, dout = (x.float() for x in whole)
    out, lse = reference.forward(q, k[rows], v[rows], tables, params)
    dq, dk, dv = reference.backward(dout, q, k[rows], v[rows], out, lse, tables, params)
    return out, dq, *(torch.zeros_like(x).index_add_(0, rows, grad) for x, grad in ((k, dk), (v, dv)))
