"""Claims that the locality check makes of a tensor: where its tokens are, as a value.

Every claim compares a rank's tensor `x_l` with the tensor `x` of the one-process program:

    REPLICATED     x_l == x
    Rows(dims)     x_l holds, along the token dim, this rank's tokens of x; along the batch dim all batch rows
    Partial()      the sum of x_l over the ranks is x
    WHOLE          x_l == x, and the gradient that comes to x_l is x's; of REPLICATED it is a part of x's on each rank
    Moved(pieces)  what x is made of is known; x_l is not used
    Owned(group)   x_l holds some of x's entries in dim 0, each rank of the group others: of weights of experts
    UNKNOWN        a refusal stands before it; nothing more is said about it

Before them stands what they are made of:

    Dim, Dims, broadcast    the dims of a tensor, by the axes that they count: tokens, rows of the batch, both, or
                            neither
    Extents, regroup        sizes of the axes in one graph, and the dims that follow from sizes
    of_row                  numbers that are made from the token count: T - 1, T // 2, 1 / T, max(T, 8)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.values.sizes import token_count
from cp_rewrite.planning.row_map import RowMap, TokenCount
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import expression, simplified

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
    """True if a dim counts an axis; one of fewer tokens counts tokens, too."""
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


@dataclass(frozen=True)
class Extents:
    """Sizes of the axes in this graph."""

    tokens: Size
    batch: Size
    shape_env: Any = None

    def size(self, value: Any) -> Size:
        """A size as a number or an expression in one symbol for the token count."""
        if isinstance(value, int):
            return int(value)
        expr = simplified(self.shape_env, expression(value))
        return int(expr) if expr.is_Integer else expr

    def of(self, factor: Factor) -> Size:
        if isinstance(factor, Order):
            return functools.reduce(operator.mul, (self.of(part) for part in factor.axis))  # type: ignore[return-value]
        if isinstance(factor, Fewer):
            return self.tokens - factor.by  # type: ignore[return-value]
        return self.tokens if factor is T else self.batch if factor is B else factor  # type: ignore[return-value]

    def counts_tokens(self, value: Any) -> bool:
        """True if a number of the graph, a comparison, or a size, was made from the token count."""
        if not hasattr(value, "node"):
            return False
        expr = self.size(value)
        return isinstance(expr, sympy.Basic) and self.tokens in expr.free_symbols

    def token_count(self, value: Any) -> TokenCount | None:
        """A number of the graph as one of the whole row; None: it is made otherwise."""
        return token_count(self.size(value), self.tokens)

    def counted(self, value: Any) -> Any:
        """A number or comparison of the graph as an int, or an expression in the symbol of its tokens, see `of_row`.

        Raises:
            Mixes: it is made in a way that is not followed.
        """
        expr: Any = self.size(value)
        if isinstance(expr, int):
            return expr
        functions = {part.func.__name__ for part in sympy.preorder_traversal(expr) if part.args}
        if expr.free_symbols != {self.tokens} or functions - _FUNCTIONS.keys():
            raise Mixes("the number is made from the token count in a way that is not followed")
        return expr

    def label(self, sizes: Sequence[Size], several: bool = False) -> Dims | None:
        """Dims of a tensor all of whose rows are equal, known by their sizes alone; None when it has no token dim.

        several: it may have several rows for each token, (B, T, k) in its first dim.
        """
        if several and sizes and (axis := self.several_per_token(sizes[0])) and not self._counts(sizes[1:]):
            return (axis, *[None] * (len(sizes) - 1))
        rows = [i for i, size in enumerate(sizes) if size == self.tokens and size != 1]
        flat = [i for i, size in enumerate(sizes) if size == self.tokens * self.batch and self.batch != 1]
        if len(rows) + len(flat) > 1:
            raise Mixes(f"a tensor of shape ({', '.join(map(short, sizes))}) has the token count in two dims")
        if not rows and not flat:
            if self._counts(sizes):
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

    def several_per_token(self, size: Size) -> Dim:
        """(B, T, k) of a dim with k entries for each token; None of others."""
        each: Any = size / (self.tokens * self.batch)  # type: ignore[operator]
        if each in (0, 1) or not each.is_Integer:
            return None
        axis: Sequence[Any] = (T,) if self.batch == 1 else (B, T)
        return (*axis, int(each))

    def _counts(self, sizes: Sequence[Size]) -> bool:
        return any(isinstance(size, sympy.Expr) and self.tokens in size.free_symbols for size in sizes)


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
        elif not isinstance(factor, Axis | Order | Fewer) and (rest := _quotient(extent, left)) is not None:
            taken.append(left)
            factors.append((rest, rest))
            left = 1
        else:
            raise Mixes(f"a view cuts the {name(factor)} dim into pieces ({short(extent)} as {short(size)})")
    return tuple(taken) if any(isinstance(factor, Axis | Order | Fewer) for factor in taken) else None


def _quotient(a: Size, b: Size) -> Size | None:
    """a / b when it is a whole number or a product of symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.sympify(a) / b
    ratio = sympy.cancel(ratio) if isinstance(b, sympy.Add) else ratio
    if not ratio.is_integer:
        return None
    return int(ratio) if ratio.is_Integer else ratio


def of_row(expr: Any, tokens: Any, row_tokens: Tensor) -> Any:
    """The value of such a number or comparison, `tokens` its symbol, for a row of (1,) tokens: a number, or a tensor of
    no dims."""
    if expr == tokens:
        return row_tokens.select(0, 0)
    if not isinstance(expr, sympy.Basic):
        return expr
    if not expr.args:
        kind = bool if expr in (sympy.true, sympy.false) else int if expr.is_Integer else float
        return kind(expr)
    return _FUNCTIONS[expr.func.__name__](*(of_row(arg, tokens, row_tokens) for arg in expr.args))


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else float(x)


