"""A region around a wide tensor: from where few bytes a row come in to where few go out.

    h (2 KB) ── linear ── logits (256 KB) ── float (512 KB) ── cross_entropy (a sum: 0)
    labels (8 B) ─────────────────────────────────┘

`Rowwise` says of each node whether it may run on some of the rows. `find_regions` and `way_to` find regions: both ends
are minimal cuts. A tensor that crosses costs its bytes a row, once, however many read it.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import memory_of, written_memory
from cp_rewrite.planning.cost.constants import TILE_GAIN, TILE_GAIN_AGAIN
from cp_rewrite.planning.plan_input import PlanInput
from cp_rewrite.torch_internals import FakeTensorMode, HigherOrderOperator

from .capture.chunks import CHUNKS
from .graph.new_nodes import autocasts_open
from .graph.nodes import (
    Mode,
    RegionCall,
    collective_group,
    draws_random_numbers,
    is_checkpoint,
    is_transformed,
    modes_of,
    needs_gradient,
    value_of,
)
from .locality.claims import REPLICATED, UNKNOWN, Extents, Mixes, Order, Partial, Rows, T, joined, with_fewer
from .locality.run import NodeRunner, States, Trace, unknown_like
from .values.state import State


class Rowwise:
    """Facts of one graph, the root or the body of a region, by a rank's rows: which nodes are made of them one by one,
    are sums over them, or neither. `states`: of each node. `alone`: nodes that may run on some of the rows. `modes`,
    `place`: of each node in the graph. `again`: the backward computes it once more.

    The proof of locality cuts a row over ranks; tiles cut a rank's rows in the same way. So the same rules say which
    nodes may run tile by tile: those that give rows of rows, or sums over rows that add up, with nothing inserted for
    it. All others, attention and what travels among them, are barriers: what they give was proven when the whole graph
    was.
    """

    def __init__(
        self,
        state: State,
        gm: fx.GraphModule,
        extents: Extents,
        mode: FakeTensorMode,
        around: Rowwise | None = None,
        calls: Sequence[RegionCall] = (),
    ) -> None:
        """`around`, `calls`: of a region, the graph that calls it, and where, in one mode."""
        self.extents, self.gm, self.mode = extents, gm, mode
        self.again = around is not None and (around.again or any(is_checkpoint(call.node) for call in calls))
        self.states: dict[fx.Node, States] = {}
        self.alone: set[fx.Node] = set()
        outer: Mode = ((), True) if around is None else around.modes[calls[0].node]
        self.modes: dict[fx.Node, Mode] = {
            node: ((*outer[0], *autocasts), outer[1] and grad) for node, (autocasts, grad) in modes_of(gm.graph).items()
        }
        self.place = {node: i for i, node in enumerate(gm.graph.nodes)}
        self._proven: Mapping[fx.Node, Any] = state.locality.states
        self._written = written_memory(state.graph_module)
        self._runner = NodeRunner(Trace(extents, state.sharding), mode, self.states)
        plan = _plan_inputs(state)
        for node in gm.graph.find_nodes(op="placeholder"):
            self.states[node] = self._from_plan(node, plan[node]) if node in plan else self._as_proven(node)
        if around is not None:
            given = zip(*([around.state_of(operand) for operand in call.operands] for call in calls), strict=True)
            inside = gm.graph.find_nodes(op="placeholder")
            self.states |= {node: functools.reduce(joined, states) for node, states in zip(inside, given, strict=True)}
        with self._runner.running(), autocasts_open(outer[0]):
            self._walk()

    def state_of(self, given: Any) -> States:
        """The state of a node, or of a number."""
        return self.states.get(given, UNKNOWN) if isinstance(given, fx.Node) else REPLICATED

    def _walk(self) -> None:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                self.states[node] = REPLICATED
            elif node.op != "output":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", "")
        if name in ("_enter_autocast", "_exit_autocast"):
            self._runner.toggle(node)
            return
        parent: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and parent in self.alone and isinstance(self.states[parent], list):
            self.states[node] = self.states[parent][node.args[1]]
            if _is_tileable(self.states[node]):
                self.alone.add(node)
            return
        found = self._outcome(node)
        if found is None:
            self.states[node] = self._as_proven(node)
            return
        self.states[node] = found
        read = [state for n in node.all_input_nodes for state in tree_leaves(self.states.get(n, UNKNOWN))]
        if any(isinstance(state, Rows) for state in read) and all(map(_is_tileable, tree_leaves(found))):
            self.alone.add(node)

    def _outcome(self, node: fx.Node) -> States | None:
        """States of what a node gives, by the rules; None: it is a barrier."""
        if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
            return None
        if str(getattr(node.target, "namespace", "")) == "cp_rewrite" or is_transformed(node):
            return None
        if collective_group(node) is not None or draws_random_numbers(node):
            return None
        if any(memory_of(n) in self._written for n in (node, *node.all_input_nodes)):
            return None
        read = [state for n in node.all_input_nodes for state in tree_leaves(self.states.get(n, UNKNOWN))]
        if not all(state is REPLICATED or (isinstance(state, Rows) and is_plain(state)) for state in read):
            return None
        outcome = self._runner.outcome(node)
        events = outcome.events
        changed = (events.refusals, events.used, events.indexed, events.looked_up, events.in_turn)
        if any(changed) or not outcome.steps.local or events.moved or events.table is not None:
            return None
        return outcome.states

    def _as_proven(self, node: fx.Node) -> States:
        """The proven state of a node's tensor: rows that stand as the rank's do, or the same on all; else UNKNOWN."""
        state = self._proven.get(node)
        if state is REPLICATED:
            return REPLICATED
        if isinstance(state, Rows) and is_plain(state):
            return Rows(with_fewer(state.dims, 0))
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value_of(node))):
            return REPLICATED
        return unknown_like(node)

    def _from_plan(self, node: fx.Node, key: PlanInput) -> States:
        value = value_of(node)
        try:
            dims = self.extents.label([self.extents.size(n) for n in value.shape]) if key.is_per_token else None
        except Mixes:
            dims = None
        return UNKNOWN if dims is None else Rows(dims)

    def is_number(self, node: fx.Node) -> bool:
        """True if a node gives whole numbers that are known for any number of rows: c, or c times the rows and more."""
        leaves = tree_leaves(value_of(node))
        known = (not isinstance(x, torch.SymInt) or self.extents.token_count(x) is not None for x in leaves)
        return all(known) and all(isinstance(x, int | float | torch.SymInt) for x in leaves)

    def row_bytes(self, node: fx.Node) -> int | None:
        """Bytes of a node's tensor for each row; 0 of a sum; None where that is no number."""
        value, state = value_of(node), self.states.get(node, UNKNOWN)
        if isinstance(state, Partial):
            return 0
        if not isinstance(value, Tensor) or not isinstance(state, Rows):
            return None
        count: Any = value.element_size()
        for dim, size in zip(state.dims, value.shape, strict=True):
            factors = [self.extents.size(size)] if dim is None else [self.extents.of(f) for f in dim if f is not T]
            for factor in factors:
                count = count * factor
        return int(count) if getattr(count, "is_Integer", isinstance(count, int)) else None


