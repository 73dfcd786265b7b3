"""Segments of a graph, each compiled but for those that equal one before, and run one after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from cp_rewrite.calls import observe
from cp_rewrite.calls.progress import progress
from cp_rewrite.passes.graph.dynamo_internals import inner_mode
from cp_rewrite.passes.graph.regions import outputs_of
from cp_rewrite.passes.rewrite.snapshots import take_snapshots
from cp_rewrite.torch_internals import fake_mode_of

from .cut import Segment, examples_of
from .equal import description

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Described:
    """A segment, what a compiler is given as its inputs, and its kind: equal where one compiled function runs both."""

    segment: Segment
    examples: Sequence[Any]
    kind: Hashable


@dataclass(frozen=True)
class SegmentCall:
    """What runs a segment, given its inputs. `done`: those of them that nothing behind it reads."""

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
        with progress("compile", i + 1, len(parts)):
            if part.kind not in made:
                take_snapshots(segment.graph_module, written)
                made[part.kind] = compile_one(segment.graph_module, part.examples)
        done = tuple(node for node in segment.inputs if last_use[node] == i and node not in returned)
        calls.append(SegmentCall(segment.unit, segment.inputs, segment.outputs, done, made[part.kind]))
    observe.count_segments(len(parts), len(made))
    return calls


def in_order(gm: fx.GraphModule, calls: Sequence[SegmentCall]) -> Callable[..., list[Any]]:
    """What runs a graph call by call: it takes the graph's arguments, and gives its outputs."""
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
