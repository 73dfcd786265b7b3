"""Exchange what keys and values are computed from, where that is narrower and takes less time.

c_kv (576) ─ split ─┬─ norm (512) ─ up-projection (32768) ─┬─ k_nope ── k (24576)
                    └─ rope (64) ─ expand (8192) ──────────┼───────────┘
                                                           └─ v (16384)

Step, GraphOrder, ReadWay   the way to keys and values: which nodes make of any tokens' rows what they make of a
                            rank's own
Costs, find_cut             the cheapest tensors to exchange on it: a minimal cut
move_exchanges              the pass. It is pure: equal on all ranks
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import memory_of, written_nodes
from cp_rewrite.planning.choose_exchange import exchange_seconds, fill_seconds
from cp_rewrite.planning.cost.constants import EXPANDED_PASSES, NARROW_GAIN, NARROW_PASSES
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load, kernel_seconds
from cp_rewrite.planning.routes.gathered import all_gather_seconds, needed_seconds
from cp_rewrite.torch_internals import HigherOrderOperator, fake_mode_of

from .graph.nodes import (
    Mode,
    collective_group,
    draws_random_numbers,
    is_transformed,
    modes_of,
    op_name,
    region_calls,
    value_of,
)
from .locality.claims import REPLICATED, Extents, Order, Rows, T
from .locality.ends import read_extents
from .plan_sites import between_gpus, decide, load_for, model_of, target_speeds
from .values.state import Cut, Decision, Site, State, TokenRows

MOST_NODES = 96
"""How many nodes are looked at before keys and values."""
_SIZED = frozenset(
    "view reshape expand unflatten broadcast_to new_empty new_zeros new_ones new_full getitem size".split()
)
"""Ops that may read a count of tokens: a size of their result."""


@dataclass(frozen=True, eq=False)
class Step:
    """A node; or several that make one memory by writing into it.

    Args:
        nodes: in the graph's order. operands: the tensors that they read, of other steps.
        again: it can be computed of other ranks' rows. rows: it, as what may travel; None: it can't.
    """

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    again: bool
    rows: TokenRows | None


class GraphOrder:
    """Facts that the ways of one graph share: each node's place, the modes that are open there, and who writes memory.

    Args (read off the graph):
        shown: memory -> nodes that hold it or write into it, in order. written_at: memory -> where it is first written.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.place: dict[fx.Node, int] = {}
        self.modes: dict[fx.Node, Mode] = {}
        self.shown: dict[int, list[fx.Node]] = {}
        self.written_at: dict[int, int] = {}
        for number, (node, mode) in enumerate(modes_of(graph).items()):
            self.place[node], self.modes[node] = number, mode
            written = {memory_of(target) for target in written_nodes(node)}
            for memory in {memory_of(node), *written}:
                if memory is not None:
                    self.shown.setdefault(memory, []).append(node)
            for memory in written:
                if memory is not None:
                    self.written_at.setdefault(memory, number)


