"""Sizes of a graph: what is made from its number of tokens, and where its symbols stand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch.fx as fx
from torch import SymInt, Tensor

from cp_rewrite.torch_internals import expression


def linear_in(value: Any, tokens: Any) -> tuple[int, int] | None:
    """(a, b) of a number a S + b of the graph, S its tokens; None for others."""
    if not isinstance(value, SymInt):
        return (0, value) if isinstance(value, int) else None
    expr, size = sympy.expand(expression(value)), expression(tokens)
    each = expr.coeff(size, 1)
    more = sympy.expand(expr - each * size)
    return (int(each), int(more)) if each.is_Integer and more.is_Integer else None


def size_places(inputs: Iterable[fx.Node]) -> dict[Any, tuple[int, int | None]]:
    """Symbols of a graph's sizes -> where each is read off its inputs, the first that has it: (place, dim); dim None:
    the input itself is the number."""
    places: dict[Any, tuple[int, int | None]] = {}
    for place, node in enumerate(inputs):
        value = node.meta["example_value"]
        sizes = list(enumerate(value.shape)) if isinstance(value, Tensor) else [(None, value)]
        for dim, size in sizes:
            if isinstance(size, SymInt) and expression(size).is_Symbol:
                places.setdefault(expression(size), (place, dim))
    return places
