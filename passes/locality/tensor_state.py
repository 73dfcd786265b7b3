"""What the locality check knows of a tensor: where its tokens are, as a value.

Every claim compares a rank's tensor `x_l` with the tensor `x` of the one-process program:

    REPLICATED     x_l == x
    Rows(dims)     x_l holds, along the token dim, this rank's tokens of x; along the batch dim all batch rows
    Partial()      the sum of x_l over the ranks is x
    WHOLE          x_l == x, and the gradient that comes to x_l is x's; of REPLICATED it is a part of x's on each rank
    UNKNOWN        a refusal stands before it; nothing more is said about it
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy
import torch.fx as fx

from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import expression, simplified

Size = int | sympy.Expr


@dataclass(frozen=True)
class AtMost:
    """A whole number up to this one, no more is known: the id of a token of no document."""

    bound: int


Number = float | int | bool | AtMost


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


Factor = Axis | Order | int | sympy.Expr
Dim = tuple[Factor, ...] | None
"""None: an ordinary dim. Otherwise its factors, major first: (T,) tokens, (B, T) flattened rows, (B, T, 4) four
entries per token. An ordinary dim has no axis among its factors."""
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Rows:
    """A tensor with one token dim.

    Two kinds of rows are no tokens of documents: those that fill a rank up (`pad`), which are no tokens of the batch
    either, and tokens of the batch that its packing leaves out (`gap`, `attended`).

    Args:
        dims: the axes in each dim. T stands in exactly one.
        pad: the value in every row that fills a rank up, when it is known; None when not.
        iota: the node that made it, when the tensor is still `arange` over its token dim.
        places: the values are indices of the shard's rows of these axes; they mean nothing as numbers.
        key: the tensor holds the very values that its rows are sorted by.
        gap: the value in every row of a token of no document, when it is known; None when not.
        attended: rows of tokens of no document hold something else than in the one-process program, since attention
            leaves such tokens out, whatever the model's mask says of them.
    """

    dims: Dims
    pad: Number | None = None
    iota: fx.Node | None = None
    places: tuple[Factor, ...] | None = None
    key: bool = False
    gap: Number | None = None
    attended: bool = False

    @property
    def token_dim(self) -> int:
        return next(i for i, dim in enumerate(self.dims) if has(dim, T))


@dataclass(frozen=True)
class Partial:
    """A per-rank part of a sum over tokens. `reduced`: of WHOLE, which is summed over the ranks already."""

    reduced: bool = False


WHOLE = Partial(reduced=True)
"""The same on all ranks, and so is its gradient. Where no gradient reaches it, it is REPLICATED."""


@dataclass(frozen=True)
class Deferred:
    """The result of an op that is not the same on a shard, harmless until something but an assertion reads it."""

    detail: str


@dataclass(frozen=True)
class GroupSizes:
    """How many of the shard's rows have each key of an order; `ends`: their running sum."""

    order: Order
    ends: bool = False


class Known(Enum):
    REPLICATED = "replicated"
    UNKNOWN = "unknown"


REPLICATED, UNKNOWN = Known.REPLICATED, Known.UNKNOWN
TensorState = Rows | Partial | Deferred | GroupSizes | Known


class Mixes(Exception):
    """An op that is not the same on a shard. Caught where the op's node is known."""

    def __init__(self, detail: str, reason: Reason = Reason.TOKEN_MIXING) -> None:
        super().__init__(detail)
        self.detail, self.reason = detail, reason


SHIFT_HINT = (
    "shift labels over the global row before they are cut: sharding.shard(batch, shift_labels=True), "
    "and give the model shift_labels"
)
TABLE_HINT = "takes as many rows of a table as the shard has tokens: index the table by position_ids"
MEAN_HINT = "return sums and use cp.token_mean(sum, count, sharding), or divide a sum by num_items_in_batch"


