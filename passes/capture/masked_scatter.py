"""Rows that are put in the place of some tokens, one after another, as each token's choice.

h.masked_scatter((ids == IMAGE)[..., None], image)

    ids == IMAGE         . x x . . x        of the whole row
    place in `image`     0 0 1 1 1 2        running sum - 1, not below 0
    chosen               h a b h h c        where(ids == IMAGE, image[place], h)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.new_nodes import maker
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of

_SCATTERS = ("masked_scatter", torch.masked_scatter)


def part_masked_scatter(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> None:
    """Rewrite those of a graph and its nested regions.

    Args:
        counts: the number of tokens, in all its symbols. kept: nodes that are read beside the graph.
    """
    mode = fake_mode_of(gm.graph.nodes)
    if mode is None:
        return
    for module in graph_modules(gm):
        for node in [*module.graph.nodes]:
            given: Any = node.args
            if node not in kept and node.target in _SCATTERS and len(given) == 3 and _is_by_token(given, counts):
                _put(node, mode, counts)


def _is_by_token(given: Sequence[Any], counts: Collection[Any]) -> bool:
    """Whether whole rows of tokens are put into floats, and the rows are not cut."""
    values: list[Any] = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in given]
    x, mask, source = values
    if not all(isinstance(value, Tensor) for value in values) or not x.is_floating_point():
        return False
    tokens = [dim for dim, size in enumerate(x.shape) if expression(size) in counts]
    if len(tokens) != 1 or tokens[0] > 1 or mask.ndim != x.ndim or x.ndim == tokens[0] + 1:
        return False
    if any(expression(size).free_symbols & {*counts} for size in source.shape):
        return False
    behind = range(tokens[0] + 1, x.ndim)
    if not all(isinstance(x.shape[dim], int) for dim in behind):
        return False
    return expression(mask.shape[tokens[0]]) in counts and all(
        mask.shape[d] == 1 or mask.stride(d) == 0 for d in behind
    )


def _put(node: fx.Node, mode: FakeTensorMode, counts: Collection[Any]) -> None:
    x, mask, source = node.args
    assert isinstance(x, fx.Node)
    new, value = maker(node, mode), x.meta["example_value"]
    behind = value.ndim - 1 - next(dim for dim, size in enumerate(value.shape) if expression(size) in counts)
    front = [new("size", x, dim) for dim in range(value.ndim - behind)]
    there = new("expand", new(operator.getitem, mask, (Ellipsis, *[0] * behind)), *front)
    place = new("clamp", new("sub", new("cumsum", new("flatten", there), 0), 1), 0)
    rows = new("index_select", new("reshape", source, -1, *value.shape[-behind:]), 0, place)
    rows = new("unflatten", rows, 0, tuple(front)) if len(front) > 1 else rows
    chosen = new(torch.where, new(operator.getitem, there, (Ellipsis, *[None] * behind)), rows, x)
    node.replace_all_uses_with(chosen)
    node.graph.erase_node(node)
