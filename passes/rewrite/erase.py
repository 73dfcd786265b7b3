"""Erase what only masks read. Never a general dead-code elimination: on a Dynamo graph that deletes in-place ops."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch.fx as fx

from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.passes.graph.writes import memory_of, written_nodes

from .plan_inputs import Inputs


def erase_dead(stale: Iterable[fx.Node], live: Collection[fx.Node], inputs: Inputs) -> None:
    """Erase `stale` nodes and what they were computed from, in-place writes included, except what is live.

    Args:
        stale: operands of the attention nodes that were replaced: masks, heads expanded for the queries.
        live: what outputs or effects depend on, from `live_nodes` before the rewrite.
    """
    doomed = _ancestors(stale, live, inputs)
    for gm in reversed(graph_modules(inputs.root)):  # regions before the graphs that call them
        for node in reversed(list(gm.graph.nodes)):
            if node not in doomed or node.users:
                continue
            if node.op == "placeholder":
                inputs.drop_operand(node)
            else:
                gm.graph.erase_node(node)


def _ancestors(stale: Iterable[fx.Node], live: Collection[fx.Node], inputs: Inputs) -> set[fx.Node]:
    writers: dict[int | None, list[fx.Node]] = {}
    for gm in graph_modules(inputs.root):
        for node in gm.graph.nodes:
            for target in written_nodes(node):
                writers.setdefault(memory_of(target), []).append(node)
    writers.pop(None, None)
    doomed: set[fx.Node] = set()
    pending = list(stale)
    while pending:
        node = pending.pop()
        if node in doomed or node in live:
            continue
        if node.op == "placeholder":
            operands = inputs.operands(node)
            if not operands:  # an input of the root: its caller passes it anyway
                continue
            pending += operands
        doomed.add(node)
        pending += [*node.all_input_nodes, *writers.get(memory_of(node), ())]
    return doomed
