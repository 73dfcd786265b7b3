"""Chunks of tokens that nested regions work on, as a loss that is checkpointed chunk by chunk:

    for x, y in zip(h.chunk(8, dim=1), labels.chunk(8, dim=1)):
        total = total + checkpoint(part, x, y)                        ->     checkpoint(part, h, labels)

Dynamo captures a body for each chunk. Where all of them compute alike, a copy of one runs on all chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.modes import modes_of
from cp_rewrite.passes.graph.new_nodes import autocasts_open, place_by
from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.regions import REGION_OPS, RegionCall, nested_graphs
from cp_rewrite.passes.graph.traced_again import first_difference
from cp_rewrite.passes.graph.writes import written_nodes
from cp_rewrite.torch_internals import FakeTensorMode, expression

JOINED = "cp_rewrite_joined"
"""The mark in a node's `meta`: "sum" of one that is added up, "rows" of others."""
CHUNKS = "cp_rewrite_chunks"
"""Beside it: how many chunks the node was computed in. It is what a loop holds at a time (`passes/tile`)."""


class NotAlike(Exception):
    """Chunks are not treated alike."""


class Bodies:
    """Numbers of regions' bodies: one for those that compute alike."""

    def __init__(self) -> None:
        self.known: list[fx.GraphModule] = []

    def number(self, body: fx.GraphModule) -> int:
        for number, other in enumerate(self.known):
            if body is other or first_difference(other, body, _equal) is None:
                return number
        self.known.append(body)
        return len(self.known) - 1


def _equal(a: Any, b: Any) -> bool:
    return expression(a) == expression(b)


def check_alone(node: fx.Node, chunked: Collection[fx.Node]) -> None:
    """Raise NotAlike of a node that makes a tensor of a chunk's size alone, as positions in a chunk are.

    chunked: those of its operands that are computed of a chunk.
    """
    if _has_tensor(node) and chunked and not any(map(_has_tensor, chunked)):
        raise NotAlike


def _has_tensor(node: fx.Node) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("example_value")))


def call_on_all(
    call: RegionCall,
    operands: Sequence[Any],
    of_chunk: Sequence[bool],
    before: fx.Node,
    mode: FakeTensorMode,
    chunks: int,
) -> fx.Node:
    """A call of a copy of a region's body, in front of a node, on operands of all chunks.

    Args:
        operands: in the place of `call.operands`. of_chunk: which of these are computed of one chunk.
        chunks: how many there are.
    Raises:
        NotAlike: the body works on more than its chunk. Others: it can't run on all chunks.
    """
    owner: Any = before.graph.owning_module
    values = [value_of(x) if isinstance(x, fx.Node) else x for x in operands]
    body, result = _body_on(call.body, values, of_chunk, mode)
    for node in body.graph.nodes:
        if JOINED in node.meta:
            node.meta[CHUNKS] = chunks
    count = sum(name.startswith("joined_body_") for name in vars(owner)["_modules"])
    setattr(owner, f"joined_body_{count}", body)
    target: Any = call.node.target
    between = [f"joined_{count}"] * (REGION_OPS[target.name()] - 1)
    with before.graph.inserting_before(before):
        read = before.graph.get_attr(f"joined_body_{count}")
        new = before.graph.call_function(target, (read, *between, *operands), dict(call.node.kwargs))
    new.meta = {**call.node.meta, "example_value": result}
    return new


def _body_on(
    body: fx.GraphModule, values: Sequence[Any], of_chunk: Sequence[bool], mode: FakeTensorMode
) -> tuple[fx.GraphModule, Any]:
    """A copy of a body whose nodes have run on other values of its inputs, and what it gives."""
    graph, modes = fx.Graph(), modes_of(body.graph)
    inputs = body.graph.find_nodes(op="placeholder")
    chunked = {node for node, chunk in zip(inputs, of_chunk, strict=True) if chunk}
    given = dict(zip(inputs, values, strict=True))
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = None
    for node in body.graph.nodes:
        new = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in given:
            new.meta |= {"example_value": given[node]} | ({JOINED: "rows"} if node in chunked else {})
        elif node.op == "output":
            result = fx.map_arg(new.args[0], lambda n: n.meta["example_value"])
        elif node.op != "get_attr" and "example_value" in node.meta:
            if nested_graphs(node) or written_nodes(node):
                raise NotAlike
            read = [n for n in node.all_input_nodes if n in chunked]
            check_alone(node, read)
            with autocasts_open(modes[node][0]):
                place_by(new, node, mode)
            if read:
                chunked.add(node)
                if isinstance(new.meta["example_value"], Tensor):
                    new.meta[JOINED] = "rows"
    module = fx.GraphModule(body, graph)
    module.meta = dict(body.meta)
    return module, result