def is_plain(state: Rows) -> bool:
    """Rows whose values are their own, in the rank's order, one for each of its tokens."""
    plain = not any(isinstance(f, Order) for dim in state.dims for f in dim or ())
    return plain and state.iota is None and state.shard_rows is None and not state.key and state.table is None


def _is_tileable(state: Any) -> bool:
    return state == Partial() or (isinstance(state, Rows) and is_plain(state))


def _plan_inputs(state: State) -> dict[fx.Node, PlanInput]:
    """Placeholders of the root that the rewrite added."""
    placeholders = state.graph_module.graph.find_nodes(op="placeholder")
    return dict(zip(placeholders[len(placeholders) - len(state.inputs) :], state.inputs, strict=True))


@dataclass(frozen=True, eq=False)
class TileRegion:
    """Nodes that run tile by tile, in order.

    Args:
        rows: tensors with rows that they read from outside. wholes: tensors that all tiles read. results: nodes that
            others read. states: of `rows` and `results`. widest: bytes a row of the widest tensor inside. mode: modes
            that are open where they stand. again: the backward computes all of it once more in any case. chunks: how
            many tiles there are, where a loop of the model says so, else 0.
    """

    nodes: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    wholes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    states: Mapping[fx.Node, Any]
    widest: int
    mode: Mode
    again: bool = False
    chunks: int = 0


