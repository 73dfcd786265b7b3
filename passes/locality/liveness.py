"""Liveness of nodes: which still matter once attention no longer reads its masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import (
    graph_modules,
    is_function,
    memory_of,
    nested_graphs,
    reached,
    region_call,
    region_calls,
    value_of,
    written_nodes,
)
from cp_rewrite.passes.locality.claims import Extents


class Reader(Protocol):
    """An attention node, and what the attention that takes its place reads: a `Site`, or how it was decided to run."""

    @property
    def node(self) -> fx.Node: ...
    @property
    def operands(self) -> list[fx.Node]: ...


def live_nodes(gm: fx.GraphModule, sites: Sequence[Reader], refused: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Nodes of the graph and its nested regions that outputs or effects depend on, masks of `sites` left out, and of
    attention that was refused.

    A nested region's operand is live when the region's placeholder is. A node that writes into memory is live when
    something else that reads this memory is, or when the memory belongs to an input.
    """
    walk = _Liveness({site.node: site for site in sites}, refused)
    walk.enter(gm)
    walk.run()
    return walk.live


def sources_of(nodes: Iterable[fx.Node], gm: fx.GraphModule, sites: Iterable[Reader]) -> set[fx.Node]:
    """Nodes, and all that they are made of in the graph and its nested regions, masks of `sites` left out."""
    reads, calls = {site.node: site.operands for site in sites}, region_calls(gm)
    writers: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in (node for module in graph_modules(gm) for node in module.graph.nodes):
        for target in written_nodes(node):
            writers[memory_of(target)].append(node)

    def before(node: fx.Node) -> list[fx.Node]:
        made_of = reads[node] if node in reads else node.all_input_nodes
        written = [writer for source in made_of for writer in writers[memory_of(source)]]
        found = [*made_of, *(writer for writer in written if writer.graph is not node.graph or writer < node)]
        if node.op == "placeholder":
            filled = [call.filled[node] for caller in calls.get(node.graph, ()) if (call := region_call(caller))]
            found += [operand for operand in filled if isinstance(operand, fx.Node)]
        if (call := region_call(node)) is not None:
            found += call.body.graph.find_nodes(op="output")
        return found

    return reached(nodes, before)


def scores_of(attention: Sequence[fx.Node], extents: Extents) -> set[fx.Node]:
    """These nodes, and what pairs tokens with tokens on the way to them: their scores and masks."""
    return reached(attention, lambda node: [n for n in node.all_input_nodes if _pairs_tokens(n, extents)])


def _pairs_tokens(node: fx.Node, extents: Extents) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and sum(extents.counts_tokens(size) for size in value.shape) > 1


class _Liveness:
    def __init__(self, sites: Mapping[fx.Node, Reader], refused: Collection[fx.Node]) -> None:
        self.sites, self.refused = sites, refused
        self.live: set[fx.Node] = set()
        self.pending: list[fx.Node] = []
        self.writers: dict[int, list[fx.Node]] = defaultdict(list)
        self.operands: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.entered: set[fx.GraphModule] = set()

    def enter(self, gm: fx.GraphModule) -> None:
        if gm in self.entered:
            return
        self.entered.add(gm)
        inputs = {memory_of(node) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")}
        for node in gm.graph.nodes:
            if node.op == "output" or node.target in _ASSERTIONS:
                self.pending.append(node)
            for target in written_nodes(node):
                memory = memory_of(target)
                if memory is None or memory in inputs:
                    self.pending.append(node)
                else:
                    self.writers[memory].append(node)

    def run(self) -> None:
        while self.pending:
            node = self.pending.pop()
            if node in self.live:
                continue
            self.live.add(node)
            memory = memory_of(node)
            if memory is not None:
                self.pending.extend(self.writers[memory])
            self.pending.extend(self._inputs(node))

    def _inputs(self, node: fx.Node) -> Sequence[fx.Node]:
        site = self.sites.get(node)
        if site is not None:
            return site.operands
        if node.op == "placeholder":
            return self.operands[node]
        if node in self.refused and is_attention(node.target):  # for its mask, which need not be looked at once more
            return [arg for arg in node.args[:3] if isinstance(arg, fx.Node)] or node.all_input_nodes
        call = region_call(node)
        if call is None:
            for body in nested_graphs(node).values() if is_function(node) else ():
                self.enter(body)
            return node.all_input_nodes
        self.enter(call.body)
        for placeholder, operand in call.filled.items():
            if isinstance(operand, fx.Node):
                self.operands[placeholder].append(operand)
                if placeholder in self.live:
                    self.pending.append(operand)
        return []


_ASSERTIONS = frozenset(
    {
        torch._assert_async,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_scalar.default,
    }
)
"""Assertions of a model, which must hold of the row's values: `torch._check_tensor_all` counts tokens of images."""
_ATTENTION = frozenset(
    {"multi_head_attention_forward", "scaled_dot_product_attention", "flex_attention", "_varlen_attn"}
)


def is_attention(target: Any) -> bool:
    """True if a node's target is one of the attention functions that a rewrite looks for."""
    called = target.name() if callable(getattr(target, "name", None)) else getattr(target, "__name__", "")
    return str(called).split("::")[-1].split(".")[0] in _ATTENTION
