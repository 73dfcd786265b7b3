"""Reads of moved tokens: the rows that a rank lacks are fetched where moved tokens are read, if that can be done.

    a = x[:, :-1]              Moved: nothing is done
    b = cat([zero, a], 1)      Moved
    c = h + b                  reads b: row p of b is made of row p - 1 of x, and b is replaced

Where it can't be done, the nodes that moved tokens are walked again, as ops that are not the same on a shard. Behind
`Reads` stand tensors of fewer tokens than the row (`fewer_of`, `why_not_kept`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import (
    graph_modules,
    memory_of,
    modes_of,
    needs_gradient,
    op_name,
    value_of,
    written_nodes,
)
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.values.edits import NeighbourRead, OfSums
from cp_rewrite.passes.values.sizes import token_count
from cp_rewrite.planning.plan_input import EXTRAS, Neighbours
from cp_rewrite.planning.row_map import ROW, ZERO, Piece, RowMap, TokenCount
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding, group_of
from cp_rewrite.torch_internals import HigherOrderOperator

from .claims import REPLICATED, AtMost, B, Moved, Partial, Rows, fewer, with_fewer
from .ends import Findings
from .run import NodeRunner, Outcome, States
from .ways import conversions_of

Visit = Callable[[fx.Node], States]


class Reads:
    """Collects what replaces nodes; it stands between the walk and its visits of nodes."""

    def __init__(self, gm: fx.GraphModule, runner: NodeRunner, sharding: Sharding, findings: Findings) -> None:
        self.runner, self.env, self.group, self.findings = runner, runner.env, group_of(sharding), findings
        self.resets = sharding.reset_states
        self.found: dict[fx.Node, NeighbourRead] = {}
        self._moved: dict[fx.Node, bool] = {}
        """For nodes that were walked before, as those of nested regions may be: whether they moved tokens."""
        self._written, self._without_gradients = _written_memory(gm), _without_gradients(gm)

    def visit(self, node: fx.Node, visit: Visit) -> States:
        """The state of a node whose operands may be moved tokens."""
        moved = any(isinstance(self.env.get(n), Moved) for n in node.all_input_nodes)
        if moved and not self._moves_on(node):
            self.settle(node.all_input_nodes, visit)
        state = visit(node)
        if any(isinstance(leaf, Moved) for leaf in _leaves(state)) and not self._holds(node, state):
            return self._undo(node, visit)
        moved = isinstance(state, Moved)
        if self._moved.setdefault(node, moved) != moved:
            return self.findings.refuse(node, Reason.TOKEN_MIXING, _REGION)
        return state

    def outcome(self, node: fx.Node) -> Outcome:
        """The outcome of a node; one that does more than to move tokens runs without the ways that move them."""
        outcome = self.runner.outcome(node)
        if not outcome.events.moved or (isinstance(outcome.states, Moved) and not outcome.events.refusals):
            return outcome
        return self._unmoved(node, self.runner.outcome)

    def settle(self, nodes: Sequence[fx.Node], visit: Visit) -> None:
        """See to it that nodes are read as they are."""
        for node in nodes:
            state = self.env.get(node)
            if isinstance(state, Moved):
                self.env[node] = self._settled(node, state, visit)

    def _settled(self, node: fx.Node, state: Moved, visit: Visit) -> States:
        moved = any(isinstance(self.env.get(n), Moved) for n in node.all_input_nodes)
        if state.taps is None and state.entries == RowMap.entries(ZERO, ROW) and not moved and node not in self.found:
            source = self.env.get(state.source)
            if not isinstance(source, Rows) or not fewer(source.dims):  # all are where they were, on a rank too
                return Rows(state.rows.dims, state.rows.fill, attended=state.rows.attended)
        by = _missing(state.entries)
        read = None if by is None else self._read(node, state, by)
        if by is None or read is None:
            return self._undo(node, visit)
        if self.found.setdefault(node, read) != read:
            return self.findings.refuse(node, Reason.TOKEN_MIXING, _REGION)
        rows, dims = state.rows, with_fewer(state.rows.dims, by)
        if read.read is None:  # the rows behind them are no fill
            return Rows(dims, None if by > 0 else rows.fill, padding=rows.padding, attended=rows.attended)
        return Rows(dims, rows.fill if read.read.keeps_fill else None, attended=rows.attended)

    def _moves_on(self, node: fx.Node) -> bool:
        """True if a node moves what it reads and does nothing else."""
        if node.op not in ("call_function", "call_method") or written_nodes(node):
            return False
        if isinstance(node.target, HigherOrderOperator):
            return False
        outcome = self.runner.outcome(node)
        return isinstance(outcome.states, Moved) and not outcome.events.refusals

    def _holds(self, node: fx.Node, state: States) -> bool:
        """True if moved tokens can still be read where they came from: in this graph, not written since, with the same
        gradient."""
        if not isinstance(state, Moved) or self._written is None:
            return False
        read = [node, state.source, *_others(state)]
        if any(n.graph is not node.graph or memory_of(n) in self._written for n in read):
            return False
        # What was cut off from its gradient on the way is not joined to what has one.
        operands = [n for n in node.all_input_nodes if isinstance(self.env.get(n), Moved)]
        if any((n in self._without_gradients) != (node in self._without_gradients) for n in operands):
            return False
        operands = [n for n in operands if not needs_gradient(n)]
        return not needs_gradient(node) or not any(_has_gradient(self.env.get(n)) for n in operands)

    def _undo(self, node: fx.Node, visit: Visit) -> States:
        """Walk a node again, as if it were no move, of tokens that are where it reads them."""
        self.settle(node.all_input_nodes, visit)
        return self._unmoved(node, visit)

    def _unmoved(self, node: fx.Node, run: Callable[[fx.Node], Any]) -> Any:
        with self.runner.facts.under(moves=False):
            return run(node)

    def _read(self, node: fx.Node, state: Moved, by: int) -> NeighbourRead | None:
        """The read that replaces a node of `by` tokens fewer than the row; None: its rows are not one tensor's."""
        taps, entries, first = state.taps, state.entries, 0
        rows, span = state.rows, 1 if taps is None else taps.span
        dim, batch = rows.token_dim, next((i for i, d in enumerate(rows.dims) if d == (B,)), None)
        if taps is None and entries.is_identity:
            same = "as many rows as there are tokens: some are left out" if by else "each token is where it was"
            unread = self._unread(node, state)
            return NeighbourRead(node, state.source, dim, batch, None, (), None, self.group, same, unread)
        if taps is not None:
            (piece, *others), start = entries.pieces, entries.pieces[0].start
            if others or piece.step != 1 or piece.of is not None or start.times or start.plus < 0:
                return None
            entries, first = taps.entries, start.plus
        if entries.reaches_beyond():
            return None
        # Of fewer tokens than the row those at its end count for nothing, which joined rows have within.
        keeps = taps is None and rows.fill is not None and not isinstance(rows.fill, AtMost)
        missing = first + span - 1 - (entries.length - ROW).plus
        resets = taps is not None and self.resets
        if resets and missing > 0:
            return None
        entries += _behind(entries, missing, rows.fill if keeps else None)
        entries, counts = _with_extras(entries)
        extras = tuple((of, count, self._whole(of)) for of, count in counts.items())
        apart, across = rows.attended and not resets, missing > 0 and not keeps
        read = Neighbours(entries, first, span, sum(counts.values()), keeps, apart, across, resets)
        conv = None if taps is None else taps.node
        what = "a convolution over tokens" if conv else f"{op_name(node)} of tokens"
        why = f"{what} reads rows of neighbours"
        unread = self._unread(node, state)
        return NeighbourRead(node, state.source, dim, batch, read, extras, conv, self.group, why, unread)

    def _unread(self, node: fx.Node, state: Moved) -> tuple[fx.Node, ...]:
        """Nodes with a gradient that tokens were joined with on their way to a node, and that it reads no row of."""
        found: dict[fx.Node, None] = {}
        read, way = {state.source, *_others(state), *(state.taps.node.all_input_nodes if state.taps else ())}, [node]
        for moved in way if needs_gradient(node) else ():
            for operand in moved.all_input_nodes:
                if isinstance(self.env.get(operand), Moved):
                    way += [operand] if operand not in way else []
                elif operand not in read and needs_gradient(operand):
                    found[operand] = None
        return tuple(found)

    def _whole(self, of: fx.Node | float) -> tuple[OfSums, ...]:
        """Conversions that make rows without tokens the same on all ranks, each of which knows its uses' gradient."""
        state = self.env.get(of) if isinstance(of, fx.Node) else None
        if not isinstance(of, fx.Node) or not isinstance(state, Partial):
            return ()
        return conversions_of(state, REPLICATED, needs_gradient(of))


