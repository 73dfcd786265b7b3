"""Rows of tokens, of whatever tensor, by the exchange that keys and values would take: one head of keys and one of
values are the two parts of a row.

Shapes: R local rows, E expanded rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.ops.exchange import exchange_kv, return_kv
from cp_rewrite.ops.schemas import bind, gradients, keep, kept
from cp_rewrite.planning.columns import PieceRow
from cp_rewrite.planning.routes.by_exchange import Exchange

_ops: Any = torch.ops.cp_rewrite
_CHUNK = 16
"""Bytes: rows that GPUs write into each other's memory are made of such chunks (`kernels/peers/reasons.py`)."""


@custom_op("cp_rewrite::exchange_tokens", mutates_args=())
def exchange_tokens(
    rows: Tensor, pieces: Tensor, route: Sequence[Tensor], exchange: str, group: str, world_size: int
) -> Tensor:
    """(E, C) rows that this rank's pieces read, a copy for each piece, of all ranks' `rows` (R, C).

    The gradient of a row is the sum over its copies on all ranks.

    Args:
        pieces: of `Schedule.attention`, on the host. route: the tensors of the exchange's route, without a capacity.
        exchange, group, world_size: the fields of an `Exchange`.
    """
    taken = exchange_kv(*halves(rows), route, Exchange(exchange, group, world_size))
    used = int(PieceRow(*pieces.T).k1.max())
    if used < taken.shape[0]:  # tables have two rows at least: what is computed of those that no piece reads is finite
        taken[used:] = rows[:1]
    return taken


@exchange_tokens.register_fake
def _(rows: Tensor, pieces: Tensor, route: Sequence[Tensor], *_: Any) -> Tensor:
    return rows.new_empty(route[0].shape[0], rows.shape[1])  # every route begins with what has E rows


def halves(rows_RC: Tensor) -> tuple[Tensor, Tensor]:
    """A row's two parts, (R, 1, A) and (R, 1, C - A), of whole chunks where C is."""
    unit = max(1, _CHUNK // rows_RC.element_size())
    first = max(1, rows_RC.shape[1] // 2 // unit * unit)
    first = first if first < rows_RC.shape[1] else rows_RC.shape[1] // 2
    return rows_RC[:, None, :first], rows_RC[:, None, first:]


def padded_columns(columns: int, item_bytes: int) -> int:
    """The least number of columns, not less than `columns`, of which both parts are whole chunks."""
    unit = max(1, _CHUNK // item_bytes)
    return max(2, -(-columns // unit)) * unit


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    keep(ctx, **vars(bind(_ops.exchange_tokens.default, inputs)))


def _backward(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    x = kept(ctx)
    parts = return_kv(drows, *halves(x.rows), x.route, Exchange(x.exchange, x.group, x.world_size))
    grad = torch.cat([part.flatten(1) for part in parts], 1).to(x.rows.dtype)
    return gradients(_ops.exchange_tokens.default, x, rows=grad)


exchange_tokens.register_autograd(_backward, setup_context=_setup_context)
