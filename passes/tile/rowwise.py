"""What each node of a rewritten graph is for a rank's rows: made of them one by one, a sum over them, or neither.

The proof of locality cuts a row over ranks; tiles cut a rank's rows in the same way. So the same rules say which nodes
may run tile by tile: those that give rows of rows, or sums over rows that add up, with nothing inserted for it. All
others, attention and what travels among them, are barriers: what they give was proven when the whole graph was.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.modes import Mode, modes_of
from cp_rewrite.passes.graph.new_nodes import autocasts_open
from cp_rewrite.passes.graph.nodes import collective_group, draws_random_numbers, is_transformed, value_of
from cp_rewrite.passes.graph.regions import RegionCall, is_checkpoint
from cp_rewrite.passes.graph.writes import memory_of, written_memory
from cp_rewrite.passes.locality.claims.dims import Mixes, Order, T, with_fewer
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, UNKNOWN, Partial, Rows
from cp_rewrite.passes.locality.node.run import NodeRunner, States, unknown_like
from cp_rewrite.passes.locality.node.trace import Trace
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import PlanInput
from cp_rewrite.torch_internals import FakeTensorMode, HigherOrderOperator


class Rowwise:
    """What was found of one graph, the root or the body of a region. `states`: of each node. `alone`: nodes that may
    run on some of the rows. `modes`, `place`: of each node in the graph. `again`: the backward computes it once more.
    """

    def __init__(
        self,
        state: State,
        gm: fx.GraphModule,
        extents: Extents,
        mode: FakeTensorMode,
        around: Rowwise | None = None,
        call: RegionCall | None = None,
    ) -> None:
        """`around`, `call`: of a region, the graph that calls it, and where."""
        self.extents, self.gm, self.mode = extents, gm, mode
        self.again = call is not None and (is_checkpoint(call.node) or (around is not None and around.again))
        self.states: dict[fx.Node, States] = {}
        self.alone: set[fx.Node] = set()
        outer: Mode = ((), True) if around is None or call is None else around.modes[call.node]
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
        if around is not None and call is not None:
            self.states |= {inside: around.state_of(given) for inside, given in call.filled.items()}
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
        """What the proof said of a node's tensor: rows that stand as all rows of the rank do, or the same on all."""
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
        """Whether a node gives whole numbers that are known for any number of rows: c, or c times the rows and more."""
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