def moves_between_documents(read: NeighbourRead) -> bool:
    """True of rows in other places. Convolutions of rows in order are not: documents have entries of their own."""
    if read.read is None:
        return False
    return read.conv is None or any(piece.step < 0 for piece in read.read.entries.pieces)


def _missing(entries: RowMap) -> int | None:
    """How many tokens fewer than the row there are; None: that depends on the row's length."""
    found = ROW - entries.length
    return found.plus if found.times == 0 else None


def _behind(entries: RowMap, missing: int, fill: Any) -> RowMap:
    """Entries in the place of rows that are not there: a number, or the last entry again, which such rows may hold."""
    if missing <= 0:
        return RowMap(())
    if fill is not None:
        return RowMap.same(TokenCount(missing), fill)
    last = entries.then(RowMap.entries(entries.length - TokenCount(1), TokenCount(1)))
    assert last is not None
    return RowMap(last.pieces * missing)


def _with_extras(entries: RowMap) -> tuple[RowMap, dict[Any, int]]:
    """Entries as the plan knows them, and how many extra rows they have of what."""
    counts = {piece.of: _rows(piece.of, entries.pieces) for piece in entries.pieces if piece.of is not None}
    first: dict[Any, int] = {}
    for of in counts:
        first[of] = sum(counts[before] for before in first)
    known = [
        piece if piece.of is None else replace(piece, of=EXTRAS, start=piece.start + TokenCount(first[piece.of]))
        for piece in entries.pieces
    ]
    return RowMap(tuple(known)), counts


