"""A graph and its nested regions: where a value inside a region comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx


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


def nested_scopes(scope: Scope) -> Iterator[tuple[fx.Node, Scope | None]]:
    """Calls of nested regions in `scope`, each with the scope it enters; None where the call is no plain one."""
    modules = dict(scope.gm.named_modules())
    for node in scope.gm.graph.nodes:
        bodies = [
            modules.get(str(arg.target))
            for arg in node.all_input_nodes
            if arg.op == "get_attr" and isinstance(modules.get(str(arg.target)), fx.GraphModule)
        ]
        if not bodies or node.op != "call_function":
            continue
        yield node, _enter(scope, node, bodies)


def _enter(scope: Scope, node: fx.Node, bodies: Sequence[Any]) -> Scope | None:
    """`op(body, *operands)` or `invoke_subgraph(body, "name", *operands)`; anything else is no plain call."""
    body = bodies[0]
    placeholders = body.graph.find_nodes(op="placeholder")
    if len(bodies) != 1:
        return None
    rest = list(node.args[1:])
    if rest and isinstance(rest[0], str | None) and len(rest) == len(placeholders) + 1:
        rest = rest[1:]
    if node.args[0] not in node.all_input_nodes or len(rest) != len(placeholders):
        return None
    return Scope(body, scope, node, dict(zip(placeholders, rest, strict=True)))


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


def outputs_of(scope: Scope) -> list[Any]:
    """What a region returns."""
    output = next(n for n in reversed(scope.gm.graph.nodes) if n.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def attribute_of(scope: Scope, node: fx.Node) -> Any:
    """What a get_attr node reads."""
    value: Any = scope.gm
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value
