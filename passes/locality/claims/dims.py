"""The dims of a tensor, by the axes that they count: tokens, rows of the batch, both, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy

from cp_rewrite.refusal import Reason

Size = int | sympy.Expr


class Axis(Enum):
    """A dim of the batch that sharding cares about."""

    BATCH = "B"
    TOKEN = "T"


B, T = Axis.BATCH, Axis.TOKEN


@dataclass(frozen=True)
class Order:
    """Rows of `axis` in an order of their own: the permutation that the sort of this number put them into."""

    number: int
    axis: tuple[Axis | int | sympy.Expr, ...]


@dataclass(frozen=True)
class Fewer:
    """The row's tokens but for the last `by`, as of x[:, :-1]. A rank has a row for each of its tokens all the same;
    those of the last ones hold anything, as rows do that fill it up. Below 0: there are more than the row's tokens, and
    no rank has those behind the last."""

    by: int


Factor = Axis | Order | Fewer | int | sympy.Expr
Dim = tuple[Factor, ...] | None
"""None: an ordinary dim. Otherwise its factors, major first: (T,) tokens, (B, T) flattened rows, (B, T, 4) four
entries per token. An ordinary dim has no axis among its factors."""
Dims = tuple[Dim, ...]


class Mixes(Exception):
    """An op that is not the same on a shard. Caught where the op's node is known."""

    def __init__(self, detail: str, reason: Reason = Reason.TOKEN_MIXING) -> None:
        super().__init__(detail)
        self.detail, self.reason = detail, reason


def has(dim: Dim, axis: Axis) -> bool:
    """Whether a dim counts an axis; one of fewer tokens counts tokens, too."""
    return dim is not None and any(
        axis in f.axis if isinstance(f, Order) else f is axis or (axis is T and isinstance(f, Fewer)) for f in dim
    )


def fewer(dims: Dims) -> int:
    """How many tokens fewer than the row a tensor with these dims has."""
    return next((f.by for dim in dims for f in dim or () if isinstance(f, Fewer)), 0)


def with_fewer(dims: Dims, by: int) -> Dims:
    """The same dims of so many tokens fewer than the row's."""
    tokens = Fewer(by) if by else T
    return tuple(dim and tuple(tokens if f is T or isinstance(f, Fewer) else f for f in dim) for dim in dims)


def checked(dims: Sequence[Dim]) -> Dims:
    """Dims with the token axis exactly once and the batch axis at most once."""
    tokens = sum(has(dim, T) for dim in dims)
    if tokens > 1:
        raise Mixes("pairs tokens with tokens (a T x T tensor outside an attention mask)")
    if sum(has(dim, B) for dim in dims) > 1:
        raise Mixes("pairs rows of the batch with rows of the batch")
    assert tokens == 1, dims
    return tuple(dims)


def merge(entries: Sequence[tuple[Dim, Size]]) -> Dim:
    """One dim of the result of broadcasting tensors, from that dim (and its size) in each of them."""
    axes = [dim for dim, size in entries if dim is not None and size != 1]
    if not axes:
        return None
    best = max(axes, key=lambda dim: has(dim, T))
    if has(best, T):
        for dim, size in entries:
            if size != 1 and dim != best:
                raise Mixes(
                    f"combines token rows with {'other rows' if dim else 'a tensor that is not cut'} "
                    f"({'x'.join(map(name, best))} against {'x'.join(map(name, dim)) if dim else size})",
                    Reason.TOKEN_MIXING if dim else Reason.POSITION_GENERATOR,
                )
    return best


def broadcast(tensors: Sequence[Sequence[tuple[Dim, Size]]]) -> list[Dim]:
    """Dims of the result of broadcasting tensors, given as (dim, size) of each of their dims."""
    ndim = max(map(len, tensors))
    return [merge([entries[i - ndim] for entries in tensors if len(entries) >= ndim - i]) for i in range(ndim)]


def name(factor: Factor) -> str:
    if isinstance(factor, Order):
        return "sorted rows"
    return "token" if factor is T or isinstance(factor, Fewer) else "batch" if factor is B else str(factor)


def short(size: Any) -> str:
    """A size as a person reads it: one with floors and remainders fills a page."""
    return text if len(text := str(size)) < 40 else "…"
