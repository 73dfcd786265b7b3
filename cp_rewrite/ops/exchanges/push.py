"""The exchange `push`: what `needed` moves, by one-sided writes into the peers' memory.

These ops run before and after the kernel; `ops/pushed.py` moves rows while it works. Rows that the route says may
be read in place are copied here, for a kernel takes one tensor of expanded rows. `planning/routes/push.py` tells what
the tables hold, `kernels/peers.py` how ranks wait for each other.

Shapes: R local rows, E expanded rows, Hkv key heads, D and V head dims of k and v, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import peers
from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.ops.local_rows import pack_kv, packed_width, split_kv
from cp_rewrite.ops.schemas import bind
from cp_rewrite.planning.names import PlaceRow
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.routes.push import PUSH

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::push_rows", mutates_args=())
def push_rows(
    k: Tensor, v: Tensor,
    expanded: Tensor, sends: Tensor, targets: Tensor, ends: Tensor,
    copied: Tensor, partners: Tensor, capacity: Tensor, place: Tensor, group: str, after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(E, C) expanded rows from all ranks' k (R, Hkv, D) and v (R, Hkv, V); only rows that some piece needs travel.

    `after` is not read: see `exchange_kv`.
    """
    at = PlaceRow(*place.tolist())
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    if int(capacity):
        with nvtx("exchange"):
            push = peers.Push(k, v, sends, targets, ends, copied, partners, capacity, group)
            push.to_peers(peers.WHOLE_GPU)
            push.own_rows()
            if not at.whole:
                return push.rows.clone()
    rows = pack_kv(*(x[at.source : at.source + at.whole] for x in (k, v)))
    return torch.cat([rows, rows.new_zeros(expanded.shape[0] - at.whole, rows.shape[1])])


@push_rows.register_fake
def _(k: Tensor, v: Tensor, expanded: Tensor, *_: Any) -> Tensor:
    return k.new_empty(expanded.shape[0], packed_width(k, v))


@custom_op("cp_rewrite::return_pushed", mutates_args=())
def return_pushed(
    dkv: Tensor, copied: Tensor, partners: Tensor, capacity: Tensor, place: Tensor,
    holder_ptr: Tensor, holders: Tensor,
    size: int, heads: int, dim: int, dim_v: int, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk (size, heads, dim) and dv (size, heads, dim_v): sums over all ranks' expanded gradients (E, C), in fp32, in a
    fixed order, rounded once to dkv's dtype. `size` is R; `copied`, `capacity` and `place` are on the host."""
    dk, dv = dkv.new_empty(size, heads, dim), dkv.new_empty(size, heads, dim_v)
    at = PlaceRow(*place.tolist())
    here = slice(at.source, at.source + at.whole)
    for grad, part in zip((dk, dv), split_kv(dkv, heads, dim, dim_v), strict=True):
        grad[here] = part[: at.whole]
    if int(capacity):
        with nvtx("exchange_backward"):
            expanded = dkv[: copied.shape[0]]
            back = peers.Return(expanded, partners, capacity, holder_ptr, holders, group)
            back.rows.copy_(expanded)
            back.written()
            back.sum_up(dk, dv, here)
    else:
        zero_others((dk, dv), here)
    return dk, dv


@return_pushed.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    x = bind(_ops.return_pushed.default, inputs)
    return x.dkv.new_empty(x.size, x.heads, x.dim), x.dkv.new_empty(x.size, x.heads, x.dim_v)


def zero_others(grads: Sequence[Tensor], here: slice) -> None:
    """No gradient goes to local rows other than `here`: no piece of any rank reads them."""
    for grad in grads:
        grad[: here.start] = 0
        grad[here.stop :] = 0


def take(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows."""
    x = PUSH.bind(route)
    there = x.expanded, x.sends, x.targets, x.ends, x.copied, x.partners, x.capacity, x.place
    return _ops.push_rows.default(k, v, *there, exchange.group, after)


def give_back(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """dk and dv, in dkv's dtype."""
    x = PUSH.bind(route)
    back = x.copied, x.partners, x.capacity, x.place, x.holder_ptr, x.holders
    return _ops.return_pushed.default(dkv, *back, *k.shape, v.shape[2], exchange.group)
