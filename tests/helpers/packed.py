"""Packed cases for tests: schedules as tensors, and dense attention as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import attend
from cp_rewrite.planning.layouts.by_name import lay_out
from cp_rewrite.planning.routes.by_exchange import ROUTES, Exchange
from cp_rewrite.planning.schedule import Schedule, build


def make_schedule(
    rows: Sequence[Documents], world_size: int, layout: str, mask: PackedMask
) -> tuple[Schedule, list[np.ndarray[Any, Any]]]:
    """The schedule, and per rank the (B, T_l) indices of its tokens, -1 for none."""
    orders = [lay_out(row, world_size, layout, mask) for row in rows]
    size = max(order.local_size for order in orders)
    indices = [np.stack([_padded(order.local_indices(rank), size) for order in orders]) for rank in range(world_size)]
    return build(rows, orders, mask), indices


def _padded(index: Any, size: int) -> Any:
    return np.pad(index, (0, size - len(index)), constant_values=-1)


def tensors(schedule: Schedule, rank: int, exchange: str) -> tuple[list[Tensor], list[Tensor]]:
    """(tables, route) of one rank."""
    route, tables = ROUTES[exchange], schedule.attention(rank)
    arrays = {**tables, **route.arrays(schedule, rank)}
    return [torch.from_numpy(arrays[n]) for n in tables], [torch.from_numpy(arrays[n]) for n in route.names]


def run_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    rank: int,
    exchange: Exchange,
    params: Params,
    keep_kv: bool = False,
) -> Tensor:
    """Attention output (R, Hq, Dv) of one rank from its own rows."""
    tables, route = tensors(schedule, rank, exchange.kind)
    return attend(q, k, v, tables, route, exchange, params, "reference", keep_kv)[0]


def dense_attention(
    q_RHD: Tensor,
    k_RHD: Tensor,
    v_RHV: Tensor,
    rows: Sequence[Documents],
    mask: PackedMask,
    params: Params,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with a dense mask over rows of (B * T) tokens; rows that see no key give 0. The oracle.

    `sinks` (Hq,) is the logit of one more key per head, whose value is 0.
    """
    logits = dense_logits(q_RHD, k_RHD, rows, mask, params)
    tokens, group = logits.shape[2], q_RHD.shape[1] // k_RHD.shape[1]
    seen = (logits[0] > -torch.inf).any(-1)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)], -1)
    prob = logits.softmax(-1)[..., :tokens].masked_fill(~seen[:, None], 0.0)
    return torch.einsum("hqk,khv->qhv", prob, v_RHV.repeat_interleave(group, 1))


def dense_logits(q_RHD: Tensor, k_RHD: Tensor, rows: Sequence[Documents], mask: PackedMask, params: Params) -> Tensor:
    """(Hq, Q, K) logits of rows of (B * T) tokens after scale and soft cap, -inf where the mask hides the key."""
    total = rows[0].total
    keep = torch.zeros(len(rows) * total, len(rows) * total, dtype=torch.bool)
    for b, row in enumerate(rows):
        span = slice(b * total, (b + 1) * total)
        keep[span, span] = torch.from_numpy(mask.materialize(row))
    group = q_RHD.shape[1] // k_RHD.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q_RHD, k_RHD.repeat_interleave(group, 1)) * params.scale
    if params.softcap:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    return logits.masked_fill(~keep, -torch.inf)


def in_documents(x: Tensor, rows: Sequence[Documents]) -> Tensor:
    """x (B * T, …) with zeros for padding, where attention's output is a copy of another row's (`fill_gaps`)."""
    keep = torch.from_numpy(np.concatenate([documents.document_ids() >= 0 for documents in rows])).to(x.device)
    return torch.where(keep.view(-1, *[1] * (x.ndim - 1)), x, 0.0)
