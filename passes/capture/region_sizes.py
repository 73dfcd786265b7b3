"""Sizes that a region is given more than once, given once.

checkpoint(body, s0, x, s1, cos)    with s1 = s0    ->    checkpoint(body, s0, x, cos)

The first of equal blocks is traced before torch learns that two sizes are one, and the others behind it: so they are
the same graph, and are compiled once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch.fx as fx
from torch import SymInt

from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.regions import RegionCall, region_call, region_calls
from cp_rewrite.torch_internals import expression


def give_sizes_once(gm: fx.GraphModule) -> None:
    """Do so in all regions of a graph."""
    for graph, nodes in region_calls(gm).items():
        calls = [call for node in nodes if (call := region_call(node)) is not None]
        repeated = _repeated(graph, calls)
        for call in calls:
            rest = [operand for inside, operand in call.filled.items() if inside not in repeated]
            call.node.args = (*call.node.args[: len(call.node.args) - len(call.operands)], *rest)
        for inside, first in repeated.items():
            inside.replace_all_uses_with(first)
            graph.erase_node(inside)


def _repeated(graph: fx.Graph, calls: Sequence[RegionCall]) -> dict[fx.Node, fx.Node]:
    """A size among a region's inputs -> the first one that equals it, in all calls."""
    firsts: dict[Hashable, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for inside in graph.find_nodes(op="placeholder"):
        if isinstance(value_of(inside), SymInt):
            given = (expression(value_of(inside)), *(_size(call.filled[inside]) for call in calls))
            if (first := firsts.setdefault(given, inside)) is not inside:
                found[inside] = first
    return found


def _size(operand: Any) -> Hashable:
    return expression(value_of(operand) if isinstance(operand, fx.Node) else operand)
