"""Blocks that Dynamo read once stand in the graph as often as the model runs them.

    region(b0, x, w0) ─ region(b0, y, w1) ─ …      what the passes prove and rewrite: the body b0, once
    norm attend mlp ─ norm attend mlp ─ …          what is cut, compiled and counted: a copy for each call

So the passes take as long for two blocks as for a hundred, and all that comes behind them sees the plain graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import memory_of, written_memory

from .capture.capture import copied
from .graph.nodes import (
    RegionCall,
    attribute_of,
    erase_unread_numbers,
    graph_modules,
    hold,
    is_compile_region,
    outputs_of,
    region_call,
    region_calls,
    value_of,
)
from .values.state import State

Found = TypeVar("Found")


def instantiated(state: State) -> State:
    """A state whose graph has a copy of each compile region for each of its calls, in place, and whose sites, decisions
    and changes are listed once for each.

    Raises:
        ValueError: a region writes into what it is given, which copies of its fake values don't tell.
    """
    runs, known = runs_of(state.graph_module), state.locality.states
    copies = instantiate(state.graph_module)

    def each(found: Iterable[Found], node_of: Callable[[Found], fx.Node]) -> tuple[Found, ...]:
        return tuple(one for one in found for _ in range(runs[node_of(one).graph]))

    locality = replace(
        state.locality,
        inserts=each(state.locality.inserts, lambda insert: insert.node),
        lowered=each(state.locality.lowered, lambda lowering: lowering.node),
        reads=each(state.locality.reads, lambda read: read.node),
        states={**known, **{copy: known[node] for copy, node in copies.items() if node in known}},
    )
    sites, decisions = each(state.sites, lambda site: site.node), each(state.decisions, lambda decision: decision.node)
    return replace(state, locality=locality, sites=sites, decisions=decisions)


def runs_of(root: fx.GraphModule) -> Counter[fx.Graph]:
    """How often a call of `root` runs its graph, and that of each region in it."""
    runs, calls = Counter({root.graph: 1}), region_calls(root)
    for gm in graph_modules(root)[1:]:
        runs[gm.graph] = sum(runs[node.graph] for node in calls.get(gm.graph, ())) or 1
    return runs


def instantiate(root: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Put a copy of its body in the place of each call of a compile region, in place.

    Returns:
        each copy -> the node of the body that it is a copy of.
    Raises:
        ValueError: a region writes into what it is given.
    """
    regions, written = region_calls(root), written_memory(root)
    for graph, calls in regions.items():
        given = {memory_of(node) for node in graph.find_nodes(op="placeholder")}
        if given & written and any(map(is_compile_region, calls)):
            raise ValueError("a region writes into what it is given")
    first = {graph: _path(calls[0]) for graph, calls in regions.items()}
    copies: dict[fx.Node, fx.Node] = {}
    for gm in reversed(graph_modules(root)):  # regions before the graphs that call them
        for node in [*gm.graph.nodes]:
            if (call := region_call(node)) is not None and is_compile_region(node):
                _inline(call, first[call.body.graph], copies)
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users and isinstance(attribute_of(node), fx.GraphModule):
                gm.graph.erase_node(node)
        held = {node.target for node in gm.graph.find_nodes(op="get_attr")}
        for name in [name for name, body in gm.named_children() if isinstance(body, fx.GraphModule)]:
            if name not in held:
                delattr(gm, name)
        gm.recompile()
    erase_unread_numbers(root)
    return copies


def _inline(call: RegionCall, first: str, copies: dict[fx.Node, fx.Node]) -> None:
    """Nodes of a body in front of a call of it, which goes. `first`: the module that the body was read in. Raises a
    ValueError where a call has a number, which another gives as a tensor, since it changes from step to step."""
    made, path, owner = dict[fx.Node, Any](call.filled), _path(call.node), call.node.graph.owning_module
    number = call.node.name.removeprefix("invoke_subgraph") or "_0"
    if any(isinstance(value_of(inner), Tensor) and type(x) in (bool, int, float) for inner, x in call.filled.items()):
        raise ValueError("a region is given a number in the place of a tensor")
    with call.node.graph.inserting_before(call.node):
        for node in call.body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            copy = made[node] = call.node.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}{number}")
            copy.meta = dict(node.meta)
            copies[copy] = copies.get(node, node)
            if node.op == "get_attr":
                copy.target = _held(attribute_of(node), owner, copies)
            _move(copy, first, path)
            nested = attribute_of(copy)
            for inside in graph_modules(nested) if isinstance(nested, fx.GraphModule) else ():
                for n in inside.graph.nodes:
                    _move(n, first, path)
    given = [made[node] if isinstance(node, fx.Node) else node for node in outputs_of(call.body)]
    _give(call.node, given, set(made.values()) - set(call.operands))


def _held(value: Any, owner: Any, copies: dict[fx.Node, fx.Node]) -> str:
    """The name of an attribute of the owner that holds a value: of a nested graph a copy, since each call has paths of
    its own."""
    if isinstance(value, fx.GraphModule):
        inner: dict[fx.Node, fx.Node] = {}
        value = copied(value, inner)
        copies.update({copy: copies.get(node, node) for node, copy in inner.items()})
    return hold(owner, value)


def _give(call: fx.Node, given: list[Any], new: set[Any]) -> None:
    """Let all that read a call's results read what a copy gives, which has the fake values that the call had."""
    several = isinstance(call.meta.get("example_value"), tuple | list)
    for user in [*call.users] if several else [call]:
        made = given[user.args[1]] if several and user.target is operator.getitem else given[0]  # type: ignore[index]
        if made in new:
            made.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(made)
        user.graph.erase_node(user)
    if several:
        call.graph.erase_node(call)


def _path(node: fx.Node) -> str:
    """The innermost module that a node stands in."""
    stack: Any = node.meta.get("nn_module_stack") or {}
    return str([*stack.values()][-1][0]) if stack else ""


def _move(node: fx.Node, first: str, path: str) -> None:
    """Let a copy stand in the modules of its own block."""
    stack: Any = node.meta.get("nn_module_stack")
    if stack and first != path:
        node.meta["nn_module_stack"] = {
            key: (path + name[len(first) :] if _is_within(name, first) else name, *rest)
            for key, (name, *rest) in stack.items()
        }


def _is_within(name: str, path: str) -> bool:
    return bool(path) and (name == path or name.startswith((f"{path}.", f"{path}[")))
