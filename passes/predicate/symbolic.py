"""Symbolic tensors: functions from an index, one expression per dim, to the element there.

    ids[:, None]  ->  SymTensor((B, 1, T), int64, lambda i: ids(i[0], i[2]))

An element is a sympy expression, for bool tensors a sympy Boolean. Booleans have one normal form: And, Or and Not
over relations `difference op 0`.

    Select, RunningSum, …      functions that expressions are made of beside sympy's
    SymTensor                  the tensors
    truth, choose, compare     expressions in their normal form
    as_element, compared       effects of a tensor's dtype on a value
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from cp_rewrite.documents import MAX_TOKENS

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
    """True if a relation says x >= 0 of an integer."""
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


_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Binary digits that a floating-point dtype holds."""
Extent = tuple[float, int]
"""(largest magnitude, binary digits after the point) of a value: an upper bound of both."""
LeafOf = Callable[[Any], tuple[torch.dtype, float]]
"""A term that reads a leaf -> (the leaf's dtype, its largest magnitude)."""


class Inexact(Undecidable):
    """A value that its dtype does not hold as it is."""

    def __init__(self, value: Value, dtype: torch.dtype) -> None:
        super().__init__(f"`{value}` may be rounded, cut or wrapped in {dtype}")
        self.value = value


def as_element(value: Value, dtype: torch.dtype, leaf_of: LeafOf) -> Value:
    """The value as an element of `dtype`: sympy's numbers are exact, a tensor's are rounded, truncated and wrap.

    A constant becomes what the dtype holds of it. A value that varies over tokens must be one that the dtype holds as
    it is, in rows of up to `MAX_TOKENS` tokens and with the document ids that a batch may have; any other is `Inexact`.

        -1e9 in float16               -> -inf
        q - k in int64                -> q - k
        q - k in bfloat16 (8 digits)  -> Inexact: 257 would be 256

    Raises:
        Inexact: one that varies over tokens, and may be rounded, truncated or wrap.
    """
    if is_bool(value) or dtype.is_complex:
        return value
    if value.is_number:
        return _constant(value, dtype)
    if isinstance(value, Select):
        condition, x, y = value.args
        return Select(condition, as_element(x, dtype, leaf_of), as_element(y, dtype, leaf_of))
    if isinstance(value, AppliedUndef) and leaf_of(value)[0] is dtype:
        return value
    top, digits = _extent(value, leaf_of)
    if dtype.is_floating_point:
        exact = top * 2.0**digits <= 2.0 ** _DIGITS.get(dtype, 0) and digits <= 64
    else:
        exact = digits == 0 and dtype.is_signed and top <= torch.iinfo(dtype).max
    if exact:
        return value
    if _varies(value):
        raise Inexact(value, dtype)
    # A sum of constants that wide types round a little stays next to what it is, 0 and -inf stay themselves.
    return value if dtype in (torch.float32, torch.float64) else on_constants(value, lambda v: _constant(v, dtype))


def compared(
    values: tuple[Value, Value], dtypes: tuple[Any, Any], common: torch.dtype, leaf_of: LeafOf
) -> tuple[Value, Value]:
    """Both sides of a comparison as they are compared: in the dtype `common`. The dtype of a Python number is None."""
    if common is torch.bool:
        return values
    numbers = [value.is_number for value in values]
    if any(numbers):
        # Rounding keeps the order: an integer and a constant that `common` holds compare as they are.
        constants = [_constant(v, common) if known else v for v, known in zip(values, numbers, strict=True)]
        limit = 2.0 ** _DIGITS.get(common, 64)
        if all(not known or not c.is_finite or abs(c) <= limit for c, known in zip(constants, numbers, strict=True)):
            return constants[0], constants[1]
    first, second = (v if d is common else as_element(v, common, leaf_of) for v, d in zip(values, dtypes, strict=True))
    return first, second


def on_constants(value: Expr, function: Callable[[Expr], Expr]) -> Expr:
    """`function` of a value that is a choice between constants: log of Select(c, 1, 0) is Select(c, 0, -oo)."""
    choice = outer_select(value)
    if choice is not None:
        branches = (value.xreplace({choice: branch}) for branch in choice.args[1:])
        return Select(choice.args[0], *(on_constants(branch, function) for branch in branches))
    if not value.is_number:
        raise Undecidable(f"a nonlinear function of `{value}`")
    return function(value)


def _varies(value: Expr) -> bool:
    """True if a value is more than a choice between constants."""
    if isinstance(value, Select):
        return any(map(_varies, value.args[1:]))
    return any(map(_varies, value.args)) if isinstance(value, sympy.Add | sympy.Mul) else not value.is_number


def _constant(value: Expr, dtype: torch.dtype) -> Expr:
    """A number as the dtype holds it: rounded in a floating-point dtype, wrapped around in an integer one."""
    if not value.is_finite:
        if dtype.is_floating_point:
            return value
        raise Inexact(value, dtype)
    if dtype.is_floating_point:
        return number(torch.tensor(float(value), dtype=torch.float64).to(dtype).item())
    if dtype is torch.bool:
        return value
    info = torch.iinfo(dtype)
    return sympy.Integer((int(value) - info.min) % (info.max - info.min + 1) + info.min)


def _extent(value: Expr, leaf_of: LeafOf) -> Extent:
    """Bounds of a value: of a sum they add up, of a product magnitudes multiply and digits add up."""
    if value.is_number:
        return _extent_of_number(value)
    if isinstance(value, Select):
        parts = [_extent(branch, leaf_of) for branch in value.args[1:]]
        return max(top for top, _ in parts), max(digits for _, digits in parts)
    if isinstance(value, sympy.Add | sympy.Mul):
        parts = [_extent(arg, leaf_of) for arg in value.args]
        if isinstance(value, sympy.Add):
            return sum(top for top, _ in parts), max(digits for _, digits in parts)
        return math.prod(top for top, _ in parts), sum(digits for _, digits in parts)
    if isinstance(value, AppliedUndef):
        dtype, largest = leaf_of(value)
        return min(largest, 2.0 ** _DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max), 0
    if isinstance(value, RunningSum | SumOver | RunningMax):
        top, digits = _extent(value.args[0], leaf_of)  # type: ignore[arg-type]
        return (top if isinstance(value, RunningMax) else MAX_TOKENS * top), digits
    if isinstance(value, sympy.Symbol | RepeatIndex):
        return MAX_TOKENS, 0
    parts = [_extent(arg, leaf_of) for arg in value.args]
    if isinstance(value, sympy.floor):
        return parts[0][0], 0
    return max(MAX_TOKENS, *(top for top, _ in parts)), max(digits for _, digits in parts)


def _extent_of_number(value: Expr) -> Extent:
    if not value.is_finite:
        return math.inf, 0
    numerator, denominator = float(value).as_integer_ratio()
    return abs(numerator / denominator), denominator.bit_length() - 1
