"""torch's gradcheck in fp64: ops with a gradient alone, and attention of all ranks together under every exchange.

The ranks together are one function of the whole row, which every rank evaluates at once: rows that all ranks hold are
cut, attended to, and put together again. Rows written into peers' memory (`push`) need GPUs and kernels of half
precision, so they are compared there with fp32 (`test_conformance_gpu.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import Params
from cp_rewrite.masks import PackedMask
from tests.helpers.conformance import attend_on
from tests.helpers.conformance_cells import EXCHANGES, Cell
from tests.helpers.packed import in_documents, make_schedule, tensors
from tests.helpers.pool import Pool

ops: Any = torch.ops.cp_rewrite
ROW = Documents.from_lengths([3, 1, 2], 7)
MASKS = (PackedMask(window=(1, 0)), PackedMask(causal=False, window=(1, 2)))
gradcheck: Any = functools.partial(torch.autograd.gradcheck, rtol=1e-6, atol=1e-7)
"""Central differences with steps of 1e-6 are that good in fp64; the default lets 0.1% through."""


def inputs(heads: int, heads_kv: int) -> list[Tensor]:
    """q, k, v of the whole row and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, heads, 2), (7, heads_kv, 2), (7, heads_kv, 1), (heads,)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]  # type: ignore[arg-type]


class Shared(torch.autograd.Function):
    """A tensor that all ranks hold alike; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """The sum over ranks, which all ranks use alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def gradcheck_on(mesh: DeviceMesh, exchange: str, mask: PackedMask, heads: tuple[int, int], keep_kv: bool) -> bool:
    cell = Cell(
        exchange, "dual_chunk", mask, "none", heads, (2, 1), torch.float64, mesh.size(), True, 1.5, keep_kv=keep_kv
    )
    attention = attend_on(mesh, (ROW,), cell, Params(0.6, 1.5))
    index, group = torch.from_numpy(attention.indices[0]), mesh.get_group()
    mine, real = index.clamp(min=0), index >= 0

    def whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        local = [Shared.apply(x, group)[mine] for x in (q, k, v)]
        out = attention.run(*local, Shared.apply(sinks, group))[0]
        whole = torch.zeros(7, *out.shape[1:], dtype=out.dtype).index_copy(0, index[real], out[real])
        return in_documents(Summed.apply(whole, group), [ROW])

    return gradcheck(whole, inputs(*heads))


def is_slow(exchange: str, mask: PackedMask) -> bool:
    """Scattered heads have a test of their own below, and masks matter most to what travels in part."""
    return "a2a+" in exchange or (exchange not in ("needed", "p2p") and mask != MASKS[0])


@pytest.mark.shared
@pytest.mark.parametrize(
    ("exchange", "mask"),
    [
        pytest.param(exchange, mask, marks=pytest.mark.slow if is_slow(exchange, mask) else ())
        for exchange in EXCHANGES
        for mask in MASKS
    ],
    ids=str,
)
def test_every_exchange(pool: Pool, exchange: str, mask: PackedMask) -> None:
    ranks = 4 if exchange.startswith("a2a+") else 2
    assert all(pool.run(ranks, gradcheck_on, exchange, mask, (2, 1), False))


@pytest.mark.parametrize("exchange", ["needed", "all_gather"])
def test_kept_rows(pool: Pool, exchange: str) -> None:
    assert all(pool.run(2, gradcheck_on, exchange, MASKS[0], (2, 2), True))


@pytest.mark.parametrize(
    "heads",
    [pytest.param((3, 3), marks=pytest.mark.slow), (3, 1)],
    ids=["padded_heads", "copied_and_padded_heads"],
)
def test_scattered_heads(pool: Pool, heads: tuple[int, int]) -> None:
    assert all(pool.run(2, gradcheck_on, "a2a", MASKS[0], heads, False))


def gradcheck_around(mesh: DeviceMesh) -> bool:
    """Gradients around attention: of the mean over all tokens, and of all ranks' outputs in their original order."""
    group, positions = mesh.get_group(), torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    sharding = cp.Sharding(mesh, {"position_ids": 1}, cp.PositionIds("position_ids"), "dual_chunk")
    x = torch.randn(1, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with sharding.shard({"position_ids": positions}) as local:
        index = torch.from_numpy(local.plan.local_indices(mesh.get_local_rank())[0])
        real = index >= 0

        def mean(x: Tensor) -> Tensor:
            mine = Shared.apply(x, group)[0, index[real]]
            return cp.token_mean(mine.pow(3).sum(0), len(mine), sharding)

        def unsharded(x: Tensor) -> Tensor:
            return sharding.unshard(Shared.apply(x, group)[:, index.clamp(min=0)].pow(3), 1)

        assert torch.equal(unsharded(x), x.pow(3))
        return gradcheck(mean, (x,)) and gradcheck(unsharded, (x,))


@pytest.mark.parametrize("ranks", [2, 3])
def test_mean_and_unshard(pool: Pool, ranks: int) -> None:
    assert all(pool.run(ranks, gradcheck_around))


def test_permute_rows() -> None:
    order = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: ops.permute_rows(x, order, order.argsort().int()), (x,))


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("exchange", ["local", "p2p"])
def test_one_rank(exchange: str, mask: PackedMask, softcap: float) -> None:
    """packed_attention and ring_attention alone."""
    tables, route = tensors(make_schedule([ROW], 1, "contiguous", mask)[0], 0, exchange)

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        numbers = (0.6, softcap, "reference", True)
        if exchange == "p2p":
            out = ops.ring_attention(q, k, v, *tables, *route, *numbers, "", 1, sinks)[0]
        else:
            kv = ops.gather_rows(torch.cat([k.detach().flatten(1), v.detach().flatten(1)], 1), route[0])
            out = ops.packed_attention(q, k, v, kv, *tables, route, *numbers, False, "local", "", 1, sinks)[0]
        return in_documents(out, [ROW])

    assert gradcheck(attention, inputs(2, 1))
