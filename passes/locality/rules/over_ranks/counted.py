"""Numbers that a graph makes from its token count, T - 1, T // 2, 1 / T, max(T, 8), as values: those of the whole row
in their place.

x.sum() / x.shape[1]      index == x.shape[1] - 1      x.shape[1] - index      index.clamp(max=x.shape[1] - 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.elementwise import pointwise
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.values.resolution import Ranks, Whole


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


def counted(call: Call) -> tuple[States, Whole]:
    """Pointwise ops of a tensor and such a number; of `clamp` both bounds may be such."""
    found = {name: value for name, value in call.bound.items() if call.extents.counts_tokens(value)}
    if not found or call.written or not found.keys() <= {"other", "min", "max"}:
        raise Mixes(f"{call.name} takes a number made from the token count")
    found = {name: counted_number(call, value) for name, value in found.items()}
    return pointwise(call), Counted(call.extents.tokens, tuple(found.items()), call.outs[0].dtype)


@dataclass(frozen=True)
class Counted:
    """tokens: the symbol that numbers, by argument, are expressions in. dtype: of the result."""

    tokens: Any
    numbers: tuple[tuple[str, Any], ...]
    dtype: torch.dtype

    def __call__(self, ranks: Ranks, func: Any, args: Mapping[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # these hold few numbers of tokens
        given = {name: value for name, value in args.items() if name != "self"}
        for name, expr in self.numbers:
            number: Tensor = of_row(expr, self.tokens, ranks.row_tokens)
            kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
            given[name] = number.to(kind) if number.is_floating_point() else number
        if "clamp" in func._schema.name:  # which takes two tensors, or two numbers
            numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
            given |= {name: torch.full((), value, device=x.device) for name, value in numbers.items()}
        found: Tensor = getattr(torch, func._schema.name[6:])(x, **given)
        return found.to(self.dtype)
