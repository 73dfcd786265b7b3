"""The exchange of exactly the needed rows over symmetric memory, as ops. See `kernels/symm.py` and `push.py`.

`push.NAMES` lists a route's tensors in the order in which these ops take them. Shapes: R local rows, E expanded rows,
C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.nvtx import nvtx
from cp_rewrite.push import NAMES

_ops: Any = torch.ops.cp_rewrite
PUSHED = slice(NAMES.index("holder_ptr"))
RETURNED = slice(NAMES.index("partners"), NAMES.index("stages"))
STAGES = slice(NAMES.index("stages"), None)
"""Of a route's tensors: those of the push, of the return, and of the kernel's two parts."""


@custom_op("cp_rewrite::push_rows", mutates_args=())
def push_rows(
    k: Tensor,
    v: Tensor,
    sends: Tensor,
    targets: Tensor,
    ends: Tensor,
    expanded: Tensor,
    partners: Tensor,
    capacity: Tensor,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """(E, C) expanded rows from all ranks' k (R, Hkv, D) and v (R, Hkv, V); only rows that some piece needs travel.

    `after` is not read: see `exchange_rows`.
    """
    from cp_rewrite.kernels import symm

    k, v = symm.dense_rows(k), symm.dense_rows(v)
    with nvtx("exchange"):
        push = symm.Push(k, v, sends, targets, ends, expanded, partners, capacity, group)
        push.to_peers(symm.FULL)
        push.own_rows()
        return push.rows.clone()


@push_rows.register_fake
def _(k: Tensor, v: Tensor, sends: Tensor, targets: Tensor, ends: Tensor, expanded: Tensor, *_: Any) -> Tensor:
    return k.new_empty(expanded.shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::return_pushed", mutates_args=())
def return_pushed(
    dkv: Tensor,
    partners: Tensor,
    capacity: Tensor,
    holder_ptr: Tensor,
    holders: Tensor,
    size: int,
    heads: int,
    dim: int,
    dim_v: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """dk (size, heads, dim) and dv (size, heads, dim_v): sums over all ranks' expanded gradients (E, C), in fp32, in a
    fixed order, rounded once to dkv's dtype. `size` is R; `capacity` (1,) is on the host."""
    from cp_rewrite.kernels import symm

    with nvtx("exchange_backward"):
        rows = symm.gradient_rows(dkv, capacity, group).copy_(dkv)
        return symm.return_rows(rows, partners, capacity, holder_ptr, holders, heads, (dim, dim_v), group)


@return_pushed.register_fake
def _(
    dkv: Tensor,
    partners: Tensor,
    capacity: Tensor,
    holder_ptr: Tensor,
    holders: Tensor,
    size: int,
    heads: int,
    dim: int,
    dim_v: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return dkv.new_empty(size, heads, dim), dkv.new_empty(size, heads, dim_v)


def push_kv(k: Any, v: Any, route: Sequence[Any], group: str, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows. `route` is in the order of `push.NAMES`. Works on tensors and on graph proxies."""
    return _ops.push_rows.default(k, v, *route[PUSHED], group, after)


def return_kv(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], group: str) -> tuple[Tensor, Tensor]:
    """dk and dv, shaped and typed like k (R, Hkv, D) and v (R, Hkv, V)."""
    return _ops.return_pushed.default(dkv, *route[RETURNED], k.shape[0], k.shape[1], k.shape[2], v.shape[2], group)
