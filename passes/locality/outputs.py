"""What a graph returns, and what outlives its call."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.utils._pytree import tree_leaves

from cp_rewrite.batch.active.marks import TokenAxes
from cp_rewrite.passes.graph.dynamo_internals import source_name, source_of
from cp_rewrite.passes.graph.nodes import needs_gradient, value_of
from cp_rewrite.passes.graph.regions import outputs_of
from cp_rewrite.refusal import Reason

from .advice import COUNT_HINT
from .claims.dims import B, Order, T, fewer
from .claims.tensor_state import (
    REPLICATED,
    UNKNOWN,
    WHOLE,
    Deferred,
    GroupSizes,
    Partial,
    Rows,
)
from .conversions import CONVERSIONS, PART
from .findings import Findings
from .node.run import NodeRunner, States
from .resolver import Resolver


class Outputs:
    """Checks them, once all nodes are walked."""

    def __init__(self, runner: NodeRunner, resolver: Resolver, findings: Findings) -> None:
        self.facts, self.extents, self.env = runner.facts, runner.facts.extents, runner.env
        self.resolves, self.resolver, self.findings = runner.trace.ways.resolves, resolver, findings

    def check(self, gm: fx.GraphModule, returned: fx.Node) -> None:
        for leaf in returned.all_input_nodes:
            self.check_output(returned, leaf, self.env.get(leaf, REPLICATED))
        self.findings.outputs = [self.token_dim(leaf) for leaf in outputs_of(gm)]
        self.findings.axes = [self.axes(leaf) for leaf in outputs_of(gm)]
        self.findings.parts = [isinstance(leaf, fx.Node) and self.env.get(leaf) == Partial() for leaf in outputs_of(gm)]

    def token_dim(self, leaf: Any) -> int | None:
        """The dim of an output that counts this rank's tokens, after that of the batch's rows where it has several."""
        state = self.env.get(leaf) if isinstance(leaf, fx.Node) else None
        if not isinstance(state, Rows) or state.dims[state.token_dim] != (T,):
            return None
        before = state.dims[max(state.token_dim - 1, 0)]
        return state.token_dim if self.extents.batch == 1 or before == (B,) else None

    def axes(self, leaf: Any) -> TokenAxes | None:
        """What each dim of an output counts, where its tokens are not as `token_dim` has them."""
        state = self.env.get(leaf) if isinstance(leaf, fx.Node) else None
        if not isinstance(state, Rows) or self.token_dim(leaf) is not None:
            return None
        names: dict[Any, str | int] = {T: "T", B: "B"}
        return tuple(dim and tuple(names.get(f, f if isinstance(f, int) else -1) for f in dim) for dim in state.dims)

    def check_output(self, output: fx.Node, leaf: fx.Node, state: States) -> None:
        """What the caller gets must be rows in the shard's order, a part of a sum, or the same on all ranks."""
        if isinstance(state, list):
            for item in state:
                self.check_output(output, leaf, item)
        elif self.extents.counts_tokens(value_of(leaf)):
            detail = f"{value_of(leaf)}, which is returned or kept, is made from the shard's number of tokens"
            self.findings.refuse(leaf, Reason.POSITION_GENERATOR, f"{detail}; {COUNT_HINT}")
        elif isinstance(state, Deferred):
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, state.detail)
        elif isinstance(state, GroupSizes):
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, "an output counts the shard's tokens")
        elif isinstance(state, Rows):
            if state.shard_rows is not None or any(
                isinstance(factor, Order) for factor in state.dims[state.token_dim] or ()
            ):
                self.findings.refuse(leaf, Reason.TOKEN_MIXING, "an output holds tokens in an order of the shard's own")
            if fewer(state.dims):
                detail = f"an output has {-fewer(state.dims):+d} tokens than the row: give it one entry for each"
                self.findings.refuse(leaf, Reason.TOKEN_MIXING, detail)
            if state.table is not None:
                self.findings.in_turn.add(state.table)
            if state.iota is not None and state.iota in self.facts.fixed_positions:
                self.findings.refuse(leaf, Reason.POSITION_GENERATOR, self.facts.fixed_positions[state.iota])
            elif state.iota is not None:
                self.findings.used[state.iota] = None
        elif state is REPLICATED and leaf.op != "placeholder" and needs_gradient(leaf):
            if self.resolves and not isinstance(self.env.get(leaf), list):
                why = "an output that every rank computes in full is counted once"
                return self.resolver.add_output(output, leaf, CONVERSIONS[REPLICATED, WHOLE], why)
            detail = "every rank computes this output in full, so its gradient would count once per rank"
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, detail)

    def check_kept(self, output: fx.Node, node: fx.Node, where: str) -> None:
        """What outlives the call is as what it returns, sums whole: this rank's rows, or the same on all ranks. Rows
        must not be read by the next call, which would take them for everyone's."""
        states = tree_leaves(self.env.get(node, REPLICATED))
        if self.resolves and states == [Partial()] and node in output.all_input_nodes:
            given: Any = output.args[0]
            self.findings.parts = [
                part and leaf is not node for part, leaf in zip(self.findings.parts, given, strict=True)
            ]
            return self.resolver.add_output(output, node, CONVERSIONS[PART, WHOLE], f"{where} keeps it")
        if all(state in (REPLICATED, UNKNOWN) for state in states):
            return
        detail = f"{where} keeps what only this rank knows"
        if all(isinstance(state, Rows) or state in (REPLICATED, UNKNOWN, WHOLE) for state in states):
            read = [source_name(source_of(n)) for n in output.graph.find_nodes(op="placeholder") if n.users]
            again = next((name for name in read if where in _holders(name)), None)
            if again is None and where.startswith("L["):
                return
            detail += f", and {again} is read as what all ranks know" if again else ""
        self.findings.refuse(node, Reason.TOKEN_MIXING, f"{detail}: keep sums or means over tokens, or return it")


def _holders(source: str) -> set[str]:
    """What an input was read of: `L['self'].seen`, `L['self']` of `L['self'].seen[0]`."""
    return {source[:place] for place in range(1, len(source) + 1) if place == len(source) or source[place] in ".["}
