"""Segments of a graph, each compiled but for those that equal one before, and run one after another.

    root| 0 1 2 3 … 62 63 |root      segments
       A| B C B C …  B  C |D         a sliding window in every other layer: 4 are compiled

Two segments are equal where a compiler that is given either can't tell which it has: the same nodes in the same order,
with the same constants, and inputs of the same description. What it is not known how to compare is equal to itself
alone. A compiled one is called with the weights of each block.

Where no weights are sharded, blocks are told by where the model holds them:

L['self']._modules['layers']._modules['0']._modules['mlp']._parameters['weight']     a weight of block 0
L['self']._modules['layers']._modules['1']._modules['mlp']._parameters['weight']     of block 1
L['self']._modules['head']._parameters['weight']                                     of none
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor, nn

from cp_rewrite import torch_internals
from cp_rewrite.calls import observe
from cp_rewrite.passes.graph.dynamo import inner_mode, source_name, source_of
from cp_rewrite.passes.graph.nodes import attribute_of, memory_of, needs_gradient, outputs_of, value_of
from cp_rewrite.passes.rewrite.inputs import take_snapshots
from cp_rewrite.torch_internals import expression, fake_mode_of, is_parameter, memory_id

from .cut import ROOT, Segment, cut_graph, examples_of

_AS_WRITTEN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
"""Constants that are equal where they are written alike: 1 and True are not, nor 0.0 and -0.0."""
_UNREAD = frozenset(
    "example_value stack_trace nn_module_stack source_fn_stack torch_fn original_aten from_node seq_nr "
    "creation_timestamp cp_rewrite grapharg".split()
)
"""Notes on nodes that no compiler acts on: their values, where they come from and why they are there."""
_CHECKPOINT = "ac_graph_id"
"""Which checkpoint a node is of: torch numbers all of a process."""
_SMALL = 4096
"""Bytes of a constant up to which its numbers are compared."""


def description(segment: Segment, examples: Sequence[Any], written: Collection[int]) -> Hashable:
    """Equal for segments of one graph that one compiled function may run.

    Args:
        segment: before snapshots are taken of what it writes.
        examples: what the compiler is given as its inputs.
        written: memory that any part of the whole graph writes into.
    """
    memory = [memory_of(node) for node in segment.inputs]
    aliases = tuple(memory.index(found) for found in memory)
    storages = [memory_id(x) if _is_plain(x) else id(x) for x in examples]
    shared = tuple(storages.index(found) for found in storages)
    return _graph(segment.graph, written, {}), tuple(map(_input, examples)), aliases, shared


def _graph(graph: fx.Graph, written: Collection[int], checkpoints: dict[int, int]) -> Hashable:
    """`checkpoints`: torch's number of a checkpoint -> its place among those of the segment."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    return tuple(_node(node, place, written, checkpoints) for node in nodes)


def _node(node: fx.Node, place: dict[fx.Node, int], written: Collection[int], checkpoints: dict[int, int]) -> Hashable:
    target: Hashable = None
    if node.op == "placeholder":  # it has a place, and a name of its own; snapshots are taken by these
        target = memory_of(node) in written and (True, needs_gradient(node))
    elif node.op == "get_attr":
        target = _held(node, written, checkpoints)
    elif node.op == "call_module":
        target = id(node.graph.owning_module.get_submodule(str(node.target)))  # type: ignore[union-attr]
    elif node.op == "call_method":
        target = str(node.target)
    elif node.op == "call_function":
        target = id(node.target)
    facts = {key: value for key, value in node.meta.items() if key not in _UNREAD}
    if _CHECKPOINT in facts:
        facts[_CHECKPOINT] = checkpoints.setdefault(facts[_CHECKPOINT], len(checkpoints))
    return node.op, target, _constant((node.args, node.kwargs, facts), place)


def _held(node: fx.Node, written: Collection[int], checkpoints: dict[int, int]) -> Hashable:
    """The value that a get_attr node reads, as a key: nested graphs and small tensors that nothing writes by what they
    are."""
    value = attribute_of(node)
    if isinstance(value, fx.GraphModule):
        return _graph(value.graph, written, checkpoints)
    if type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu":
        small = value.numel() * value.element_size() <= _SMALL and not value.requires_grad
        if small and memory_of(node) not in written and memory_id(value) not in written:
            numbers = value.contiguous().flatten().view(torch.uint8) if value.numel() else value.flatten()
            return str(value.dtype), tuple(value.shape), value.stride(), tuple(numbers.tolist())
    return id(value)


def _constant(value: Any, place: dict[fx.Node, int]) -> Hashable:
    """An argument of a node. `place`: of the nodes of its graph."""
    if isinstance(value, fx.Node):
        return fx.Node, place[value]
    if isinstance(value, SymInt | SymFloat | SymBool):
        return type(value), expression(value)
    if isinstance(value, tuple | list):
        kind = tuple if isinstance(value, tuple) else list
        return kind, *(_constant(entry, place) for entry in value)
    if isinstance(value, dict):
        return dict, *((_constant(key, place), _constant(entry, place)) for key, entry in value.items())
    if isinstance(value, slice):
        return slice, *(_constant(part, place) for part in (value.start, value.stop, value.step))
    return (type(value), repr(value)) if type(value) in _AS_WRITTEN else (type(value), id(value))