class ReadWay:
    """Steps on the way to some nodes of one graph: which of them give of the rows of any tokens what they give of this
    rank's.

    The locality check has shown that nothing but attention mixes tokens. So a node behind it makes of exchanged rows
    what their owner made of them, if it reads rows of tokens and what all ranks have, and nothing else: no count of
    tokens but as a size, no positions, no random numbers, nothing that is made whole.

    Args:
        end: the attention node. order: its graph's. states: what the locality check knows of each node. changed: nodes
            that a rewrite changes or replaces.
    """

    def __init__(
        self,
        end: fx.Node,
        order: GraphOrder,
        states: Mapping[fx.Node, Any],
        extents: Extents,
        changed: Collection[fx.Node],
    ) -> None:
        self.end, self.order, self.states, self.extents, self.changed = end, order, states, extents, changed
        self.place, self.mode = order.place, order.modes[end]

    def _is_written(self, node: fx.Node) -> bool:
        """True if a node before the end writes into the memory of this one."""
        memory = memory_of(node)
        return memory is not None and self.order.written_at.get(memory, math.inf) < self.place[self.end]

    def _sharers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes before the end that hold a node's memory, where one of them writes into it; else the node alone."""
        memory = memory_of(node)
        if memory is None or not self._is_written(node):
            return [node]
        return [other for other in self.order.shown[memory] if self.place[other] < self.place[self.end]]

    def step(self, node: fx.Node, read_at_end: bool) -> Step:
        """The step that makes a node. `read_at_end`: attention reads it, so that it may travel as it is then."""
        nodes = self._sharers(node)
        inside = set(nodes)
        operands = [n for x in nodes for n in x.all_input_nodes if n not in inside and self._carries_tokens(n)]
        again = all(map(self._again, nodes)) and any(map(self._carries_tokens, nodes))
        again = again and (len(nodes) == 1 or any(self._carries_tokens(n) for n in operands))
        again = again and (len(nodes) > 1 or bool(operands))
        # Memory that is written may hold something else when attention reads it.
        rows = self.rows_of(node) if len(nodes) == 1 or read_at_end else None
        return Step(tuple(nodes), tuple(dict.fromkeys(operands)), again, rows)

    def _carries_tokens(self, node: fx.Node) -> bool:
        return any(isinstance(state, Rows) for state in tree_leaves(self.states.get(node, REPLICATED)))

    def _again(self, node: fx.Node) -> bool:
        """True if a node, looked at by itself, can be computed of rows that came from other ranks."""
        if node.op not in ("call_function", "call_method") or node in self.changed:
            return False
        if self.order.modes[node] != self.mode:
            return False
        if isinstance(node.target, HigherOrderOperator) or collective_group(node) or is_transformed(node):
            return False
        if draws_random_numbers(node) or any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(node.args)):
            return False
        results = tree_leaves(self.states.get(node, REPLICATED))
        tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves(value_of(node)))
        if tensor and not all(isinstance(state, Rows) and _is_plain(state) for state in results):
            return False
        return all(map(self._readable, node.all_input_nodes)) and not (
            op_name(node) not in _SIZED and any(self._counts_tokens(n) for n in node.all_input_nodes)
        )

    def _readable(self, node: fx.Node) -> bool:
        leaves = tree_leaves(value_of(node))
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return all(self.number(leaf) is not None for leaf in leaves)
        states = tree_leaves(self.states.get(node, REPLICATED))
        if not all(state is REPLICATED or (isinstance(state, Rows) and _is_plain(state)) for state in states):
            return False
        if states[0] is REPLICATED and self._is_written(node):
            return False
        sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
        return isinstance(states[0], Rows) or not any(map(self.extents.counts_tokens, sizes))

    def _counts_tokens(self, node: fx.Node) -> bool:
        return any(self.extents.counts_tokens(leaf) for leaf in tree_leaves(value_of(node)))

    def number(self, value: Any) -> Any:
        """A number of the graph among some rows, however many: a TokenCount, or as it is; None: it can't be told."""
        if not self.extents.counts_tokens(value):
            return value
        found = self.extents.token_count(value) if isinstance(value, torch.SymInt) else None
        return found if found is not None and found.times > 0 else None

    def rows_of(self, node: fx.Node) -> TokenRows | None:
        """A node as rows that may travel: numbers, one row of fixed length for each token."""
        value, state = value_of(node), self.states.get(node)
        if not isinstance(value, Tensor) or not isinstance(state, Rows) or not _is_plain(state):
            return None
        if not value.is_floating_point() or node in self.changed or node.graph is not self.end.graph:
            return None
        token = state.token_dim
        sizes = [size for dim, size in enumerate(value.shape) if dim != token]
        alone = state.dims[token] == (T,) and all(isinstance(size, int) for size in sizes)
        # Of several rows of the batch the number may stand in sizes: among foreign rows it means nothing.
        if self.extents.batch != 1 or not alone:
            return None
        columns = math.prod(int(size) for size in sizes)
        return TokenRows(node, token, columns) if columns else None


def _is_plain(state: Rows) -> bool:
    """True of rows whose values are their own, in the shard's order."""
    ordered = any(isinstance(factor, Order) for dim in state.dims if dim is not None for factor in dim)
    return state.iota is None and state.shard_rows is None and not state.key and not ordered


