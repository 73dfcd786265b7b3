"""Symbolic tensors: functions from an index, one expression per dim, to the element there.

    ids[:, None]  ->  SymTensor((B, 1, T), int64, lambda i: ids(i[0], i[2]))

An element is a sympy expression, for bool tensors a sympy Boolean. Booleans have one normal form: And, Or and Not
over relations `difference op 0`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from sympy.logic.boolalg import Boolean

# sympy ships partial types, and its own operators disagree with them.
Expr = Any
Index = tuple[Expr, ...]
Value = Any  # an Expr, or a sympy Boolean for bool tensors

TOKENS = sympy.Symbol("T", integer=True, positive=True)  # tokens of the global row

_COMPARISONS: dict[str, type[sympy.core.relational.Relational]] = {
    "eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge,
}  # fmt: skip
_ON_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


class Undecidable(Exception):
    """An op whose meaning can't be read for these arguments; the message says why."""


class Select(sympy.Function):
    """Select(c, x, y): x where c holds, else y. It stands for sympy's Piecewise, which simplifies at great cost."""

    nargs = (3,)

    @classmethod
    def eval(cls, *args: Any) -> Any:
        condition, x, y = args
        if condition == sympy.true or x == y:
            return x
        if condition == sympy.false:
            return y
        # A running sum that is 0 where it has nothing to add up yet.
        if y == 0 and isinstance(x, RunningSum) and _not_below_0(condition, x.args[2]):
            return running_sum(*x.args)
        if x == 0 and isinstance(y, RunningSum) and _not_below_0(sympy.Not(condition), y.args[2]):
            return running_sum(*y.args)
        return None


def _not_below_0(condition: Any, x: Expr) -> bool:
    """Whether a relation says x >= 0 of an integer."""
    lhs = {sympy.Ge: x, sympy.Gt: x + 1}.get(type(condition))
    return lhs is not None and condition.rhs == 0 and sympy.expand(condition.lhs - lhs) == 0


class RunningSum(sympy.Function):
    """RunningSum(f, j, x): f summed over j = 0 … x, 0 where x < 0."""

    nargs = (3,)


def running_sum(f: Expr, j: Expr, x: Expr) -> Expr:
    """RunningSum(f, j, x) up to an index itself.

    RunningSum(f(j), j, q - 1)  ->  RunningSum(Select(j >= 1, f(j - 1), 0), j, q)
    """
    back = -x.as_coeff_Add()[0]
    if not (back.is_Integer and back > 0):
        return RunningSum(f, j, x)
    return RunningSum(Select(compare("ge", j, back), f.xreplace({j: j - back}), ZERO), j, x + back)


def difference_of(x: Expr, y: Expr) -> Expr:
    """x - y; RunningSum(f, j, q) - f(q) is the sum up to q - 1."""
    if isinstance(x, RunningSum):
        f, j, at = cast(Any, x.args)
        if f.xreplace({j: at}) == y:
            return running_sum(f, j, at - 1)
    return x - y


class RunningMax(sympy.Function):
    """RunningMax(f, j, x): the largest f over j = 0 … x."""

    nargs = (3,)


class SumOver(sympy.Function):
    """SumOver(f, i, n): f summed over i = 0 … n - 1."""

    nargs = (3,)


class RepeatIndex(sympy.Function):
    """RepeatIndex(f, i, n, x): entry x of a row that holds each i = 0 … n - 1 as often as f(i) says.

    f = 2, 0, 3     row = 0 0 2 2 2     at x = 1: 0, at x = 2: 2
    """

    nargs = (4,)


@dataclass(frozen=True, eq=False)
class SymTensor:
    """A tensor as a function of its index. `shape` holds local sizes as sympy expressions."""

    shape: tuple[Expr, ...]
    dtype: torch.dtype
    function: Callable[[Index], Value]
    _known: dict[Index, Value] = field(default_factory=dict)

    def at(self, index: Index) -> Value:
        """The element at `index`, one expression per dim."""
        if index not in self._known:
            self._known[index] = self.function(index)
        return self._known[index]

    def broadcast_at(self, index: Index) -> Value:
        """The element at an index of a shape that this tensor broadcasts to."""
        tail = index[len(index) - len(self.shape) :]
        return self.at(tuple(ZERO if size == 1 else i for size, i in zip(self.shape, tail, strict=True)))


ZERO = sympy.Integer(0)
ONE = sympy.Integer(1)


def number(value: Any) -> Expr:
    """A Python or sympy number; infinities become sympy's."""
    if isinstance(value, float):
        if value in (float("inf"), float("-inf")):
            return sympy.oo if value > 0 else -sympy.oo
        return sympy.Integer(int(value)) if value.is_integer() and abs(value) < 2**53 else sympy.Float(value)
    return sympy.sympify(value)


def is_bool(value: Value) -> bool:
    return isinstance(value, Boolean) and not isinstance(value, sympy.Symbol)


def truth(value: Value) -> Any:
    """A value read as true where nonzero."""
    return value if is_bool(value) else compare("ne", value, ZERO)


def numeric(value: Value) -> Expr:
    """A value read as a number: true is 1."""
    return Select(value, ONE, ZERO) if is_bool(value) else value


def choose(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y, for Boolean and numeric x and y alike."""
    if condition == sympy.true or x == y:
        return x
    if condition == sympy.false:
        return y
    if is_bool(x) and is_bool(y):
        return sympy.Or(sympy.And(condition, x), sympy.And(sympy.Not(condition), y))
    return Select(condition, numeric(x), numeric(y))


def compare(op: str, left: Value, right: Value) -> Any:
    """`left op right` as Boolean algebra over relations `difference op 0`, free of Selects.

    k <= q                   ->  k - q <= 0
    Select(c, 3, k) == 3     ->  c or (not c and k - 3 == 0)
    """
    left, right = numeric(left), numeric(right)
    choice = outer_select(left) or outer_select(right)
    if choice is not None:
        condition, x, y = choice.args
        yes = compare(op, left.xreplace({choice: x}), right.xreplace({choice: x}))
        no = compare(op, left.xreplace({choice: y}), right.xreplace({choice: y}))
        return sympy.Or(sympy.And(condition, yes), sympy.And(sympy.Not(condition), no)) if yes != no else yes
    if left.is_number and right.is_number:
        return sympy.true if _ON_NUMBERS[op](left, right) else sympy.false
    difference = sympy.expand(left - right)
    if difference.is_number and difference.is_finite:
        return sympy.true if _ON_NUMBERS[op](difference, ZERO) else sympy.false
    return _COMPARISONS[op](difference, ZERO, evaluate=False)


def from_zero(value: Value) -> Value:
    """An expression whose relations are as `compare` writes them: T > 10 becomes T - 10 > 0."""
    names = {kind: name for name, kind in _COMPARISONS.items()}
    relations = value.atoms(sympy.core.relational.Relational)
    return value.xreplace({each: compare(names[each.func], each.lhs, each.rhs) for each in relations})


def outer_select(expression: Expr) -> Any:
    """A Select that stands in `expression` outside any other function."""
    if isinstance(expression, Select):
        return expression
    if isinstance(expression, sympy.Add | sympy.Mul | sympy.Abs | sympy.Max | sympy.Min):
        for arg in expression.args:
            found = outer_select(arg)  # type: ignore[arg-type]
            if found is not None:
                return found
    return None
