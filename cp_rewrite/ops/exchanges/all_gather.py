"""The exchange `all_gather`: all ranks get all rows, by collectives that the graph shows.

Shapes: R local rows, E expanded rows, P ranks, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.ops.local_rows import packed_after, split_kv
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.routes.gathered import ALL_GATHER

_c10d: Any = torch.ops._c10d_functional
_ops: Any = torch.ops.cp_rewrite


def take(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows, of the (P R, C) rows of all ranks."""
    kv = packed_after(k, v, after)
    kv = _c10d.wait_tensor.default(_c10d.all_gather_into_tensor.default(kv, exchange.world_size, exchange.group))
    return _ops.gather_rows.default(kv, ALL_GATHER.bind(route).kv_rows)


def give_back(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Each rank sums its expanded rows' gradients into all ranks' rows, and gets the sum of all ranks' for its own."""
    x, ranks = ALL_GATHER.bind(route), exchange.world_size
    total = _ops.sum_rows(dkv, x.sum_ptr, x.sum_rows, k.shape[0] * ranks)
    total = _c10d.wait_tensor.default(_c10d.reduce_scatter_tensor.default(total, "sum", ranks, exchange.group))
    return split_kv(total, k.shape[1], k.shape[2], v.shape[2])
