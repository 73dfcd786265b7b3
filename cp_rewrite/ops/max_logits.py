"""The largest attention logit of each head, as ops: a figure to watch (or to clip by) beside attention.

Plain torch over the same exchanges and pieces as attention, in fp32: it costs about the queries-times-keys half of an
unfused forward, holds a fixed number of logits at once, and never waits for the device. In a compiled graph its
exchange and attention's are one op with equal inputs, so rows travel once; twice where attention's travel beside its
kernel.

Shapes: R local rows, E expanded rows, Hq = Hkv * n heads, D and V head dims of qk and v, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import reference
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.planning.routes.by_exchange import Exchange

from . import local_rows
from .exchange import exchange_kv
from .ring_attention import go_round
from .scatter_heads import HeadScatter, gather_per_head, scatter_heads

_c10d: Any = torch.ops._c10d_functional
_ops: Any = torch.ops.cp_rewrite


def max_logits(
    q: Any,
    k: Any,
    v: Any,
    tables: Sequence[Any],
    route: Sequence[Any],
    exchange: Exchange,
    params: Params,
    heads: HeadScatter | None = None,
) -> Any:
    """(Hq,) fp32 (fp64 for fp64): the largest logit of each head over all tokens of all ranks, the same on every rank.

    Logits are taken after scale and soft cap, over the pairs that the mask shows; -inf for a head that shows none.
    Sinks are no logits here. Rows of no document are not read. No gradient. Works on tensors and on graph proxies.

    Args: as of `attend`.
    """
    q, k, v = q.detach(), k.detach(), v.detach()
    if heads is not None:
        *route, order, inverse = route
        q, k, v = scatter_heads(q, k, v, order, inverse, heads)
        return gather_per_head(max_logits(q, k, v, tables, route, exchange, params), heads)
    numbers, group, ranks = (params.scale, params.softcap), exchange.group, exchange.world_size
    if exchange.route.in_steps:
        found = _ops.ring_max_logits.default(q, k, *tables, *route, *numbers, group, ranks)
    else:
        kv = exchange_kv(k, v, route, exchange)
        found = _ops.packed_max_logits.default(q, k, kv, *tables, *numbers)
    if ranks == 1:
        return found
    return _c10d.wait_tensor.default(_c10d.all_reduce.default(found, "max", group))


@custom_op("cp_rewrite::packed_max_logits", mutates_args=())
def packed_max_logits(
    q: Tensor,
    k: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    """(Hq,) over this rank's queries q (R, Hq, D) and expanded rows kv (E, C); of k (R, Hkv, D) the shape counts."""
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    keys = kv[:, : k.shape[1] * k.shape[2]].unflatten(1, k.shape[1:])
    return reference.max_logits(q, keys, tables, Params(scale, softcap))


@custom_op("cp_rewrite::ring_max_logits", mutates_args=())
def ring_max_logits(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    kv_rows: Tensor,
    sum_ptr: Tensor,
    sum_rows: Tensor,
    rounds: Tensor,
    scale: float,
    softcap: float,
    group: str,
    world_size: int,
) -> Tensor:
    """(Hq,) over this rank's queries q (R, Hq, D) and all keys of their documents, whose k (R, Hkv, D) go round."""
    tables, route = (cu_seqlens_q, cu_seqlens_k, pieces, launches), (kv_rows, sum_ptr, sum_rows, rounds)
    found = q.new_full((q.shape[1],), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for held, r in go_round(k.flatten(1).contiguous(), tables, route, group, world_size):
        keys = local_rows.gather_rows(held, r.kv_rows).unflatten(1, k.shape[1:])
        found = torch.maximum(found, reference.max_logits(q, keys, r.tables, Params(scale, softcap)))
    return found


@packed_max_logits.register_fake
@ring_max_logits.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
