"""A graph, cut where one sharded block of the model ends and the next begins.

    nodes      embed norm attend mlp add | norm attend mlp add | norm head loss
    weights    root  0    0      0         1    1      1         root root
    segments   root| 0 . . . . . . . . .   1 . . . . . . . . .   root . . . . .

From the first to the last use of a block's weights all nodes are the block's. Between two blocks the cut is where the
fewest tensors that need gradients cross: as a rule the hidden states alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor

from cp_rewrite.passes.graph.nodes import needs_gradient, value_of

ROOT = 0
"""The unit that holds what is in no block; its weights are there during the whole forward."""
_OPENS, _CLOSES = ("_enter_autocast", "_increment_nesting"), ("_exit_autocast", "_decrement_nesting")
_CROSSES = (Tensor, SymInt, SymFloat, SymBool, int, float, bool)


@dataclass(frozen=True)
class Segment:
    """A run of nodes that is one unit's. `inputs`: nodes before it. `outputs`: nodes of it that are read behind it.
    `graph`: a copy of them, in a graph of their own."""

    unit: int
    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """Made where it is compiled: its code takes longer to write than its graph to compare."""
        assert self.graph.owning_module is not None
        return fx.GraphModule(self.graph.owning_module, self.graph)


def cut_graph(gm: fx.GraphModule, units: Mapping[fx.Node, int]) -> list[Segment]:
    """Segments in the order in which they run.

    Args:
        gm: a graph of Dynamo's kind. units: placeholder of a weight -> the unit that holds it.
    Raises:
        ValueError: weights of two blocks are used in turns, or between two blocks there is no place to cut.
    """
    computed = _computed_sizes(gm)
    apart = {*computed}
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output") and n not in apart]
    used = [[units[n] for n in node.all_input_nodes if n in units] for node in nodes]
    spans, costs = _spans(used), _crossing(nodes)
    cuts, tail = [0], -1  # tail: nodes of a block behind the last use of its weights
    for (unit, before), (_, after) in pairwise(spans):
        places = range(before.stop, after.start + 1)
        cuts.append(_cheapest(costs, places, places[-1] if unit == ROOT or tail < 0 else before.stop + tail))
        tail = tail if unit == ROOT else cuts[-1] - before.stop
    cuts.append(len(nodes))
    runs = [(unit, nodes[start:stop]) for (unit, _), (start, stop) in zip(spans, pairwise(cuts), strict=True)]
    return [_segment(gm, unit, run, computed) for unit, run in runs]


def _spans(used: Sequence[Sequence[int]]) -> list[tuple[int, range]]:
    """(unit, nodes that are its own), in order: of a block from the first to the last use of its weights; the root's
    between them, where its weights are used."""
    blocks: dict[int, range] = {}
    for i, units in enumerate(used):
        for unit in units:
            blocks[unit] = range(blocks[unit].start if unit in blocks else i, i + 1)
    blocks.pop(ROOT, None)
    ordered = sorted(blocks.items(), key=lambda item: item[1].start)
    for (_, a), (_, b) in pairwise(ordered):
        if b.start < a.stop:
            raise ValueError("two blocks use their weights in turns: name other blocks, or blocks=() for none")
    spans: list[tuple[int, range]] = []
    start = 0
    for unit, span in [*ordered, (ROOT, range(len(used), len(used)))]:
        own = [i for i in range(start, span.start) if ROOT in used[i]]
        spans += [(ROOT, range(own[0], own[-1] + 1))] if own else []
        spans += [(unit, span)] if unit != ROOT else []
        start = span.stop
    return spans or [(ROOT, range(len(used)))]


def _crossing(nodes: Sequence[fx.Node]) -> list[int | None]:
    """How many tensors that need gradients cross a cut before each node; None: nothing may be cut there."""
    place = {node: i for i, node in enumerate(nodes)}
    gradients, others = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        last = max((place.get(user, len(nodes)) for user in node.users), default=i)
        kind = None if not node.users else gradients if needs_gradient(node) else others
        if kind is not None and (kind is gradients or not isinstance(value_of(node), _CROSSES)):
            kind[i + 1] += 1
            if last < len(nodes):
                kind[last + 1] -= 1
    opened = _opened(nodes)
    return [
        None if bad or inside else count
        for count, bad, inside in zip(accumulate(gradients), accumulate(others), opened, strict=True)
    ]


def _opened(nodes: Sequence[fx.Node]) -> list[bool]:
    """True if a cut before each node, or behind the last, is inside of autocast, of a transform or of another grad
    mode."""
    depth, inside = 0, [False]
    first: bool | None = None
    grad: bool | None = None
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        depth += name.endswith(_OPENS) - name.endswith(_CLOSES)
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
            first = not grad if first is None else first
        inside.append(depth > 0 or grad != first)
    return inside


def _cheapest(costs: Sequence[int | None], places: range, wanted: int) -> int:
    """The cheapest place to cut before: of several the wanted one, else the last. A last block is to end where those
    before it do, so that it is compiled with them."""
    found = [(cost, place != wanted, -place) for place in places if (cost := costs[place]) is not None]
    if not found:
        raise ValueError(
            "there is no place to cut the graph between two blocks: enter autocast outside of the model, or pass "
            "blocks=() to shard the model as one"
        )
    return -min(found)[-1]


def _computed_sizes(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes that compute sizes from those that Dynamo names and nothing else, and that are not returned."""
    found: dict[fx.Node, None] = {}
    named = {node for node in gm.graph.find_nodes(op="placeholder") if isinstance(value_of(node), SymInt)}
    returned = gm.graph.output_node().all_input_nodes
    for node in gm.graph.nodes:
        pure = node.op == "call_function" and isinstance(value_of(node), SymInt) and node not in returned
        if pure and all(n in named or n in found for n in node.all_input_nodes):
            found[node] = None
    return [*found]


def _segment(gm: fx.GraphModule, unit: int, run: Sequence[fx.Node], computed: Sequence[fx.Node]) -> Segment:
    """A graph of its own of some nodes. Sizes that Dynamo names go into every segment: compilers ask for them. What is
    `computed` from them is computed in each segment that reads it: the first of equal blocks is like the others."""
    inside = set(run)
    for node in reversed(computed):
        inside |= {node} if any(user in inside for user in node.users) else set()
    nodes = [*(node for node in computed if node in inside), *run]
    sizes = [n for n in gm.graph.find_nodes(op="placeholder") if isinstance(value_of(n), SymInt)]
    read = [n for node in nodes for n in node.all_input_nodes if n not in inside]
    inputs = dict.fromkeys([*sizes, *(n for n in read if n.op != "get_attr")])
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    graph, copies = fx.Graph(gm), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["example_value"] = value_of(node)
    for node in dict.fromkeys([*(n for n in read if n.op == "get_attr"), *nodes]):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Segment(unit, graph, tuple(inputs), tuple(outputs))


def examples_of(segment: Segment, given: Mapping[fx.Node, Any], mode: Any) -> list[Any]:
    """Example inputs of a segment, for its compiler: the graph's own where they are inputs of it, else fakes of
    `mode`."""
    return [given[node] if node in given else _like(value_of(node), mode) for node in segment.inputs]


def _like(value: Any, mode: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with mode, torch.no_grad():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)
