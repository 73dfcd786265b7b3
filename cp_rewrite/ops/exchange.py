"""How key and value rows travel: from each rank's own rows to the expanded rows that its pieces read, and back.

Every exchange is a pair of plain functions over ops, in the file of `exchanges/` that has its name. The rewrite calls
`exchange_kv` on graph proxies, the backward of attention calls both on tensors: one spelling. Rows of an exchange whose
route is `in_steps` (`p2p`) travel inside an attention op instead, and those of `push` do where the kernel runs in
parts: see `attend`. `exchange_tokens` does the same for rows of whatever tensor: one head of keys and one of values are
the two parts of a row.

Shapes: R local rows, E expanded rows, Hkv key heads, D and V head dims of k and v, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.ops.schemas import bind, gradients, keep, kept
from cp_rewrite.planning.names import PieceRow
from cp_rewrite.planning.routes.by_exchange import ROUTES, Exchange

_ops: Any = torch.ops.cp_rewrite
_CHUNK = 16
"""Bytes: rows that GPUs write into each other's memory are made of such chunks (`kernels/peers.py`)."""


class Carrier(Protocol):
    """A file of `exchanges/`."""

    def take(self, k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None, /) -> Any:
        """`exchange_kv`, of k and v cut off from gradients."""
        ...

    def give_back(
        self, dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange, /
    ) -> tuple[Tensor, Tensor]:
        """`return_kv`."""
        ...


CARRIERS: dict[str, Carrier] = {
    kind: cast("Carrier", import_module(f"cp_rewrite.ops.exchanges.{kind}"))
    for kind, route in ROUTES.items()
    if not route.in_steps
}
"""Kind of exchange -> the file of its name."""


def exchange_kv(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows of this rank's pieces, from all ranks' k (R, Hkv, D) and v (R, Hkv, V).

    Not differentiable: attention's backward calls `return_kv`. Works on tensors and on graph proxies.

    Args:
        route: the tensors of `exchange.route`, in order.
        after: not read; rows travel after it is there. The backward names the gradient that it needs the rows for:
            without it a compiler may move the exchange up, hold the rows of all layers at once, and do so on some ranks
            only, or take it for the forward's (common subexpression) and keep the forward's rows.
    """
    return CARRIERS[exchange.kind].take(k.detach(), v.detach(), route, exchange, after)


def return_kv(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Gradients of k (R, Hkv, D) and v (R, Hkv, V), in fp32 or as wide as dkv, from those of the expanded rows (E, C)
    of all ranks."""
    return CARRIERS[exchange.kind].give_back(dkv, k, v, route, exchange)


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