def _of_tensors(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *args: functools.reduce(function, (torch.as_tensor(x) for x in args))


def _of_float(name: str) -> Callable[[Any], Any]:
    return lambda a: getattr(torch, name)(torch.as_tensor(_wide(a)))


def _to_int(name: str) -> Callable[[Any], Any]:
    return lambda a: getattr(torch, name)(torch.as_tensor(_wide(a))).to(torch.int64)


def _power(a: Any, b: Any) -> Any:
    return a**b if isinstance(b, int) and b >= 0 else _wide(a) ** b


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *args: functools.reduce(operator.add, args),
    "Mul": lambda *args: functools.reduce(operator.mul, args),
    "Pow": _power,
    "PowByNatural": lambda a, b: a**b,
    "FloatPow": lambda a, b: _wide(a) ** b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "PythonMod": lambda a, b: a % b,
    "Mod": lambda a, b: a % b,
    "IntTrueDiv": lambda a, b: _wide(a) / _wide(b),
    "FloatTrueDiv": lambda a, b: a / b,
    "ToFloat": _wide,
    "Abs": abs,
    "Max": _of_tensors(torch.maximum),
    "Min": _of_tensors(torch.minimum),
    "FloorToInt": _to_int("floor"),
    "CeilToInt": _to_int("ceil"),
    "TruncToInt": _to_int("trunc"),
    "RoundToInt": _to_int("round"),
    **{
        f"OpaqueUnaryFn_{name}": _of_float(name)
        for name in (
            "sqrt log log2 log10 log1p exp exp2 expm1 sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh erf "
            "erfc lgamma"
        ).split()
    },
    "StrictGreaterThan": operator.gt,
    "StrictLessThan": operator.lt,
    "GreaterThan": operator.ge,
    "LessThan": operator.le,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "And": _of_tensors(torch.logical_and),
    "Or": _of_tensors(torch.logical_or),
    "Not": lambda a: torch.logical_not(torch.as_tensor(a)),
}
"""Functions that Python's numbers are made with, by the names of sympy's and torch's classes; they take numbers and
tensors of no dims."""


@dataclass(frozen=True)
class AtMost:
    """A whole number up to this one, no more is known: the id of a token of no document."""

    bound: int


Number = float | int | bool | AtMost


@dataclass(frozen=True)
class Rows:
    """A tensor with one token dim.

    Two kinds of rows are no tokens of documents: those that fill a rank up (`fill`), which are no tokens of the batch
    either, and tokens of the batch that its packing leaves out (`padding`, `attended`).

    Args:
        dims: the axes in each dim. T stands in exactly one.
        fill: the value in every row that fills a rank up, when it is known; None when not.
        iota: the node that made it, when the tensor is still `arange` over its token dim.
        table: the node that took them, when the tensor is still the first T rows of a table.
        shard_rows: the values are indices of the shard's rows of these axes; they mean nothing as numbers.
        key: the tensor holds the very values that its rows are sorted by.
        padding: the value in every row of a token of no document, when it is known; None when not.
        attended: rows of tokens of no document hold something else than in the one-process program, since attention
            leaves such tokens out, whatever the model's mask says of them.
    """

    dims: Dims
    fill: Number | None = None
    iota: fx.Node | None = None
    shard_rows: tuple[Factor, ...] | None = None
    key: bool = False
    padding: Number | None = None
    attended: bool = False
    table: fx.Node | None = None

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
class Owned:
    """A weight of which each rank of a group has its own part: `group` is the name by which graphs know it."""

    group: str


@dataclass(frozen=True)
class Deferred:
    """The result of an op that is not the same on a shard, harmless until something but an assertion reads it."""

    detail: str


@dataclass(frozen=True)
class GroupSizes:
    """How many of the shard's rows have each key of an order; `ends`: their running sum."""

    order: Order
    ends: bool = False


@dataclass(frozen=True)
class Taps:
    """A convolution over tokens: entry i of its result is made of the entries i … i + span - 1 of its padded operand,
    which are `entries` of the source."""

    node: fx.Node
    entries: RowMap
    span: int


@dataclass(frozen=True)
class Moved:
    """Entries of the whole row's token dim in other places, as of a shift: no rank has them until something reads them.

        x[:, :-1]                              [0, T - 1) of x
        cat([zero, x[:, :-1]], 1)              1 entry of zero, [0, T - 1) of x

    Args:
        source: a tensor with `rows`.
        entries: of the token dim, of the source's; of a node that is the same on all ranks; or of a number.
        taps: the entries are of this convolution of the source.
    """

    source: fx.Node
    rows: Rows
    entries: RowMap
    taps: Taps | None = None


class Known(Enum):
    REPLICATED = "replicated"
    UNKNOWN = "unknown"


REPLICATED, UNKNOWN = Known.REPLICATED, Known.UNKNOWN
TensorState = Rows | Partial | Deferred | GroupSizes | Moved | Owned | Known


def joined(a: Any, b: Any) -> Any:
    """The state of a tensor that is like either of two states, or of several tensors; UNKNOWN: nothing is known."""
    if a == b:
        return a
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [joined(*each) for each in zip(a, b, strict=True)]
    if not isinstance(a, Rows) or not isinstance(b, Rows):
        return UNKNOWN
    fill, padding = (a.fill if a.fill == b.fill else None), (a.padding if a.padding == b.padding else None)
    facts = {"fill": fill, "padding": padding, "attended": a.attended or b.attended}
    return replace(a, **facts) if replace(a, **facts) == replace(b, **facts) else UNKNOWN


def plain(state: Rows) -> Rows:
    """The same rows with nothing known about their values."""
    return Rows(state.dims)
