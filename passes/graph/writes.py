"""Writes into memory: which nodes of a Dynamo graph make them, and whose memory it is."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.torch_internals import memory_id, unwrapped

from .nodes import bind, graph_modules, region_call, schema_of

_OPERATORS = frozenset(f for f in vars(operator).values() if callable(f))
_INPLACE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()
) | {operator.setitem}
_PURE_METHODS = frozenset({"__invert__", "__index__", "__int__"})


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory this node writes into."""
    if node.op == "call_method":
        name = str(node.target)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        return _first(node) if in_place or (name.startswith("__i") and name not in _PURE_METHODS) else []
    if node.op != "call_function":
        return []
    if node.kwargs.get("out") is not None:
        return _nodes(node.kwargs["out"])
    target: Any = node.target
    schema = schema_of(target)
    if schema is not None:
        aliases = {argument.name: argument.alias_info for argument in schema.arguments}
        return _nodes([bind(node).get(name) for name, alias in aliases.items() if alias and alias.is_write])
    if target in _OPERATORS:  # where and_, or_, not_ are pure
        return _first(node) if target in _INPLACE_OPERATORS else []
    name = getattr(target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or bind(node).get("inplace"):
        return _first(node) or list(node.all_input_nodes)
    return []


def writers_between(nodes: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Nodes that change the memory of `nodes` in place between two nodes of their graph."""
    memory = {memory_of(node) for node in nodes} - {None}
    found: list[fx.Node] = []
    node = start.next
    while node is not end and node.op != "root":
        if any(memory_of(target) in memory for target in written_nodes(node)):
            found.append(node)
        node = node.next
    return found


def written_memory(gm: fx.GraphModule) -> set[int]:
    """Identities of the storages that a graph, or a region that it calls, writes into."""
    found: set[int | None] = set()
    for module in reversed(graph_modules(gm)):  # regions before the graphs that call them
        for node in module.graph.nodes:
            found |= {memory_of(target) for target in written_nodes(node)}
            call = region_call(node)
            if call is not None:
                operands = [operand for inside, operand in call.filled.items() if memory_of(inside) in found]
                found |= {memory_of(operand) for operand in operands if isinstance(operand, fx.Node)}
    return {memory for memory in found if memory is not None}


def memory_of(node: fx.Node) -> int | None:
    """Identity of the storage of a node's fake tensor."""
    value = node.meta.get("example_value")
    value = unwrapped(value) if isinstance(value, Tensor) else None
    return None if value is None or value.layout != torch.strided else memory_id(value)


def _nodes(argument: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, fx.Node)]


def _first(node: fx.Node) -> list[fx.Node]:
    return _nodes(node.args[:1])
