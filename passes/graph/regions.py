"""A graph and its nested regions: which node runs which, and where a value inside a region comes from.

A region is the body of a checkpoint or of a nested compile region: it is run once, on the operands of its call. Other
ways to run a nested graph (`cond`, `scan`, `map`) are no regions: nothing inside them is read or rewritten, and a graph
in which one of them matters is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch.fx as fx

from cp_rewrite.torch_internals import HigherOrderOperator


@dataclass(frozen=True, eq=False)
class Scope:
    """One region of a graph: the root, or the body of a nested region as one call enters it.

    Args:
        gm: the region's graph module.
        parent, call: the region around it and the node there that calls it; None for the root.
        operands: the body's placeholders -> the caller's nodes (or constants) that fill them.
    """

    gm: fx.GraphModule
    parent: Scope | None = None
    call: fx.Node | None = None
    operands: Mapping[fx.Node, Any] = field(default_factory=dict)


REGION_OPS = {"tag_activation_checkpoint": 1, "wrap_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2}
"""Higher-order ops that run their body once on their operands -> how many arguments stand before the operands: the
body, and for `invoke_subgraph` its name."""


@dataclass(frozen=True, eq=False)
class RegionCall:
    """A plain call of a nested region: `op(body, *operands)`, or `invoke_subgraph(body, "name", *operands)`.

    Operands are the last arguments of the node, one for each of the body's placeholders.
    """

    node: fx.Node
    body: fx.GraphModule
    operands: tuple[Any, ...]

    @property
    def filled(self) -> dict[fx.Node, Any]:
        """The body's placeholders -> what the call fills them with."""
        return dict(zip(self.body.graph.find_nodes(op="placeholder"), self.operands, strict=True))


def region_call(node: fx.Node) -> RegionCall | None:
    """A node as a plain call of a region; None for every other node, other ways to run a nested graph among them."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in REGION_OPS:
        return None
    bodies = nested_graphs(node)
    operands = node.args[REGION_OPS[node.target.name()] :]
    if len(bodies) != 1 or node.args[0] is not next(iter(bodies)):
        return None
    body = bodies[node.args[0]]
    count = len(body.graph.find_nodes(op="placeholder"))
    return RegionCall(node, body, operands) if len(operands) == count else None


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node calls a region that the backward computes once more."""
    return isinstance(node.target, HigherOrderOperator) and "checkpoint" in node.target.name()


def is_function(node: fx.Node) -> bool:
    """Whether a node calls a `torch.autograd.Function`, whose forward and backward are nested graphs."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "autograd_function_apply"


def nested_graphs(node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """The graphs that a node is given to run: of a region, both branches of a `cond`, flex_attention's functions."""
    given = {arg: attribute_of(arg) for arg in node.all_input_nodes if arg.op == "get_attr"}
    return {arg: value for arg, value in given.items() if isinstance(value, fx.GraphModule)}


def graph_modules(root: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph's module and those of its nested regions; a region comes behind those that call it."""
    return [module for module in root.modules() if isinstance(module, fx.GraphModule)]


def region_calls(root: fx.GraphModule) -> dict[fx.Graph, list[fx.Node]]:
    """The graph of each region of `root`, however deep -> its plain calls."""
    calls: dict[fx.Graph, list[fx.Node]] = {}
    for gm in graph_modules(root):
        for node in gm.graph.nodes:
            if (call := region_call(node)) is not None:
                calls.setdefault(call.body.graph, []).append(node)
    return calls


def nested_scopes(scope: Scope) -> Iterator[tuple[fx.Node, Scope | None]]:
    """Nodes of `scope` that run a nested graph, each with the scope that it enters; None where it is no plain call."""
    bodies = [n for n in scope.gm.graph.find_nodes(op="get_attr") if isinstance(attribute_of(n), fx.GraphModule)]
    callers = {caller for body in bodies for caller in body.users}
    for node in scope.gm.graph.nodes if callers else ():
        if node in callers:
            call = region_call(node)
            yield node, None if call is None else Scope(call.body, scope, node, call.filled)


def resolve(scope: Scope, node: Any) -> tuple[Scope, Any]:
    """The node that `node` is outside the regions it is merely passed into."""
    while scope.parent is not None and isinstance(node, fx.Node) and node in scope.operands:
        scope, node = scope.parent, scope.operands[node]
    return scope, node


def enclosing(scope: Scope) -> list[Scope]:
    """The regions around `scope`, the root first."""
    chain: list[Scope] = []
    while scope.parent is not None:
        scope = scope.parent
        chain.insert(0, scope)
    return chain


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """What a graph returns."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def attribute_of(node: fx.Node) -> Any:
    """What a get_attr node reads; None for any other node."""
    return attrgetter(str(node.target))(node.graph.owning_module) if node.op == "get_attr" else None
