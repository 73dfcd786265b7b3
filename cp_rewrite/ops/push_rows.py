"""The exchange of exactly the needed rows over symmetric memory (`kernels/peers/`), as ops. See `routes/push.py`.

`push.NAMES` lists a route's tensors in the order in which these ops take them. Shapes: R local rows, E expanded rows,
C = Hkv * (D + V). Rows that `pushed_attention` reads in place are copied here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import peers
from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.planning.routes.push import NAMES

from .rows import pack_kv, split_kv

_ops: Any = torch.ops.cp_rewrite
PUSHED = slice(NAMES.index("sends"), NAMES.index("place"))
RETURNED = slice(NAMES.index("copied"), NAMES.index("stages"))
STAGES = slice(NAMES.index("stages"), None)
"""Of a route's tensors: those of the push, of the return, and of the kernel's two parts."""


@custom_op("cp_rewrite::push_rows", mutates_args=())
def push_rows(
    k: Tensor,
    v: Tensor,
    expanded: Tensor,
    sends: Tensor,
    targets: Tensor,
    ends: Tensor,
    copied: Tensor,
    partners: Tensor,
    capacity: Tensor,
    place: Tensor,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """(E, C) expanded rows from all ranks' k (R, Hkv, D) and v (R, Hkv, V); only rows that some piece needs travel.

    `after` is not read: see `exchange_rows`.
    """
    source, _, count = place.tolist()
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    if int(capacity):
        with nvtx("exchange"):
            push = peers.Push(k, v, sends, targets, ends, copied, partners, capacity, group)
            push.to_peers(peers.WHOLE_GPU)
            push.own_rows()
            if not count:
                return push.rows.clone()
    rows = pack_kv(*(x[source : source + count] for x in (k, v)))
    return torch.cat([rows, rows.new_zeros(expanded.shape[0] - count, rows.shape[1])])


@push_rows.register_fake
def _(k: Tensor, v: Tensor, expanded: Tensor, *_: Any) -> Tensor:
    return k.new_empty(expanded.shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::return_pushed", mutates_args=())
def return_pushed(
    dkv: Tensor,
    copied: Tensor,
    partners: Tensor,
    capacity: Tensor,
    place: Tensor,
    holder_ptr: Tensor,
    holders: Tensor,
    size: int,
    heads: int,
    dim: int,
    dim_v: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """dk (size, heads, dim) and dv (size, heads, dim_v): sums over all ranks' expanded gradients (E, C), in fp32, in a
    fixed order, rounded once to dkv's dtype. `size` is R; `copied`, `capacity` and `place` are on the host."""
    dk, dv = dkv.new_empty(size, heads, dim), dkv.new_empty(size, heads, dim_v)
    source, _, count = place.tolist()
    here = slice(source, source + count)
    for grad, part in zip((dk, dv), split_kv(dkv, heads, dim, dim_v), strict=True):
        grad[here] = part[:count]
    if int(capacity):
        with nvtx("exchange_backward"):
            rows = peers.gradient_rows(dkv[: copied.shape[0]], capacity, group)
            rows.copy_(dkv[: copied.shape[0]])
            peers.return_rows(rows, partners, capacity, here, holder_ptr, holders, dk, dv, group)
    else:
        zero_others((dk, dv), here)
    return dk, dv


@return_pushed.register_fake
def _(dkv: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    size, heads, dim, dim_v = args[6:10]
    return dkv.new_empty(size, heads, dim), dkv.new_empty(size, heads, dim_v)


def zero_others(grads: Sequence[Tensor], here: slice) -> None:
    """No piece of any rank reads other keys than local rows `here`."""
    for grad in grads:
        grad[: here.start] = 0
        grad[here.stop :] = 0


def push_kv(k: Any, v: Any, route: Sequence[Any], group: str, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows. `route` is in the order of `push.NAMES`. Works on tensors and on graph proxies."""
    return _ops.push_rows.default(k, v, *route[: NAMES.index("holder_ptr")], group, after)


def return_kv(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], group: str) -> tuple[Tensor, Tensor]:
    """dk and dv, shaped and typed like k (R, Hkv, D) and v (R, Hkv, V)."""
    return _ops.return_pushed.default(dkv, *route[RETURNED], k.shape[0], k.shape[1], k.shape[2], v.shape[2], group)
