"""Rules of ATen ops that act on each element: logic, comparisons, arithmetic, casts.

bool tensors hold truths and others numbers, so `truth` and `numeric` stand where an op takes both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from cp_rewrite.passes.predicate.context import Rule, RuleContext
from cp_rewrite.passes.predicate.exact import on_constants
from cp_rewrite.passes.predicate.symbolic import (
    ONE,
    ZERO,
    SymTensor,
    Undecidable,
    Value,
    choose,
    compare,
    difference_of,
    number,
    numeric,
    truth,
)


def _comparison(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.comparison(ctx.op, x, y)


def _and(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, sympy.And, x, y)


def _or(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, sympy.Or, x, y)


def _xor(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, lambda a, b: sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b)), x, y)


def _not(ctx: RuleContext, x: Any) -> SymTensor:
    return _logic(ctx, sympy.Not, x)


def _logic(ctx: RuleContext, function: Callable[..., Any], *args: Any) -> SymTensor:
    if ctx.out.dtype is not torch.bool:
        raise Undecidable("bitwise arithmetic on integers")
    return ctx.pointwise(lambda *values: function(*map(truth, values)), *args)


def _add(ctx: RuleContext, x: Any, y: Any, alpha: Any = 1) -> SymTensor:
    if ctx.out.dtype is torch.bool:
        return _logic(ctx, sympy.Or, x, y)
    left, right = (y, x) if ctx.op == "rsub" else (x, y)
    factor = ctx.size(alpha)
    if ctx.op == "add":
        return ctx.pointwise(lambda a, b: numeric(a) + factor * numeric(b), left, right)
    return ctx.pointwise(lambda a, b: difference_of(numeric(a), factor * numeric(b)), left, right)


def _mul(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    if ctx.out.dtype is torch.bool:
        return _logic(ctx, sympy.And, x, y)
    return ctx.pointwise(lambda a, b: numeric(a) * numeric(b), x, y)


def _neg(ctx: RuleContext, x: SymTensor) -> SymTensor:
    return ctx.pointwise(lambda a: -numeric(a), x)


def _abs(ctx: RuleContext, x: SymTensor) -> SymTensor:
    def absolute(a: Value) -> Value:
        return choose(compare("ge", a, ZERO), numeric(a), -numeric(a))

    return ctx.pointwise(absolute, x)


def _sign(ctx: RuleContext, x: SymTensor) -> SymTensor:
    if ctx.out.dtype is torch.bool:
        return x

    def sign(a: Value) -> Value:
        return choose(compare("gt", a, ZERO), ONE, choose(compare("lt", a, ZERO), -ONE, ZERO))

    return ctx.pointwise(sign, x)


def _minimum(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: choose(compare("le", a, b), a, b), x, y)


def _maximum(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: choose(compare("ge", a, b), a, b), x, y)


def _clamp(ctx: RuleContext, x: SymTensor, min: Any = None, max: Any = None) -> SymTensor:
    x = x if min is None else _maximum(ctx, x, min)
    return x if max is None else _minimum(ctx, x, max)


def _where(ctx: RuleContext, condition: SymTensor, *branches: Any) -> SymTensor:
    if len(branches) != 2:
        raise Undecidable("where with a condition alone makes a tensor of data-dependent size")
    as_value = truth if ctx.out.dtype is torch.bool else numeric
    return ctx.pointwise(lambda c, a, b: choose(truth(c), as_value(a), as_value(b)), condition, *branches)


def _masked_fill(ctx: RuleContext, x: SymTensor, mask: SymTensor, value: Any) -> SymTensor:
    return _where(ctx, mask, value, x)


def cast(ctx: RuleContext, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return ctx.pointwise(truth if ctx.out.dtype is torch.bool else numeric, x)


def _floor_divide(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: sympy.floor(numeric(a) / numeric(b)), x, y)


def _remainder(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: sympy.Mod(numeric(a), numeric(b)), x, y)


def _div(ctx: RuleContext, x: Any, y: Any, rounding_mode: str | None = None) -> SymTensor:
    if rounding_mode == "floor":
        return _floor_divide(ctx, x, y)
    if rounding_mode is not None or not isinstance(y, int | float) or y == 0:
        raise Undecidable("a division that rounds")
    if math.frexp(y)[0] in (0.5, -0.5):
        return ctx.pointwise(lambda a: numeric(a) / number(y), x)
    return ctx.pointwise(lambda a: on_constants(numeric(a), lambda value: value / number(y)), x)


def _log(ctx: RuleContext, x: SymTensor) -> SymTensor:
    def log(value: Value) -> Value:
        return number(math.log(value) if value > 0 else -math.inf)

    return ctx.pointwise(lambda a: on_constants(numeric(a), log), x)


ELEMENTS: dict[str, Rule] = {
    "eq ne lt le gt ge": _comparison,
    "logical_and bitwise_and __and__": _and,
    "logical_or bitwise_or __or__": _or,
    "logical_xor bitwise_xor __xor__": _xor,
    "logical_not bitwise_not": _not,
    "add sub rsub": _add,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "minimum": _minimum,
    "maximum": _maximum,
    "clamp clamp_min": _clamp,
    "clamp_max": lambda ctx, x, max: _clamp(ctx, x, max=max),
    "where": _where,
    "masked_fill": _masked_fill,
    "_to_copy to": cast,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "div": _div,
    "log": _log,
}
"""Names of ops, apart by spaces -> their rule."""
