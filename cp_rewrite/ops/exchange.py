"""How key and value rows travel: from each rank's own rows to the expanded rows its pieces read, and back.

An exchange is a pair of plain functions over ops, `exchange_kv` and `return_kv`. The rewrite calls `exchange_kv`
on graph proxies, the backward of attention calls both, and the op layer calls them on tensors: one spelling.

Shapes: R local rows, E expanded rows, P ranks, C = Hkv * (D + Dv). `route` holds the tensors of
`Schedule.route(exchange)`, in that order:

    local       kv_rows, sum_ptr, sum_rows
    all_gather  kv_rows, sum_ptr, sum_rows
    needed      kv_rows, send_rows, splits, sum_ptr, sum_rows, return_ptr, return_rows
    push        `push.NAMES`; moves what `needed` moves, by writing into the peers' memory; inside `pushed_attention`
                where the kernel runs in parts, so that rows travel beside it
    p2p         `ring_schedule.ROUTE`; rows go round inside `ring_attention`, not here
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import custom_op

from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.planning.routes.push import NAMES as PUSH_NAMES
from cp_rewrite.planning.routes.ring import ROUTE as RING_NAMES

from . import push_rows as push
from . import rows
from .rows import pack_kv, split_kv

ROUTES: dict[str, tuple[str, ...]] = {
    "local": ("kv_rows", "sum_ptr", "sum_rows"),
    "all_gather": ("kv_rows", "sum_ptr", "sum_rows"),
    "needed": ("kv_rows", "send_rows", "splits", "sum_ptr", "sum_rows", "return_ptr", "return_rows"),
    "push": PUSH_NAMES,
    "p2p": RING_NAMES,
}
"""Names of a route's tensors, per exchange, in the order in which ops take them."""

_c10d: Any = torch.ops._c10d_functional
_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::exchange_rows", mutates_args=())
def exchange_rows(
    k: Tensor,
    v: Tensor,
    kv_rows: Tensor,
    send_rows: Tensor,
    splits: Tensor,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """Only the rows that some piece needs travel, by one all-to-all-v; then they are expanded.

    Args:
        k, v: (R, Hkv, D) and (R, Hkv, Dv), this rank's rows.
        kv_rows: (E,) int32 into the R local rows followed by the received rows, in order of source rank.
        send_rows: int32, local rows to send, by destination rank; entries past the sum of `splits[0]` are filling.
        splits: (2, P) int64 on the host: rows sent to, and received from, each rank.
        group: name of the process group.
        after: not read; the exchange happens after it is there. The backward names the gradient that it needs the rows
            for: without it a compiler may move the exchange up, hold the rows of all layers at once, and do so on
            some ranks only, or take it for the forward's (common subexpression) and keep the forward's rows.
    Returns:
        (E, C) expanded rows.
    """
    send, recv = splits.tolist()
    local = pack_kv(k, v)
    with nvtx("exchange"):
        received = _all_to_all(rows.gather_rows(local, send_rows[: sum(send)]), recv, send, group)
    return rows.gather_rows(torch.cat([local, received]), kv_rows)


@exchange_rows.register_fake
def _(k: Tensor, v: Tensor, kv_rows: Tensor, *_: Any) -> Tensor:
    return k.new_empty(kv_rows.shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::return_rows", mutates_args=())
def return_rows(
    dkv: Tensor,
    send_rows: Tensor,
    splits: Tensor,
    sum_ptr: Tensor,
    sum_rows: Tensor,
    return_ptr: Tensor,
    return_rows: Tensor,
    size: int,
    group: str,
) -> Tensor:
    """The transpose of `exchange_rows`: gradients of expanded rows (E, C), summed per row, sent home and summed there.

    Sums are in fp32 and in the fixed order of their lists. `size` is R. Returns (R, C) in fp32 (fp64 for fp64).
    """
    send, recv = splits.tolist()
    partial = rows.sum_rows(dkv, sum_ptr, sum_rows, size + sum(recv))
    own, foreign = partial.split([size, sum(recv)])
    with nvtx("exchange_backward"):
        returned = _all_to_all(foreign, send, recv, group)
    return rows.sum_rows(torch.cat([own, returned]), return_ptr, return_rows, size)


@return_rows.register_fake
def _(
    dkv: Tensor,
    send_rows: Tensor,
    splits: Tensor,
    sum_ptr: Tensor,
    sum_rows: Tensor,
    return_ptr: Tensor,
    return_rows: Tensor,
    size: int,
    group: str,
) -> Tensor:
    return dkv.new_empty(size, dkv.shape[1], dtype=torch.promote_types(dkv.dtype, torch.float32))


def exchange_kv(
    k: Any, v: Any, route: Sequence[Any], exchange: str, group: str, world_size: int, after: Tensor | None = None
) -> Any:
    """(E, C) expanded rows of this rank's pieces, from all ranks' k (R, Hkv, D) and v (R, Hkv, Dv).

    Not differentiable: attention's backward calls `return_kv`. Works on tensors and on graph proxies. `after` as in
    `exchange_rows`.
    """
    k, v = k.detach(), v.detach()
    if exchange == "needed":
        kv_rows, send_rows, splits = route[:3]
        return _ops.exchange_rows.default(k, v, kv_rows, send_rows, splits, group, after)
    if exchange == "push":
        return push.push_kv(k, v, route, group, after)
    kv = pack_kv(k, v) if after is None else _ops.pack_rows.default(k, v, after)
    if exchange == "all_gather":
        kv = _c10d.wait_tensor.default(_c10d.all_gather_into_tensor.default(kv, world_size, group))
    return _ops.gather_rows.default(kv, route[0])


def return_kv(
    dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: str, group: str, world_size: int
) -> tuple[Tensor, Tensor]:
    """fp32 gradients of k (R, Hkv, D) and v (R, Hkv, Dv) from those of the expanded rows (E, C) of all ranks."""
    size = k.shape[0]
    if exchange == "push":
        return push.return_kv(dkv, k, v, route, group)
    if exchange == "needed":
        total = _ops.return_rows(dkv, *route[1:], size, group)
    else:
        total = _ops.sum_rows(dkv, route[1], route[2], size * (world_size if exchange == "all_gather" else 1))
        if exchange == "all_gather":
            total = _c10d.wait_tensor.default(_c10d.reduce_scatter_tensor.default(total, "sum", world_size, group))
    return split_kv(total, k.shape[1], k.shape[2], v.shape[2])


def _all_to_all(send: Tensor, recv_splits: list[int], send_splits: list[int], group: str) -> Tensor:
    received = send.new_empty(sum(recv_splits), send.shape[1])
    dist.all_to_all_single(received, send.contiguous(), recv_splits, send_splits, group=_resolve_process_group(group))
    return received
