"""What is put between nodes and their operands."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.passes.graph.new_nodes import insert as insert_nodes
from cp_rewrite.passes.graph.writes import memory_of, written_nodes
from cp_rewrite.passes.values.resolution import Insert

from .plan_inputs import Inputs


def insert_before(insert: Insert, inputs: Inputs, made: dict[Any, fx.Node]) -> None:
    """Put what `insert` makes of an operand in the operand's place. `made`: so far; readers of a graph share them."""
    node, operand = insert.node, insert.operand
    key = (node.graph, operand, insert.emit, insert.inputs)
    if key not in made:
        tracer = GraphAppendingTracer(node.graph)
        needed = [fx.Proxy(inputs.node(node.graph, key), tracer) for key in insert.inputs]
        new = insert_nodes(node, lambda: insert.emit(fx.Proxy(operand, tracer), *needed), inputs.mode, insert.why)
        new.meta["example_value"].requires_grad_(operand.meta["example_value"].requires_grad)
        if not any(memory_of(operand) == memory_of(n) for writer in node.graph.nodes for n in written_nodes(writer)):
            made[key] = new
    else:
        new = made[key]
    node.replace_input_with(operand, new)
    if operand in written_nodes(node) or new in written_nodes(node):
        _read_copy(operand, node)


def _read_copy(operand: fx.Node, writer: fx.Node) -> None:
    """A node that wrote into an operand writes into a copy of it now: who reads the operand later reads the copy."""
    later = False
    for node in list(writer.graph.nodes):
        if later:
            node.replace_input_with(operand, writer)
        later |= node is writer
