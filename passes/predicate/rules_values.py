"""Rules of ATen ops that act on each element: logic, comparisons, arithmetic, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch

from .exact import on_constants
from .values import ZERO, SymTensor, Value, compare, number, numeric, truth
from .views import Undecidable, choose

if TYPE_CHECKING:
    from .aten import Evaluator, Rule


def _comparison(op: str) -> Rule:
    return lambda ev, x, y: ev.comparison(op, x, y)


def _and(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return _logic(ev, sympy.And, x, y)


def _or(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return _logic(ev, sympy.Or, x, y)


def _xor(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return _logic(ev, lambda a, b: sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b)), x, y)


def _not(ev: Evaluator, x: Any) -> SymTensor:
    return _logic(ev, sympy.Not, x)


def _logic(ev: Evaluator, function: Callable[..., Any], *args: Any) -> SymTensor:
    if ev.out.dtype is not torch.bool:
        raise Undecidable("bitwise arithmetic on integers")
    return ev.pointwise(lambda *values: function(*map(truth, values)), *args)


def _add(ev: Evaluator, x: Any, y: Any, alpha: Any = 1) -> SymTensor:
    assert ev.call is not None
    if ev.out.dtype is torch.bool:
        return _logic(ev, sympy.Or, x, y)
    name = ev.call.func.overloadpacket.__name__
    left, right = (y, x) if name == "rsub" else (x, y)
    sign = ev.size(alpha) * (1 if name == "add" else -1)
    return ev.pointwise(lambda a, b: numeric(a) + sign * numeric(b), left, right)


def _mul(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    if ev.out.dtype is torch.bool:
        return _logic(ev, sympy.And, x, y)
    return ev.pointwise(lambda a, b: numeric(a) * numeric(b), x, y)


def _neg(ev: Evaluator, x: SymTensor) -> SymTensor:
    return ev.pointwise(lambda a: -numeric(a), x)


def _abs(ev: Evaluator, x: SymTensor) -> SymTensor:
    def absolute(a: Value) -> Value:
        return choose(compare("ge", a, ZERO), numeric(a), -numeric(a))

    return ev.pointwise(absolute, x)


def _minimum(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: choose(compare("le", a, b), a, b), x, y)


def _maximum(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: choose(compare("ge", a, b), a, b), x, y)


def _clamp(ev: Evaluator, x: SymTensor, *args: Any, **kwargs: Any) -> SymTensor:
    assert ev.call is not None
    only_max = ev.call.func.overloadpacket.__name__ == "clamp_max"
    low = kwargs.get("min", None if only_max or not args else args[0])
    high = kwargs.get("max", args[0] if only_max else args[1] if len(args) > 1 else None)
    if low is not None:
        x = _maximum(ev, x, low)
    return _minimum(ev, x, high) if high is not None else x


def _where(ev: Evaluator, condition: SymTensor, *branches: Any) -> SymTensor:
    if len(branches) != 2:
        raise Undecidable("where with a condition alone makes a tensor of data-dependent size")
    as_value = truth if ev.out.dtype is torch.bool else numeric
    return ev.pointwise(lambda c, a, b: choose(truth(c), as_value(a), as_value(b)), condition, *branches)


def _masked_fill(ev: Evaluator, x: SymTensor, mask: SymTensor, value: Any) -> SymTensor:
    return _where(ev, mask, value, x)


def cast(ev: Evaluator, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return ev.pointwise(truth if ev.out.dtype is torch.bool else numeric, x)


def _floor_divide(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: sympy.floor(numeric(a) / numeric(b)), x, y)


def _remainder(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: sympy.Mod(numeric(a), numeric(b)), x, y)


def _div(ev: Evaluator, x: Any, y: Any, rounding_mode: str | None = None) -> SymTensor:
    if rounding_mode == "floor":
        return _floor_divide(ev, x, y)
    if rounding_mode is not None or not isinstance(y, int | float) or y == 0 or math.frexp(y)[0] not in (0.5, -0.5):
        raise Undecidable("a division that rounds")
    return ev.pointwise(lambda a: numeric(a) / number(y), x)


def _log(ev: Evaluator, x: SymTensor) -> SymTensor:
    def log(value: Value) -> Value:
        return number(math.log(value) if value > 0 else -math.inf)

    return ev.pointwise(lambda a: on_constants(numeric(a), log), x)


VALUES: dict[str, Rule] = {
    **{op: _comparison(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _and),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _or),
    **dict.fromkeys(("logical_xor", "bitwise_xor", "__xor__"), _xor),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "minimum": _minimum,
    "maximum": _maximum,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("_to_copy", "to"), cast),
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "div": _div,
    "log": _log,
}
