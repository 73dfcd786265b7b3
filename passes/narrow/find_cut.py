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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.graph.writes import memory_of
from cp_rewrite.passes.values.cut import Cut, TokenRows
from cp_rewrite.passes.values.site import Site

from .read_way import ReadWay, Step, nodes_before

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


def find_cut(site: Site, way: ReadWay, costs: Costs) -> Cut | None:
    """The cheapest cut before a site's keys and values; None: at these themselves."""
    wanted = [site.key, site.value]
    steps = nodes_before(way, wanted)
    if any(way.rows_of(node) is None for node in wanted):
        return None
    behind = _cheapest(tuple(_edges(steps, wanted, costs)))
    if behind is None:
        return None
    numbered = list(enumerate(dict.fromkeys(steps.values())))
    again = [step for n, step in numbered if _in(n) in behind]
    sent = [step for n, step in numbered if _in(n) not in behind and _out(n) in behind]
    nodes = sorted((node for step in again for node in step.nodes), key=way.place.__getitem__)
    rows = [step.rows for step in sent if step.rows is not None]
    if not nodes or len(rows) < len(sent):
        return None
    bytes_of = [_row_bytes(each) for each in rows]
    kv_bytes = sum(_row_bytes(found) for node in wanted if (found := way.rows_of(node)) is not None)
    ordered = sorted(rows, key=lambda each: way.place[each.node])
    sizes = sum(bytes_of), kv_bytes, sum(map(_flops, nodes))
    return Cut(tuple(ordered), tuple(nodes), _numbers(nodes, way), way.mode[0], *sizes)


def _numbers(nodes: list[fx.Node], way: ReadWay) -> dict[fx.Node, Any]:
    """What nodes read that is no tensor."""
    found = {source: value_of(source) for node in nodes for source in node.all_input_nodes}
    plain = {n: x for n, x in found.items() if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))}
    return {n: tuple(map(way.number, x)) if isinstance(x, tuple) else way.number(x) for n, x in plain.items()}


_FIRST, _LAST = -1, -2
_Edge = tuple[int, int, int | None]
"""From, to, and what it costs to cut between them; None: no cut can be there."""


def _in(step: int) -> int:
    """Behind the cut: the step of this number runs on rows that came."""
    return 2 * step


def _out(step: int) -> int:
    """Behind the cut: that, or the step's rows travel."""
    return 2 * step + 1


def _edges(steps: Mapping[fx.Node, Step], wanted: list[fx.Node], costs: Costs) -> Iterator[_Edge]:
    number = {step: n for n, step in enumerate(dict.fromkeys(steps.values()))}
    for step, n in number.items():
        travels = step.rows is not None and not _others_read(step, steps)
        yield _in(n), _out(n), _cost(costs.byte * _row_bytes(step.rows)) if travels and step.rows else None
        operands = [steps[node] for node in step.operands if node in steps]
        if not step.again or len(operands) < len(step.operands):
            yield _FIRST, _in(n), None
            continue
        yield _FIRST, _in(n), _cost(sum(_seconds(node, costs) for node in step.nodes))
        yield from ((_out(number[operand]), _in(n), None) for operand in operands)
    yield from ((_out(number[steps[node]]), _LAST, None) for node in wanted)


@lru_cache(maxsize=256)
def _cheapest(edges: tuple[_Edge, ...]) -> frozenset[int] | None:
    """What is behind the cheapest cut, which layers that look alike share; None: no cut is possible."""
    graph = _networkx.DiGraph()
    for start, end, cost in edges:
        graph.add_edge(start, end, **({} if cost is None else {"capacity": cost}))
    try:
        _, (_, behind) = _networkx.minimum_cut(graph, _FIRST, _LAST)
    except _networkx.NetworkXUnbounded:
        return None
    return frozenset(behind)


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