_FINE = 1 << 24
"""More than the places of nodes in a cut add up to."""
_networkx: Any = importlib.import_module("networkx")  # torch needs it too; it has no types
_Edge = tuple[Any, Any, int | None]


def find_regions(found: Rowwise, loops: bool) -> list[TileRegion]:
    """Regions that share no node, the widest first. `loops`: only what the model's own loops over chunks of tokens
    compute, and nothing more often than they do."""
    regions: list[TileRegion] = []
    free = {n for n in found.alone if not loops or _chunks(n)}
    seeds = sorted(free, key=lambda n: (-(found.row_bytes(n) or 0), found.place[n]))
    for seed in seeds:
        if seed not in free or not found.row_bytes(seed):
            continue
        region = _region(seed, free, found, loops)
        if region is None:
            free.discard(seed)
            continue
        regions.append(region)
        free -= {*region.nodes}
    return regions


def way_to(node: fx.Node, found: Rowwise) -> TileRegion | None:
    """The region that makes a node's rows of narrow ones, the nearest to it of the cheapest, without gradients; None:
    there is none, or the rows that it is made of are not much narrower."""
    if node not in found.alone or not found.row_bytes(node):
        return None
    mode = found.modes[node]
    able = _able(found.alone, mode, found)
    region = _made({node} | _before({node}, able, found, late=True), found, mode)
    if region is None or (found.row_bytes(node) or 0) < TILE_GAIN * sum(found.row_bytes(n) or 0 for n in region.rows):
        return None
    return replace(region, results=(node,), mode=(mode[0], False))


def _chunks(node: fx.Node) -> int:
    """How many chunks a loop of the model computed a node in; 0: none did."""
    return node.meta.get(CHUNKS, 0)


def _region(seed: fx.Node, free: set[fx.Node], found: Rowwise, loops: bool) -> TileRegion | None:
    mode = found.modes[seed]
    able = {n for n in _able(free, mode, found) if not loops or _chunks(n) == _chunks(seed)}
    behind = _behind({seed}, able, found)
    inside = behind | _before(behind, able, found)
    region = _made(inside, found, mode)
    if region is not None and any(n not in behind and found.row_bytes(n) for n in region.results):
        inside |= _behind(inside, able, found)  # with what else reads what is computed once more
        more = _made(inside | _before(inside, able, found), found, mode)
        if more is not None and _is_one_place(more, found) and _across(more, found) < _across(region, found):
            region = more
    if region is None:
        return None
    across = _across(region, found)
    if loops:
        once = all(isinstance(found.states[n], Partial) for n in region.results)
        once = found.again or not mode[1] or (once and sum(map(needs_gradient, region.results)) < 2)
        region = replace(region, chunks=_chunks(seed))
        return region if once and region.widest >= across and _is_one_place(region, found) else None
    worth = TILE_GAIN_AGAIN if found.again else TILE_GAIN
    return region if region.widest >= worth * across and _is_one_place(region, found) else None


def _able(free: Iterable[fx.Node], mode: Mode, found: Rowwise) -> set[fx.Node]:
    """Nodes that may stand in one region, of those that are free."""
    return {n for n in free if found.modes[n] == mode and (found.row_bytes(n) is not None or _is_tuple(n, found))}


def _is_tuple(node: fx.Node, found: Rowwise) -> bool:
    return node in found.alone and isinstance(found.states.get(node), list)


def _across(region: TileRegion, found: Rowwise) -> int:
    """Bytes a row that come in and go out."""
    return sum(found.row_bytes(n) or 0 for n in (*region.rows, *region.results))


def _behind(seeds: set[fx.Node], able: set[fx.Node], found: Rowwise) -> set[fx.Node]:
    """The seeds and what is computed of them, up to the cheapest cut."""
    closure, after = {*seeds}, {*seeds}
    first = min(map(found.place.__getitem__, seeds))
    for node in sorted((n for n in found.place if found.place[n] > first), key=found.place.__getitem__):
        read = [n for n in node.all_input_nodes if n in after]
        if read:
            after.add(node)
            if node in able and all(n in closure for n in read):
                closure.add(node)
    edges = [*_edges(closure, found), *(("first", ("in", seed), None) for seed in seeds)]
    return {node for side, node in _side_of_first(edges) if side == "in"} | seeds


