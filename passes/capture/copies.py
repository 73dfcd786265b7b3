"""Copies of graphs, with those of their nested regions."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from cp_rewrite.passes.graph.regions import attribute_of, graph_modules, region_call


def copied(gm: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """The graph and those of its nested regions; tensors and other modules are shared. Notes the copy of each node."""
    graph = fx.Graph()
    result: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    graph.output(result[0]).meta = dict(result[1].meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(body := attribute_of(node), fx.GraphModule):
            setattr(copy, str(node.target), copied(body, copies))
    return copy


def for_eager(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that runs node by node: regions that are compiled once for all are called as modules. Their operator first
    runs a body on memory that holds anything, to learn of its results, and tables of places hold anything then."""
    copy = copied(gm, {})
    for module in graph_modules(copy):
        for node in module.graph.nodes:
            call = region_call(node)
            if call is not None and node.target.name() == "invoke_subgraph":
                node.op, node.target, node.args = "call_module", str(node.args[0].target), call.operands
        module.recompile()
    return copy
