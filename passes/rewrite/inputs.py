"""Inputs of a graph as the rewrite needs them: snapshots of those that the graph writes (`take_snapshots`), and the
plan's tensors, passed on into the nested regions that need them (`Inputs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from cp_rewrite.passes.graph.dynamo import fake_input, inner_mode
from cp_rewrite.passes.graph.new_nodes import FakeValues
from cp_rewrite.passes.graph.nodes import graph_modules, memory_of, needs_gradient, region_calls, value_of
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import IN_DOCUMENT, TOKEN_ROWS, PlanInput
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of

_ops: Any = torch.ops.cp_rewrite
_WHY = "the graph writes it, and the backward may read it once more"


def take_snapshots(gm: fx.GraphModule, written: Collection[int]) -> None:
    """Take a snapshot of each input of a graph, and of its regions, whose memory is among `written`, so that the
    backward computes with what the forward read; nothing without grad.

    idx = (g + bias).argmax(-1)     the backward of torch's compilers may compute idx again, from g and bias
    bias.add_(step)                 and bias holds other numbers by then

    bias.copy_(snapshot(bias))      in front of all: what is read of bias afterwards is made of the snapshot, which no
                                    compiler makes again, and `bias` itself is needed no more
    """
    mode = fake_mode_of(gm.graph.nodes)
    if not torch.is_grad_enabled() or mode is None:
        return
    for module in graph_modules(gm):
        inputs = [n for n in module.graph.find_nodes(op="placeholder") if isinstance(value_of(n), Tensor)]
        # A region may stand where gradients are off, and can't tell.
        changed = [n for n in inputs if memory_of(n) in written and (module is gm or not needs_gradient(n))]
        if changed:
            _begin_with_snapshots(module, changed, mode)


def _begin_with_snapshots(module: fx.GraphModule, inputs: Sequence[fx.Node], mode: FakeTensorMode) -> None:
    graph, weights = module.graph, any(needs_gradient(node) for node in inputs)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first), mode:
        if weights:
            graph.call_function(torch._C._set_grad_enabled, (False,))
        for node in inputs:
            copy = graph.call_function(_ops.snapshot.default, (node,))
            back = graph.call_method("copy_", (node, copy))
            value: Any = value_of(node)
            copy.meta = {"example_value": torch.empty_like(value), "recompute": CheckpointPolicy.MUST_SAVE}
            back.meta = {"example_value": value}
            copy.meta["cp_rewrite"] = back.meta["cp_rewrite"] = _WHY
        if weights:
            graph.call_function(torch._C._set_grad_enabled, (True,))
    module.recompile()


class Inputs:
    """Placeholders for plan tensors: made in the root when named, and passed on into regions when asked for there."""

    def __init__(self, state: State, keys: Iterable[PlanInput]) -> None:
        self.root = state.graph_module
        mode = fake_mode_of(self.root.graph.nodes)
        assert mode is not None, "a graph with attention has tensors"
        self.mode, self.known = mode, FakeValues(mode)
        self.keys = tuple(dict.fromkeys(keys))
        self.callers = region_calls(self.root)
        masks = list(dict.fromkeys(key.mask for key in self.keys if key.mask))
        reads = list(dict.fromkeys(key.read for key in self.keys if key.read))
        self._nodes: dict[tuple[fx.Graph, PlanInput], fx.Node] = {}
        for key in self.keys:
            number = [masks.index(key.mask)] if key.mask else [f"read{reads.index(key.read)}"] if key.read else []
            name = "_".join(["cp", key.name, *map(str, number)])
            node = _append_placeholder(self.root.graph, name)
            _set_fake_values(node, state, key, self.mode)
            self._nodes[self.root.graph, key] = node

    def node(self, graph: fx.Graph, key: PlanInput) -> fx.Node:
        """The input inside `graph`, the root's or a nested region's."""
        if (graph, key) not in self._nodes:
            outer = self._nodes[self.root.graph, key]
            node = _append_placeholder(graph, outer.name)
            node.meta["example_value"] = outer.meta["example_value"]
            self._nodes[graph, key] = node
            for call in self.callers[graph]:
                call.args = (*call.args, self.node(call.graph, key))
        return self._nodes[graph, key]

    def operands(self, placeholder: fx.Node) -> list[fx.Node]:
        """Nodes that the calls of a nested region pass for one of its placeholders; none for the root's."""
        calls = self.callers.get(placeholder.graph, ())
        passed = [call.args[-_from_end(placeholder)] for call in calls]
        return [operand for operand in passed if isinstance(operand, fx.Node)]

    def drop_operand(self, placeholder: fx.Node) -> None:
        """Take an operand that nothing reads any more out of a region and of its calls."""
        position = _from_end(placeholder)
        for call in self.callers[placeholder.graph]:
            place = len(call.args) - position
            call.args = (*call.args[:place], *call.args[place + 1 :])
        placeholder.graph.erase_node(placeholder)


def _from_end(placeholder: fx.Node) -> int:
    placeholders = placeholder.graph.find_nodes(op="placeholder")
    return len(placeholders) - placeholders.index(placeholder)


def _append_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        node = graph.placeholder(name)
    node.meta["cp_rewrite"] = "rewrite_sites"
    return node


def _set_fake_values(node: fx.Node, state: State, key: PlanInput, mode: FakeTensorMode) -> None:
    """Give a new input its fake values: one in the graph's mode, one (`example_input`) in the inner compiler's."""
    tensor, inner = state.plan.example(key), inner_mode(mode)
    if key.is_per_token:
        # As long as a row's tokens, by the graph's own symbol: a symbol of its own would have to be guarded equal.
        shape = (state.tokens.rows, state.tokens.inputs[0].tokens)
        fake = _empty(inner, shape[2 - tensor.ndim :], tensor)
    elif key in (TOKEN_ROWS, IN_DOCUMENT):
        fake = fake_input(inner, tensor[:, 0], node.name, [True])  # of all ranks' tokens: a size of its own
        fake = _empty(inner, (*fake.shape, state.tokens.rows), tensor)
    else:
        # Lengths differ from batch to batch; what has a fixed size (columns, ranks) is static.
        dynamic = [dim == 0 and not key.tensor.static for dim in range(tensor.ndim)]
        fake = fake_input(inner, tensor, node.name, dynamic)
    node.meta["example_input"] = fake
    node.meta["example_value"] = fake if inner is mode else _empty(mode, fake.shape, tensor)


def _empty(mode: FakeTensorMode, shape: Sequence[Any], like: Tensor) -> Tensor:
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