@dataclass(frozen=True)
class Extents:
    """Sizes of the axes in this graph. `tokens` and `batch` may be symbols or, in a graph of fixed shapes, numbers.

    `aliases` are other symbols for the token count: with `mark_dynamic` each argument brings its own.
    """

    tokens: Size
    batch: Size
    aliases: tuple[sympy.Expr, ...] = ()
    shape_env: Any = None

    @property
    def static(self) -> bool:
        """The graph was captured for one token count, so numbers made from it can't be told from constants."""
        return isinstance(self.tokens, int)

    def size(self, value: Any) -> Size:
        """A size as a number or an expression in one symbol for the token count."""
        if isinstance(value, int):
            return int(value)
        expr = simplified(self.shape_env, expression(value))
        if self.aliases:
            expr = expr.xreplace(dict.fromkeys(self.aliases, self.tokens))
        return int(expr) if expr.is_Integer else expr

    def of(self, factor: Factor) -> Size:
        if isinstance(factor, Order):
            return functools.reduce(operator.mul, (self.of(part) for part in factor.axis))  # type: ignore[return-value]
        return self.tokens if factor is T else self.batch if factor is B else factor  # type: ignore[return-value]

    def counts_tokens(self, value: Any) -> bool:
        """Whether a number of the graph was made from the token count."""
        if not hasattr(value, "node") or self.static:
            return False
        expr = self.size(value)
        return isinstance(expr, sympy.Expr) and self.tokens in expr.free_symbols

    def is_made_of_tokens(self, value: Any) -> bool:
        """Whether a size is the token count, or made from it."""
        size = self.size(value)
        return size == self.tokens if isinstance(size, int) else self.tokens in size.free_symbols

    def label(self, sizes: Sequence[Size]) -> Dims | None:
        """Dims of a tensor all of whose rows are equal, known by their sizes alone; None when it has no token dim."""
        rows = [i for i, size in enumerate(sizes) if size == self.tokens and size != 1]
        flat = [i for i, size in enumerate(sizes) if size == self.tokens * self.batch and self.batch != 1]
        if len(rows) + len(flat) > 1:
            raise Mixes(f"a tensor of shape ({', '.join(map(short, sizes))}) has the token count in two dims")
        if not rows and not flat:
            if any(isinstance(size, sympy.Expr) and self.tokens in size.free_symbols for size in sizes):
                raise Mixes(f"a tensor of shape ({', '.join(map(short, sizes))}) has a size made from the token count")
            return None
        dims: list[Dim] = [None] * len(sizes)
        if flat:
            dims[flat[0]] = (B, T)
            return tuple(dims)
        dims[rows[0]] = (T,)
        batch = [i for i in range(rows[0]) if sizes[i] == self.batch and self.batch != 1]
        if batch:
            dims[batch[-1]] = (B,)
        return tuple(dims)


def short(size: Any) -> str:
    """A size as a person reads it: one with floors and remainders fills a page."""
    return text if len(text := str(size)) < 40 else "…"


def has(dim: Dim, axis: Axis) -> bool:
    return dim is not None and any(axis in f.axis if isinstance(f, Order) else f is axis for f in dim)


def plain(state: Rows) -> Rows:
    """The same rows with nothing known about their values."""
    return Rows(state.dims)


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
                    f"({'x'.join(map(_name, best))} against {'x'.join(map(_name, dim)) if dim else size})",
                    Reason.TOKEN_MIXING if dim else Reason.POSITION_GENERATOR,
                )
    return best


def broadcast(tensors: Sequence[Sequence[tuple[Dim, Size]]]) -> list[Dim]:
    """Dims of the result of broadcasting tensors, given as (dim, size) of each of their dims."""
    ndim = max(map(len, tensors))
    return [merge([entries[i - ndim] for entries in tensors if len(entries) >= ndim - i]) for i in range(ndim)]


def regroup(dims: Dims, sizes: Sequence[Size], target: Sequence[Size], extents: Extents) -> Dims:
    """Dims after a view of `sizes` as `target`.

    (B,) (T,) 8      -> view(-1, 8) ->  (B, T) 8
    (B, T) 8         -> view(b, -1, 2, 4) ->  (B,) (T,) 2 4
    """
    factors: list[tuple[Factor, Size]] = []
    for dim, size in zip(dims, sizes, strict=True):
        if dim is not None:
            factors += [(factor, extents.of(factor)) for factor in dim]
        elif size != 1:
            factors.append((size, size))
    factors.reverse()
    return tuple(_take(factors, size) for size in target)


def _take(factors: list[tuple[Factor, Size]], size: Size) -> Dim:
    """Factors off the end of the list that make up `size`."""
    taken: list[Factor] = []
    left: Size = size
    while left != 1:
        if not factors:
            raise Mixes("views tokens in a way that can't be followed")
        factor, extent = factors.pop()
        if (rest := _quotient(left, extent)) is not None:
            taken.append(factor)
            left = rest
        elif not isinstance(factor, Axis | Order) and (rest := _quotient(extent, left)) is not None:
            taken.append(left)
            factors.append((rest, rest))
            left = 1
        else:
            raise Mixes(f"a view cuts the {_name(factor)} dim into pieces ({short(extent)} as {short(size)})")
    return tuple(taken) if any(isinstance(factor, Axis | Order) for factor in taken) else None


def _quotient(a: Size, b: Size) -> Size | None:
    """a / b when it is a whole number or a product of symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.sympify(a) / b
    if not ratio.is_integer:
        return None
    return int(ratio) if ratio.is_Integer else ratio


def _name(factor: Factor) -> str:
    if isinstance(factor, Order):
        return "sorted rows"
    return "token" if factor is T else "batch" if factor is B else str(factor)