def _rows(of: Any, pieces: Sequence[Piece]) -> int:
    """Extra rows of a number, or of a node, as many as the pieces reach into."""
    if not isinstance(of, fx.Node):
        return 1
    return max(piece.end.plus for piece in pieces if piece.of is of)


def _has_gradient(state: States) -> bool:
    """True if a tensor that moved tokens came from has a gradient."""
    if not isinstance(state, Moved):
        return False
    read = [state.source] * any(piece.of is None for piece in state.entries.pieces)
    return any(map(needs_gradient, [*read, *_others(state), *(state.taps.node.all_input_nodes if state.taps else ())]))


def _others(state: Moved) -> list[fx.Node]:
    """Nodes that are the same on all ranks, and that moved tokens are made of."""
    pieces = (*state.entries.pieces, *(state.taps.entries.pieces if state.taps else ()))
    return [piece.of for piece in pieces if isinstance(piece.of, fx.Node)]


def _without_gradients(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that run while no gradients are recorded: their example values do not tell."""
    modes = (item for module in graph_modules(gm) for item in modes_of(module.graph).items())
    return {node for node, (_, recorded) in modes if not recorded}


def _written_memory(gm: fx.GraphModule) -> set[int | None] | None:
    """Memory that some node writes into; None: a nested region writes into what it is given."""
    found: set[int | None] = set()
    for module in graph_modules(gm):
        given = {memory_of(n) for n in module.graph.find_nodes(op="placeholder")} - {None}
        written = {memory_of(target) for node in module.graph.nodes for target in written_nodes(node)}
        if module is not gm and written & given:
            return None
        found |= written
    return found - {None}


_REGION = "a nested region is called with tokens that it moves and with other values: call it with one kind"


def _leaves(state: States) -> list[Any]:
    return tree_leaves(state) if isinstance(state, list) else [state]


def fewer_of(state: Any) -> int:
    """By how many tokens fewer than the row a node's tensors have; 0 where they have as many."""
    rows = [leaf for leaf in _leaves(state) if isinstance(leaf, Rows)]
    return next((by for leaf in rows if (by := fewer(leaf.dims))), 0)


def why_not_kept(node: fx.Node, states: Any, env: Mapping[fx.Node, Any], tokens: TokenAxis) -> str | None:
    """Why a node that makes tensors of fewer tokens than the row, or reads them, can't run on all rows."""
    operands = [n for n in node.all_input_nodes if fewer_of(env.get(n))]
    if not operands and not fewer_of(states):
        return None
    size = tokens.inputs[0].tokens
    value = value_of(node)
    asked = node.users if isinstance(value, torch.Size) else [] if isinstance(value, Tensor | list | tuple) else [node]
    if any(n.target is not operator.getitem and n is not node for n in asked):
        return "reads all sizes of a tensor of fewer tokens than the row at once: read them one by one"
    given = [n for n in node.all_input_nodes if isinstance(value_of(n), torch.SymInt | torch.Size)]
    if any(token_count(value_of(n), size) is None for n in (*given, *asked)):
        return "takes a number that is made from fewer tokens than the row in another way than by adding"
    return None
