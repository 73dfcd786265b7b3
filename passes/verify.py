"""Check a rewritten graph before anything compiles it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.values.state import State
from cp_rewrite.torch_internals import expression


def verify_graph(state: State) -> State:
    """Raise if the graph is broken: lint, every site replaced by a value of its own shape, inputs added last."""
    gm = state.graph_module
    for module in dict.fromkeys(d.site.graph_module for d in state.decisions):
        module.graph.lint()
        nodes = {node.name: node for node in module.graph.nodes}
        for node in nodes.values():
            if "cp_rewrite" in node.meta and "example_value" not in node.meta:
                raise RuntimeError(f"cp_rewrite: inserted node {node.name} has no fake value")
        for site in (d.site for d in state.decisions if d.site.graph_module is module):
            _verify_site(site.node, nodes)
    placeholders = gm.graph.find_nodes(op="placeholder")
    added = [node for node in placeholders if "cp_rewrite" in node.meta]
    if placeholders[len(placeholders) - len(added) :] != added or len(added) != len(state.inputs):
        raise RuntimeError("cp_rewrite: the plan's inputs must be the last inputs of the graph, in order")
    return state


def _verify_site(old: fx.Node, nodes: Mapping[str, fx.Node]) -> None:
    """The replaced node is gone; the node that took its name, of the `nodes` by name, has its shape and dtype."""
    new = nodes.get(old.name)
    if new is old or new is None:
        raise RuntimeError(f"cp_rewrite: attention node {old.name} was left in place")
    before, after = _facts(old.meta["example_value"]), _facts(new.meta["example_value"])
    if before != after:
        raise RuntimeError(f"cp_rewrite: {old.name} was {before}, its replacement is {after}")


def _facts(value: Tensor) -> tuple[torch.dtype, torch.device, int, tuple[int | str, ...]]:
    # Symbolic sizes may be written in two ways (R // B and T); comparing them would put guards on the plan's inputs.
    sizes = tuple(int(size) if size.is_Integer else "symbolic" for size in map(expression, value.shape))
    return value.dtype, value.device, value.ndim, sizes
