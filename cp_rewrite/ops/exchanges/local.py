"""The exchange `local`: one rank has all rows, and nothing travels.

Shapes: R local rows, E expanded rows, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.ops.local_rows import packed_after, split_kv
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.routes.gathered import LOCAL

_ops: Any = torch.ops.cp_rewrite


def take(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows of one rank."""
    return _ops.gather_rows.default(packed_after(k, v, after), LOCAL.bind(route).kv_rows)


def give_back(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """fp32 gradients of k and v."""
    x = LOCAL.bind(route)
    total = _ops.sum_rows(dkv, x.sum_ptr, x.sum_rows, k.shape[0])
    return split_kv(total, k.shape[1], k.shape[2], v.shape[2])