def _input(value: Any) -> Hashable:
    """A key of all that a compiler sees of an input."""
    if not isinstance(value, Tensor):
        return _constant(value, {})
    if not _is_plain(value):
        return id(value)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    marks = sorted((name, repr(mark)) for name, mark in vars(value).items() if name.startswith("_dynamo"))
    return (
        type(value), value.dtype, value.device, value.ndim, tuple(map(expression, sizes)), value.requires_grad,
        value.is_leaf, value.is_conj(), value.is_neg(), is_parameter(value), id(getattr(value, "constant", None)),
        *marks,
    )  # fmt: skip


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch_internals.FakeTensor, torch.nn.Parameter) and value.layout == torch.strided


Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Described:
    """A segment, what a compiler is given as its inputs, and its kind: equal where one compiled function runs both."""

    segment: Segment
    examples: Sequence[Any]
    kind: Hashable


@dataclass(frozen=True)
class SegmentCall:
    """A call of a segment's compiled unit. `done`: those of its inputs that nothing behind it reads."""

    unit: int
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    done: tuple[fx.Node, ...]
    run: Callable[..., Sequence[Any]]


def described(
    gm: fx.GraphModule, segments: Sequence[Segment], example_inputs: Sequence[Any], written: Collection[int]
) -> list[Described]:
    """`example_inputs`: of the whole graph. `written`: memory that any part of it writes into."""
    fakes = fake_mode_of(gm.graph.nodes)
    assert fakes is not None, "a graph of a model has tensors"
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    inner = inner_mode(fakes)
    examples = [examples_of(segment, given, inner) for segment in segments]
    return [Described(s, e, description(s, e, written)) for s, e in zip(segments, examples, strict=True)]


def compile_once(
    gm: fx.GraphModule, parts: Sequence[Described], compile_one: Compile, written: Collection[int]
) -> list[SegmentCall]:
    """Calls in the order in which the segments run. `compile_one` compiles a graph, given its example inputs.
    `written`: memory that any part of the whole graph writes into."""
    returned = {*outputs_of(gm)}
    last_use = {node: i for i, part in enumerate(parts) for node in part.segment.inputs}
    made: dict[Hashable, Callable[..., Any]] = {}
    calls: list[SegmentCall] = []
    for i, part in enumerate(parts):
        segment = part.segment
        with observe.progress("compile", i + 1, len(parts)):
            if part.kind not in made:
                take_snapshots(segment.graph_module, written)
                made[part.kind] = compile_one(segment.graph_module, part.examples)
        done = tuple(node for node in segment.inputs if last_use[node] == i and node not in returned)
        calls.append(SegmentCall(segment.unit, segment.inputs, segment.outputs, done, made[part.kind]))
    observe.count_segments(len(parts), len(made))
    return calls


def in_order(gm: fx.GraphModule, calls: Sequence[SegmentCall]) -> Callable[..., list[Any]]:
    """A function that runs a graph call by call: it takes the graph's arguments, and gives its outputs."""
    outputs = outputs_of(gm)
    read = {node for call in calls for node in call.inputs} | {*outputs}
    places = [(i, node) for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in read]

    def run(*args: Any) -> list[Any]:
        values: dict[fx.Node, Any] = {node: args[i] for i, node in places}
        for call in calls:
            inputs = [values[node] for node in call.inputs]
            for node in call.done:
                del values[node]
            values.update(zip(call.outputs, call.run(*inputs), strict=True))
        return [values[node] if isinstance(node, fx.Node) else node for node in outputs]

    return run


_ENTRY = re.compile(r"_modules\['\d+'\]")
"""An entry of a list of modules."""


def equal_blocks(gm: fx.GraphModule, example_inputs: Sequence[Any], written: Collection[int]) -> list[Described] | None:
    """A graph's segments, where some of them are equal; None: it is compiled as one. `written`: memory that it writes
    into."""
    units = block_weights(gm)
    if len({*units.values()} - {ROOT}) < 2:
        return None
    try:
        segments = cut_graph(gm, units)
    except ValueError:  # blocks share weights, or there is no place to cut
        return None
    if _writes_across(gm, segments, written):
        return None
    parts = described(gm, segments, example_inputs, written)
    return parts if len({part.kind for part in parts}) < len(parts) else None


def block_weights(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Placeholder of a weight -> the number of its block: of the first entry of a list of modules on the way to it."""
    blocks: dict[str, int] = {}
    units: dict[fx.Node, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if isinstance(value_of(node), nn.Parameter):
            name = source_name(source_of(node))
            entry = _ENTRY.search(name)
            units[node] = ROOT if entry is None else blocks.setdefault(name[: entry.end()], len(blocks) + 1)
    return units


def _writes_across(gm: fx.GraphModule, segments: Sequence[Segment], written: Collection[int]) -> bool:
    """True if memory that crosses from segment to segment is written in place: a compiler of one sees no views that
    another has of it."""
    crossing = {node for segment in segments for node in segment.inputs if node.op != "placeholder"}
    crossing |= {node for node in gm.graph.find_nodes(op="placeholder") if needs_gradient(node)}
    return any(memory_of(node) in written for node in crossing)
