"""Numbers of a graph that are made from its number of tokens."""

from __future__ import annotations

from typing import Any

import sympy
from torch import SymInt

from cp_rewrite.torch_internals import expression


def linear_in(value: Any, tokens: Any) -> tuple[int, int] | None:
    """(a, b) of a number a S + b of the graph, S its tokens; None for others."""
    if not isinstance(value, SymInt):
        return (0, value) if isinstance(value, int) else None
    expr, size = sympy.expand(expression(value)), expression(tokens)
    each = expr.coeff(size, 1)
    more = sympy.expand(expr - each * size)
    return (int(each), int(more)) if each.is_Integer and more.is_Integer else None
