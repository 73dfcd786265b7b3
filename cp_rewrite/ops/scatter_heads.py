"""Tokens gathered, heads scattered, and back: visible all-to-alls and row orders around any attention.

    before    rank 0: tokens A, all heads        rank 1: tokens B, all heads
    after     rank 0: tokens A B, heads 0        rank 1: tokens A B, heads 1

Functions that work on tensors and on graph proxies, differentiable. Queries, keys and values travel in one all-to-all,
outputs in another. `planning/routes/head_deal.py` says who gets which heads, `grid.py` beside it how rows are sorted.

Shapes: R local rows, A ranks of the all-to-all, Hq and Hkv heads of the model, hq and hkv heads of a rank, D and V head
dims of qk and v.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.planning.routes.head_deal import HeadDeal

from . import local_rows

importlib.import_module("torch.distributed._functional_collectives")  # registers collectives' gradients
_c10d: Any = torch.ops._c10d_functional
_ops: Any = torch.ops.cp_rewrite
_pad: Any = torch.nn.functional.pad


@custom_op("cp_rewrite::permute_rows", mutates_args=())
def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """(N, C): row i is x[order[i]]. `order` and `inverse` are (at least N,) int32, permutations inverse to each other.

    Its gradient is the same op with `order` and `inverse` exchanged.
    """
    return local_rows.gather_rows(x, order[: x.shape[0]])


@permute_rows.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, order, inverse = inputs
    ctx.save_for_backward(order, inverse)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return _ops.permute_rows.default(dy, inverse, order), None, None


permute_rows.register_autograd(_backward, setup_context=_setup_context)


@dataclass(frozen=True)
class HeadScatter:
    """Between whom heads are scattered. Args: deal: who gets which. dims: (D, V). group: name of the ranks' group."""

    deal: HeadDeal
    dims: tuple[int, int]
    group: str


def scatter_heads(q: Any, k: Any, v: Any, order: Any, inverse: Any, heads: HeadScatter) -> tuple[Any, Any, Any]:
    """q (R, Hq, D), k (R, Hkv, D), v (R, Hkv, V) -> (A R, hq, D), (A R, hkv, D), (A R, hkv, V), rows sorted by `order`.

    Gradients of copied key/value heads are summed over their copies in fp32, by torch's own sum.
    """
    deal, (dim, dim_v) = heads.deal, heads.dims
    parts = [_split(deal_queries(q, deal), deal), _split(_copy(k, deal), deal), _split(_copy(v, deal), deal)]
    # One copy puts parts together and sorts them by rank, as does one in the gradient of the split below.
    sent = torch.cat([part.transpose(0, 1) for part in parts], 2).contiguous()
    x = _all_to_all(sent, deal.ranks, heads.group).flatten(0, 1)
    x = _ops.permute_rows.default(x, order, inverse)
    counts = deal.local, deal.local_kv, deal.local_kv
    found = x.split([count * width for count, width in zip(counts, (dim, dim, dim_v), strict=True)], 1)
    q, k, v = (found[i].unflatten(1, (count, -1)) for i, count in enumerate(counts))
    return q, k, v


def gather_heads(out: Any, order: Any, inverse: Any, heads: HeadScatter) -> Any:
    """The way back: (A R, hq, V) -> (R, Hq, V)."""
    deal = heads.deal
    x = _ops.permute_rows.default(out.flatten(1), inverse, order).unflatten(0, (deal.ranks, -1))
    x = _all_to_all(x, deal.ranks, heads.group)
    return _undeal_queries(x.transpose(0, 1).flatten(1).unflatten(1, (deal.ranks * deal.local, -1)), deal)


def own_sinks(sinks: Any, heads: HeadScatter) -> Any:
    """(Hq,) -> (hq,), those of this rank's heads. All ranks hold the same; rank 0's copy gets the gradient."""
    deal = heads.deal
    dealt = deal_queries(sinks[None, :, None], deal).unflatten(1, (deal.ranks, -1)).flatten(2)[0].contiguous()
    return _all_to_all(dealt, deal.ranks, heads.group)[0]


def _all_to_all(x: Any, ranks: int, group: str) -> Any:
    """(A, …) contiguous: part a goes to rank a. Returns (A, …): what rank a had for this rank."""
    return _c10d.wait_tensor.default(_c10d.all_to_all_single.default(x, [1] * ranks, [1] * ranks, group))


def deal_queries(q: Any, deal: HeadDeal) -> Any:
    """(R, Hq, D) -> (R, A hq, D): each group padded to its copies' parts, then heads to an equal deal."""
    missing = deal.copies * deal.part - deal.group
    if missing:
        q = _pad(q.unflatten(1, (deal.heads_kv, deal.group)), (0, 0, 0, missing)).flatten(1, 2)
    extra = deal.ranks * deal.local - deal.heads_kv * deal.copies * deal.part
    return _pad(q, (0, 0, 0, extra)) if extra else q


def _undeal_queries(x: Any, deal: HeadDeal) -> Any:
    """(R, A hq, V) -> (R, Hq, V): the inverse of `deal_queries`."""
    units, part = deal.heads_kv * deal.copies, deal.part
    x = x.narrow(1, 0, units * part).unflatten(1, (deal.heads_kv, deal.copies * part))
    return x.narrow(2, 0, deal.group).flatten(1, 2)


def _copy(x: Any, deal: HeadDeal) -> Any:
    """(R, Hkv, D) -> (R, A hkv, D)."""
    if deal.copies > 1:
        x = x.unsqueeze(2).expand(-1, -1, deal.copies, -1).flatten(1, 2)
    extra = deal.ranks * deal.local_kv - deal.heads_kv * deal.copies
    return _pad(x, (0, 0, 0, extra)) if extra else x


def _split(x: Any, deal: HeadDeal) -> Any:
    """(R, A h, D) -> (R, A, h D)."""
    return x.unflatten(1, (deal.ranks, -1)).flatten(2)
