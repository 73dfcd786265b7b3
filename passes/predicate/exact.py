"""Effects of a tensor's dtype on a value: sympy's numbers are exact, a tensor's are rounded, truncated and wrap.

A constant becomes what the dtype holds of it. A value that varies over tokens must be one that the dtype holds as it
is, in rows of up to `MAX_TOKENS` tokens and with the document ids that a batch may have; any other is `Inexact`.

    -1e9 in float16               -> -inf
    q - k in int64                -> q - k
    q - k in bfloat16 (8 digits)  -> Inexact: 257 would be 256
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from cp_rewrite.documents import MAX_TOKENS

from .symbolic import (
    Expr,
    RepeatIndex,
    RunningMax,
    RunningSum,
    Select,
    SumOver,
    Undecidable,
    Value,
    is_bool,
    number,
    outer_select,
)

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
    """The value as an element of `dtype`.

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
    """Whether a value is more than a choice between constants."""
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
