"""Numbers that a graph makes from its token count, as functions of the row's: T - 1, T // 2, 1 / T, max(T, 8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.node.call import Call


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


def counted_number(call: Call, value: Any) -> Any:
    """A number of the graph as an int, or an expression in the symbol of its token count.

    Raises:
        Mixes: it is made in a way that is not followed.
    """
    expr: Any = call.extents.size(value)
    if isinstance(expr, int):
        return expr
    functions = {f.func.__name__ for f in expr.atoms(Application)}
    if expr.free_symbols != {call.extents.tokens} or functions - _FUNCTIONS.keys():
        raise Mixes("the number is made from the token count in a way that is not followed")
    return expr


def of_row(expr: Any, tokens: Any, row_tokens: Tensor) -> Any:
    """The value of such a number, `tokens` its symbol, for a row of (1,) tokens: a number, or a tensor of no dims."""
    if isinstance(expr, int):
        return expr
    return sympy.lambdify([tokens], expr, [_FUNCTIONS])(row_tokens.select(0, 0))
