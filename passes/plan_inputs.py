"""The plan's tensors as inputs of a graph, and of the nested regions that need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from cp_rewrite.batch.active import PlanInput
from cp_rewrite.passes.locality.inputs import token_dims
from cp_rewrite.passes.values.state import State


class Inputs:
    """Placeholders for plan tensors: made in the root when named, and passed on into regions when asked for there."""

    def __init__(self, state: State, keys: Iterable[PlanInput]) -> None:
        self.root = state.graph_module
        self.mode = fake_mode(self.root)
        self.keys = tuple(dict.fromkeys(keys))
        self.callers = find_callers(self.root)
        masks = list(dict.fromkeys(key.mask for key in self.keys if key.mask))
        self._nodes: dict[tuple[fx.Graph, PlanInput], fx.Node] = {}
        for key in self.keys:
            name = "_".join(["cp", key.name] + ([str(masks.index(key.mask))] if key.mask else []))
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


def find_callers(root: fx.GraphModule) -> dict[fx.Graph, list[fx.Node]]:
    """Which nodes call each nested region's graph. Operands are the last arguments of such a call."""
    callers: dict[fx.Graph, list[fx.Node]] = {}
    for gm in root.modules():
        if isinstance(gm, fx.GraphModule):
            for node in gm.graph.nodes:
                body: Any = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
                if isinstance(body, fx.GraphModule):
                    callers.setdefault(body.graph, []).extend(node.users)
    return callers


def fake_mode(gm: fx.GraphModule) -> FakeTensorMode:
    """The mode of the graph's fake tensors."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _append_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        node = graph.placeholder(name)
    node.meta["cp_rewrite"] = "rewrite_sites"
    return node


def _set_fake_values(node: fx.Node, state: State, key: PlanInput, mode: FakeTensorMode) -> None:
    """Give a new input its fake values: one in the graph's mode, one (`example_input`) in the inner compiler's.

    While a backend runs, Dynamo's tracing context holds a fresh mode that shares the graph's symbols.
    """
    tensor = state.plan.example(key)
    context = TracingContext.try_get()
    inner = mode if context is None or context.fake_mode is None else context.fake_mode
    if key.name == "row_index":
        # As long as a row's tokens, by the graph's own symbol: a symbol of its own would have to be guarded equal.
        fake = _empty(inner, (_token_size(state),), tensor)
    else:
        # Lengths differ from batch to batch; what has a fixed size (columns, ranks) is static.
        dynamic = DimDynamic.STATIC if key.is_static else DimDynamic.DYNAMIC
        sizes = [dynamic if dim == 0 else DimDynamic.STATIC for dim in range(tensor.ndim)]
        symbols = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[call-arg]
        fake = inner.from_tensor(tensor, source=LocalSource(node.name), symbolic_context=symbols)
    node.meta["example_input"] = fake
    node.meta["example_value"] = fake if inner is mode else _empty(mode, fake.shape, tensor)


def _empty(mode: FakeTensorMode, shape: Sequence[Any], like: Tensor) -> Tensor:
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _token_size(state: State) -> Any:
    dims = token_dims(state.sharding)
    for node, name in state.source_of.items():
        if name in dims:
            return node.meta["example_value"].shape[dims[name]]
    raise AssertionError("positions are made from a token size, so the graph has a token input")