def nodes_before(way: ReadWay, wanted: Sequence[fx.Node]) -> dict[fx.Node, Step]:
    """Steps from `wanted` back to where nothing can be computed again; the nearest first, `MOST_NODES` at most."""
    found: dict[fx.Node, Step] = {}
    pending = list(wanted)
    while pending:
        node, *pending = pending
        if node in found:
            continue
        step = way.step(node, node in wanted)
        for member in step.nodes:
            found[member] = step
        found[node] = step
        if step.again and len(found) < MOST_NODES:
            pending += step.operands
    return found


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
    """The cheapest cut before a site's keys and values; None: at these themselves.

    A tensor costs what it takes to exchange it, a node behind the cut what it takes to run it on the rows that came.
    All that a node behind the cut reads is behind it too, or travels. Of cuts that cost the same the one nearest to
    attention is taken.
    """
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
    """Operands of nodes that are no tensor -> a TokenCount of other rows, or as they are; or a tuple of these."""
    found = {source: value_of(source) for node in nodes for source in node.all_input_nodes}
    plain = {n: x for n, x in found.items() if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))}
    return {n: tuple(map(way.number, x)) if isinstance(x, tuple) else way.number(x) for n, x in plain.items()}


_FIRST, _LAST = -1, -2
_Edge = tuple[int, int, int | None]
"""From, to, and what it costs to cut between them; None: no cut can be there."""


def _in(step: int) -> int:
    """Vertex of a step's start: where it is behind the cut, the step runs again, on rows that came."""
    return 2 * step


def _out(step: int) -> int:
    """Vertex of a step's end: where it is behind the cut, the step runs again, or its rows travel."""
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
        yield _FIRST, _in(n), _cost(sum(_node_seconds(node, costs) for node in step.nodes))
        yield from ((_out(number[operand]), _in(n), None) for operand in operands)
    yield from ((_out(number[steps[node]]), _LAST, None) for node in wanted)


@lru_cache(maxsize=256)
def _cheapest(edges: tuple[_Edge, ...]) -> frozenset[int] | None:
    """Points behind the cheapest cut, which layers that look alike share; None: no cut is possible."""
    graph = _networkx.DiGraph()
    for start, end, cost in edges:
        graph.add_edge(start, end, **({} if cost is None else {"capacity": cost}))
    try:
        _, (_, behind) = _networkx.minimum_cut(graph, _FIRST, _LAST)
    except _networkx.NetworkXUnbounded:
        return None
    return frozenset(behind)


def _others_read(step: Step, steps: Mapping[fx.Node, Step]) -> bool:
    """True if a step of several nodes is read by another step on the way to attention."""
    inside = set(step.nodes)
    return len(step.nodes) > 1 and any(not inside.isdisjoint(other.operands) for other in steps.values())


def _row_bytes(rows: TokenRows) -> int:
    return rows.columns * value_of(rows.node).element_size()


