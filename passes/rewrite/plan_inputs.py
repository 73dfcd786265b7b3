"""The plan's tensors as inputs of a graph, and of the nested regions that need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.dynamo_internals import fake_input, inner_mode
from cp_rewrite.passes.graph.new_nodes import FakeValues
from cp_rewrite.passes.graph.regions import region_calls
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import IN_DOCUMENT, TOKEN_ROWS, PlanInput
from cp_rewrite.torch_internals import FakeTensorMode, fake_mode_of


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
        """What the calls of a nested region pass for one of its placeholders; nothing for the root's."""
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
