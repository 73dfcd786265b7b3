"""The cheapest tensors to exchange on the way to keys and values: a minimal cut.

    c_kv (576) ─ split ─┬─ norm (512) ─ up-projection (32768) ─┬─ k_nope ── k (24576)
                        └─ rope (64) ─ expand (8192) ──────────┼───────────┘
                                                               └─ v (16384)

A tensor costs what it takes to exchange it, a node behind the cut what it takes to run it on the rows that came. All
that a node behind the cut reads is behind it too, or travels. Of cuts that cost the same the one nearest to attention
is taken.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.operands import value_of
from cp_rewrite.passes.graph.writes import memory_of
from cp_rewrite.passes.values.cut import Cut, TokenRows
from cp_rewrite.passes.values.site import Site

from .read_way import Step, Way, nodes_before

_networkx: Any = importlib.import_module("networkx")  # torch needs it too; it has no types
_UNIT = 1e-15
"""Seconds: costs are whole numbers of it, so that all ranks find the same cut."""


@dataclass(frozen=True)
class Costs:
    """Seconds for one row. Args: byte: that travels. flop: of a forward, and of the backward with it. written: for each
    byte of a result."""

    byte: float
    flop: float
    written: float


def find_cut(site: Site, way: Way, costs: Costs) -> Cut | None:
    """The cheapest cut before a site's keys and values; None: at these themselves."""
    wanted = [site.key, site.value]
    steps = nodes_before(way, wanted)
    if any(way.rows_of(node) is None for node in wanted):
        return None
    behind = _behind(steps, wanted, costs)
    if behind is None:
        return None
    again = [step for step in dict.fromkeys(steps.values()) if ("in", step) in behind]
    sent = [step for step in dict.fromkeys(steps.values()) if ("in", step) not in behind and ("out", step) in behind]
    nodes = sorted((node for step in again for node in step.nodes), key=way.place.__getitem__)
    rows = [step.rows for step in sent if step.rows is not None]
    if not nodes or len(rows) < len(sent):
        return None
    bytes_of = [_row_bytes(each) for each in rows]
    kv_bytes = sum(_row_bytes(found) for node in wanted if (found := way.rows_of(node)) is not None)
    ordered = sorted(rows, key=lambda each: way.place[each.node])
    sizes = sum(bytes_of), kv_bytes, sum(map(_flops, nodes))
    return Cut(tuple(ordered), tuple(nodes), _numbers(nodes, way), way.mode[0], *sizes)


def _numbers(nodes: list[fx.Node], way: Way) -> dict[fx.Node, Any]:
    """What nodes read that is no tensor."""
    found = {source: value_of(source) for node in nodes for source in node.all_input_nodes}
    plain = {n: x for n, x in found.items() if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))}
    return {n: tuple(map(way.number, x)) if isinstance(x, tuple) else way.number(x) for n, x in plain.items()}


def _behind(steps: Mapping[fx.Node, Step], wanted: list[fx.Node], costs: Costs) -> set[Any] | None:
    """("in", step) of the steps that run on rows that came; ("out", step) of those and of the rows that travel. None:
    no cut there is possible."""
    graph = _networkx.DiGraph()
    graph.add_node("first")
    for step in dict.fromkeys(steps.values()):
        if step.rows is not None and not _others_read(step, steps):
            graph.add_edge(("in", step), ("out", step), capacity=_cost(costs.byte * _row_bytes(step.rows)))
        else:
            graph.add_edge(("in", step), ("out", step))
        operands = [steps[node] for node in step.operands if node in steps]
        if not step.again or len(operands) < len(step.operands):
            graph.add_edge("first", ("in", step))
            continue
        graph.add_edge("first", ("in", step), capacity=_cost(sum(_seconds(node, costs) for node in step.nodes)))
        for operand in operands:
            graph.add_edge(("out", operand), ("in", step))
    for node in wanted:
        graph.add_edge(("out", steps[node]), "last")
    try:
        _, (_, behind) = _networkx.minimum_cut(graph, "first", "last")
    except _networkx.NetworkXUnbounded:
        return None
    return behind


def _others_read(step: Step, steps: Mapping[fx.Node, Step]) -> bool:
    """Whether what several nodes write is read on the way before attention reads it."""
    inside = set(step.nodes)
    return len(step.nodes) > 1 and any(not inside.isdisjoint(other.operands) for other in steps.values())


def _row_bytes(rows: TokenRows) -> int:
    return rows.columns * value_of(rows.node).element_size()


def _seconds(node: fx.Node, costs: Costs) -> float:
    value = value_of(node)
    sources = {memory_of(source) for source in node.all_input_nodes}
    is_view = isinstance(value, Tensor) and memory_of(node) in sources
    leaves = [] if is_view else [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    written = sum(_fixed(leaf) * leaf.element_size() for leaf in leaves)
    return costs.flop * _flops(node) + costs.written * written


def _flops(node: fx.Node) -> int:
    """Of a forward for one token: two for each weight; nothing but products of matrices counts."""
    matrices = [value_of(source) for source in node.all_input_nodes]
    return 2 * sum(
        _fixed(x) for x in matrices if isinstance(x, Tensor) and x.ndim > 1 and all(isinstance(n, int) for n in x.shape)
    )


def _fixed(x: Tensor) -> int:
    """Elements of a tensor for each token: sizes that the batch decides left out."""
    count = 1
    for size in x.shape:
        count *= size if isinstance(size, int) else 1
    return count


def _cost(seconds: float) -> int:
    return round(seconds / _UNIT)
