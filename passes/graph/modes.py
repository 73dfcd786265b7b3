"""Which modes are open where the nodes of a graph run: autocast, and whether gradients are recorded."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

Mode = tuple[tuple[Any, ...], bool]
"""The arguments of the autocasts that are open, and whether gradients are recorded."""


def modes_of(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """Each node of a graph, in order, with its mode as far as the graph itself says."""
    autocasts: tuple[Any, ...] = ()
    switches = [bool(node.args[0]) for node in graph.nodes if _name(node) == "_set_grad_enabled"]
    grad = not switches[0] if switches else True
    found: dict[fx.Node, Mode] = {}
    for node in graph.nodes:
        match _name(node):
            case "_enter_autocast":
                autocasts = (*autocasts, node.args)
            case "_exit_autocast":
                autocasts = autocasts[:-1]
            case "_set_grad_enabled":
                grad = bool(node.args[0])
            case _:
                pass
        found[node] = autocasts, grad
    return found


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")
