"""Check a rewritten graph against what it replaced, before anything compiles it."""

from __future__ import annotations

import torch.fx as fx

from .match import is_attention
from .state import State


def verify_graph(state: State) -> State:
    """Raise if the graph is broken: lint, fake values on new nodes, every site replaced by one op of its shape."""
    gm = state.graph_module
    gm.graph.lint()
    for decision in state.decisions:
        for node in decision.site.graph_module.graph.nodes:
            if "cp_rewrite" in node.meta and "example_value" not in node.meta:
                raise RuntimeError(f"cp_rewrite: inserted node {node.name} has no fake value")
            if is_attention(node):
                raise RuntimeError(f"cp_rewrite: attention node {node.name} was left in place")
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    added = [node for node in placeholders if "cp_rewrite" in node.meta]
    if placeholders[len(placeholders) - len(added) :] != added or len(added) != len(state.inputs):
        raise RuntimeError("cp_rewrite: the plan's inputs must be the last inputs of the graph, in order")
    return state


def attention_count(gm: fx.GraphModule) -> int:
    """Attention nodes in the graph and its nested regions."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return sum(is_attention(node) for graph in graphs for node in graph.nodes)
