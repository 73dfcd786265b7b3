"""The exchange `needed`: only rows that some piece needs travel, by an all-to-all with a count for every rank.

Shapes: R local rows, E expanded rows, P ranks, C = Hkv * (D + V). `planning/routes/gathered.py` draws the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.ops import local_rows
from cp_rewrite.ops.local_rows import pack_kv, packed_width, split_kv
from cp_rewrite.ops.schemas import bind
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.routes.gathered import NEEDED
from cp_rewrite.torch_internals import process_group

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::exchange_rows", mutates_args=())
def exchange_rows(
    k: Tensor, v: Tensor,
    kv_rows: Tensor, send_rows: Tensor, splits: Tensor, group: str, after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Only the rows that some piece needs travel, by one all-to-all-v; then they are expanded.

    Args:
        k, v: (R, Hkv, D) and (R, Hkv, V), this rank's rows.
        kv_rows, send_rows, splits: of `needed_route` (splits on the host). Of send_rows those past the sum of
            `splits[0]` only fill it up to two.
        group: name of the process group. after: as of `exchange_kv`.
    Returns:
        (E, C) expanded rows.
    """
    send, recv = splits.tolist()
    local = pack_kv(k, v)
    with nvtx("exchange"):
        received = all_to_all_rows(local_rows.gather_rows(local, send_rows[: sum(send)]), recv, send, group)
    return local_rows.gather_rows(torch.cat([local, received]), kv_rows)


@exchange_rows.register_fake
def _(k: Tensor, v: Tensor, kv_rows: Tensor, *_: Any) -> Tensor:
    return k.new_empty(kv_rows.shape[0], packed_width(k, v))


@custom_op("cp_rewrite::return_rows", mutates_args=())
def return_rows(
    dkv: Tensor, send_rows: Tensor, splits: Tensor,
    sum_ptr: Tensor, sum_rows: Tensor, return_ptr: Tensor, return_rows: Tensor,
    size: int, group: str,
) -> Tensor:  # fmt: skip
    """The transpose of `exchange_rows`: gradients of expanded rows (E, C), summed per row, sent home and summed there.

    Sums are in fp32 and in the fixed order of their lists. `size` is R. Returns (R, C) in fp32 (fp64 for fp64).
    """
    send, recv = splits.tolist()
    partial = local_rows.sum_rows(dkv, sum_ptr, sum_rows, size + sum(recv))
    own, foreign = partial.split([size, sum(recv)])
    with nvtx("exchange_backward"):
        returned = all_to_all_rows(foreign, send, recv, group)
    both = torch.cat([own, returned])
    del partial, own, foreign, returned  # as large as what follows
    return local_rows.sum_rows(both, return_ptr, return_rows, size)


@return_rows.register_fake
def _(*inputs: Any) -> Tensor:
    x = bind(_ops.return_rows.default, inputs)
    return x.dkv.new_empty(x.size, x.dkv.shape[1], dtype=torch.promote_types(x.dkv.dtype, torch.float32))


def take(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows."""
    x = NEEDED.bind(route)
    return _ops.exchange_rows.default(k, v, x.kv_rows, x.send_rows, x.splits, exchange.group, after)


def give_back(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """fp32 gradients of k and v."""
    _, *back = NEEDED.bind(route)
    total = _ops.return_rows.default(dkv, *back, k.shape[0], exchange.group)
    return split_kv(total, k.shape[1], k.shape[2], v.shape[2])


def all_to_all_rows(send: Tensor, recv_splits: list[int], send_splits: list[int], group: str) -> Tensor:
    """(sum(recv_splits), C) rows by source, of rows (sum(send_splits), C) by destination."""
    received = send.new_empty(sum(recv_splits), send.shape[1])
    dist.all_to_all_single(received, send.contiguous(), recv_splits, send_splits, group=process_group(group))
    return received