def _edges(closure: set[fx.Node], found: Rowwise) -> Iterator[_Edge]:
    for node in closure:
        yield ("in", node), ("out", node), _cost(node, found)
        for user in node.users:
            if user in closure:
                yield ("out", node), ("in", user), None
                yield ("in", user), ("in", node), None
            else:
                yield ("out", node), "last", None
        if _is_tuple(node, found):  # what takes it apart stays with it
            yield from ((("in", node), ("in", user), None) for user in node.users if user in closure)


def _cost(node: fx.Node, found: Rowwise) -> int | None:
    return None if _is_tuple(node, found) else found.row_bytes(node) or 0


def _side_of_first(edges: Iterable[_Edge]) -> list[Any]:
    """Points on the first side of the cheapest cut: ("in" or "out", node); none where no cut is possible."""
    graph = _networkx.DiGraph()
    for start, end, cost in edges:
        graph.add_edge(start, end, **({} if cost is None else {"capacity": cost}))
    graph.add_node("last")
    try:
        _, (first, _) = _networkx.minimum_cut(graph, "first", "last")
    except _networkx.NetworkXUnbounded:
        return []
    return [x for x in first if isinstance(x, tuple)]


def _before(inside: set[fx.Node], able: set[fx.Node], found: Rowwise, late: bool = False) -> set[fx.Node]:
    """Nodes that are computed once more for each tile on the way to the inside, from the cheapest cut on. `late`: the
    one nearest to the inside, of several."""
    edges: list[_Edge] = []
    pending, seen = [n for node in inside for n in node.all_input_nodes], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or node in inside or not _has_rows(node, found):
            continue
        seen.add(node)
        cost = _cost(node, found)
        if late and cost is not None:
            cost = cost * _FINE + len(found.place) - found.place[node]
        edges.append((("in", node), ("out", node), cost))
        if any(user in inside for user in node.users):
            edges.append((("out", node), "last", None))
        if node in able:
            operands = [n for n in node.all_input_nodes if _has_rows(n, found)]
            edges += [(("out", n), ("in", node), None) for n in operands]
            pending += operands
        else:
            edges.append(("first", ("in", node), None))
    first = set(_side_of_first(edges))
    return {node for node in seen if node in able and ("in", node) not in first}


def _has_rows(node: fx.Node, found: Rowwise) -> bool:
    return any(isinstance(state, Rows) for state in tree_leaves(found.states.get(node)))


def _made(inside: set[fx.Node], found: Rowwise, mode: Mode) -> TileRegion | None:
    nodes = sorted(inside, key=found.place.__getitem__)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    tensors = [n for n in read if any(isinstance(x, Tensor) for x in tree_leaves(value_of(n)))]
    rows = [n for n in tensors if isinstance(found.states.get(n), Rows)]
    wholes = [n for n in tensors if n not in rows]
    if not rows or any(found.states.get(n) is not REPLICATED or not isinstance(value_of(n), Tensor) for n in wholes):
        return None
    if any(found.row_bytes(n) is None for n in rows) or not all(map(found.is_number, set(read) - set(tensors))):
        return None
    results = [n for n in nodes if any(user not in inside for user in n.users)]
    if not results or any(not isinstance(value_of(n), Tensor) for n in results):
        return None
    if any(not isinstance(found.states[n], Rows) and found.states[n] != Partial() for n in results):
        return None
    widest = max(found.row_bytes(n) or 0 for n in nodes)
    states = {n: found.states[n] for n in (*rows, *results)}
    return TileRegion(tuple(nodes), tuple(rows), tuple(wholes), tuple(results), states, widest, mode, found.again)


def _is_one_place(region: TileRegion, found: Rowwise) -> bool:
    """True if a region can run at one place: all that it reads is there before anything reads what it gives."""
    inside = set(region.nodes)
    last = max(found.place[n] for n in (*region.rows, *region.wholes))
    users = [found.place[user] for n in region.results for user in n.users if user not in inside]
    return last < min(users)
