"""Sizes of the axes in one graph, the dims that follow from sizes, and numbers that are made from the token count:
T - 1, T // 2, 1 / T, max(T, 8)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch import Tensor

from cp_rewrite.passes.values.sizes import token_count
from cp_rewrite.planning.token_reads.token_count import TokenCount
from cp_rewrite.torch_internals import expression, simplified

from .dims import Axis, B, Dim, Dims, Factor, Fewer, Mixes, Order, Size, T, name, short


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
        """Whether a number of the graph, a comparison, or a size, was made from the token count."""
        if not hasattr(value, "node"):
            return False
        expr = self.size(value)
        return isinstance(expr, sympy.Basic) and self.tokens in expr.free_symbols

    def token_count(self, value: Any) -> TokenCount | None:
        """A number of the graph as one of the whole row; None: it is made otherwise."""
        return token_count(self.size(value), self.tokens)

    def counted(self, value: Any) -> Any:
        """A number of the graph as an int, or an expression in the symbol of its token count, see `of_row`.

        Raises:
            Mixes: it is made in a way that is not followed.
        """
        expr: Any = self.size(value)
        if isinstance(expr, int):
            return expr
        functions = {f.func.__name__ for f in expr.atoms(Application)}
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
    """The value of such a number, `tokens` its symbol, for a row of (1,) tokens: a number, or a tensor of no dims."""
    if isinstance(expr, int):
        return expr
    return sympy.lambdify([tokens], expr, [_FUNCTIONS])(row_tokens.select(0, 0))


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else float(x)


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(*(torch.as_tensor(x) for x in (a, b)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: a // b,
    "PythonMod": lambda a, b: a % b,
    "Mod": lambda a, b: a % b,
    "IntTrueDiv": lambda a, b: _wide(a) / _wide(b),
    "FloatTrueDiv": lambda a, b: a / b,
    "FloatPow": lambda a, b: a**b,
    "ToFloat": _wide,
    "Max": _of_two(torch.maximum),
    "Min": _of_two(torch.minimum),
    "OpaqueUnaryFn_sqrt": lambda a: _wide(a).sqrt(),
    "OpaqueUnaryFn_log": lambda a: _wide(a).log(),
}
"""What Python's numbers are made with, by torch's names, as functions of numbers and tensors of no dims."""
