"""The way to keys and values: which of its nodes give of the rows of any tokens what they give of this rank's.

The locality check has shown that nothing but attention mixes tokens. So a node behind it makes of exchanged rows what
their owner made of them, if it reads rows of tokens and what all ranks have, and nothing else: no count of tokens but
as a size, no positions, no random numbers, nothing that is made whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.modes import Mode, modes_of
from cp_rewrite.passes.graph.nodes import collective_group, draws_random_numbers, is_transformed, op_name, value_of
from cp_rewrite.passes.graph.writes import memory_of, written_nodes
from cp_rewrite.passes.locality.claims.dims import Order, T
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, Rows
from cp_rewrite.passes.values.cut import TokenRows
from cp_rewrite.torch_internals import HigherOrderOperator

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
    """What the ways of one graph share: each node's place, the modes that are open there, and who writes memory.

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
    """Steps on the way to some nodes of one graph.

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
        """Whether a node before the end writes into the memory of this one."""
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
        """Whether a node can be computed of rows that came from other ranks, as far as it alone says."""
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
    """Rows whose values are their own, in the shard's order."""
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