def _node_seconds(node: fx.Node, costs: Costs) -> float:
    value = value_of(node)
    sources = {memory_of(source) for source in node.all_input_nodes}
    is_view = isinstance(value, Tensor) and memory_of(node) in sources
    leaves = [] if is_view else [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    written = sum(_fixed(leaf) * leaf.element_size() for leaf in leaves)
    return costs.flop * _flops(node) + costs.written * written


def _flops(node: fx.Node) -> int:
    """Operations of a forward for one token: two for each weight; nothing but products of matrices counts."""
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


MOVABLE = ("needed", "push", "all_gather")
"""Exchanges before the kernel: rows are at hand when it starts."""


def move_exchanges(state: State) -> State:
    """A cut for each decision that gains by one."""
    mode = fake_mode_of(state.graph_module.graph.nodes)
    extents = None if mode is None else read_extents(state.tokens, mode.shape_env)
    if state.sharding.exchange_at == "attention" or state.refusals or extents is None:
        return state
    changed, order_of = frozenset((*state.locality.changed(), *(site.node for site in state.sites))), cache(GraphOrder)
    outside_autocast = cache(partial(_outside_autocast, root=state.graph_module))

    def way_to(node: fx.Node) -> ReadWay | None:
        """The way to a node; None where an autocast is open around the graph: nothing can be computed again there."""
        if not outside_autocast(node.graph):
            return None
        return ReadWay(node, order_of(node.graph), state.locality.states, extents, changed)

    return replace(state, decisions=tuple(_moved(decision, state, way_to) for decision in state.decisions))


def _moved(decision: Decision, state: State, way_to: Callable[[fx.Node], ReadWay | None]) -> Decision:
    site, sharding = decision.site, state.sharding
    movable = _movable(decision, state)
    if movable is None:
        return decision
    device = target_speeds(sharding, state.device)
    load, model = load_for(site, state), model_of(decision)
    forced = sharding.exchange_at == "narrowest"
    name = between_gpus(decision.exchange_name, state)
    before = exchange_seconds(load, device, model, sharding.node_size).get(name)
    kernel = kernel_seconds(load.tiles.max(), load.launches, device, model)
    if not forced and (before is None or kernel > NARROW_GAIN * before):  # no cut takes less than the kernel
        return decision
    way = way_to(site.node)
    if way is None:
        return decision
    cut = find_cut(site, way, Costs(1e-9, 0.0, 0.0) if forced else costs_of(load, device))
    if cut is None:
        why = "nothing narrower than keys and values is at hand to exchange"
        return replace(decision, why=(*decision.why, why)) if forced else decision
    after = _seconds(movable.exchange.kind, load, device, model, sharding.node_size, cut)
    if before is not None and not forced and after > NARROW_GAIN * before:
        return decision
    against = "" if before is None else f", {1e3 * before:.2f} with keys and values by {decision.exchange_name}"
    return replace(movable, cut=cut, why=(*movable.why, f"{cut}; predicted {1e3 * after:.2f} ms per layer{against}"))


def _movable(decision: Decision, state: State) -> Decision | None:
    """The decision, or, where the exchange was not asked for by name, one whose rows are at hand when the kernel
    starts."""
    if state.sharding.capacity is not None or state.sharding.world_size == 1 or decision.site.form in ("HTD", "BTD"):
        return None
    if decision.exchange.kind in MOVABLE and decision.heads is None:
        return decision
    mesh = state.sharding.mesh
    if state.sharding.exchange != "auto" or not (isinstance(mesh, int) or mesh.ndim == 1):
        return None
    needed = replace(state, sharding=replace(state.sharding, exchange="needed"))
    other = decide(decision.site, needed, named="for rows that are narrower than keys and values")
    return other if isinstance(other, Decision) else None


def _outside_autocast(graph: fx.Graph, root: fx.GraphModule) -> bool:
    """True if a graph runs outside of any autocast of graphs around it: its nodes' dtypes are read from itself."""
    calls = region_calls(root)
    for call in calls.get(graph, ()):
        open_there = modes_of(call.graph)[call][0]
        if open_there or not _outside_autocast(call.graph, root):
            return False
    return True


def costs_of(load: Load, device: Device) -> Costs:
    """The costs of one row that a rank computes again, of the rows beyond its own."""
    received, expanded = float(load.received.sum(1).max()), max(1.0, float(load.expanded.max()))
    more = max(0.0, expanded - load.local_rows)
    return Costs(
        byte=(3 * received / device.link + EXPANDED_PASSES * expanded / device.memory) / expanded,
        flop=(1 / device.forward + 2 / device.backward) * more / expanded,
        written=NARROW_PASSES / device.memory * more / expanded,
    )


def _seconds(kind: str, load: Load, device: Device, model: Model, per_node: int | None, cut: Cut) -> float:
    """One layer's attention, forward and backward: the exchange of the cut's rows, what is computed again of them, and
    the kernel."""
    in_turn = all_gather_seconds if kind == "all_gather" else needed_seconds
    narrow = Model((1, 1), -(-cut.row_bytes // (2 * model.item_bytes)), model.item_bytes)
    exchange = in_turn(load, device, narrow, per_node or load.world_size)
    exchange -= kernel_seconds(load.tiles.max(), load.launches, device, narrow)
    costs, expanded = costs_of(load, device), float(load.expanded.max())
    again = expanded * (costs.flop * cut.flops + costs.written * cut.kv_bytes)
    kernel = kernel_seconds(load.tiles.max(), load.launches, device, model)
    return exchange + again + kernel + fill_seconds(load, device, model)
