"""Sizes of a graph: what is made from its number of tokens, and where its symbols stand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch.fx as fx
from torch import SymInt, Tensor

from cp_rewrite.planning.token_reads.token_count import TokenCount
from cp_rewrite.torch_internals import expression


def token_count(size: Any, tokens: Any) -> TokenCount | None:
    """A number of a graph, or an expression, as one made from that of its tokens; None: it is made otherwise."""
    if not isinstance(size, int | SymInt | sympy.Expr):
        return None
    expr, symbol = sympy.expand(expression(size)), expression(tokens)
    times = expr.coeff(symbol, 1)
    plus = sympy.expand(expr - times * symbol)
    return TokenCount(int(plus), int(times)) if times.is_Integer and plus.is_Integer else None


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
