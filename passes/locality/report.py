"""What the locality check found, while it walks and in the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch.fx as fx

from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.node.node_facts import Events
from cp_rewrite.passes.locality.node.run import States, unknown_like
from cp_rewrite.passes.locality.resolve.resolver import Resolver
from cp_rewrite.passes.values.insert import Insert
from cp_rewrite.passes.values.neighbour_read import NeighbourRead
from cp_rewrite.passes.values.position import PositionGenerator, RowPositions
from cp_rewrite.passes.values.resolution import Lowering
from cp_rewrite.refusal import Reason, Refusal


@dataclass(frozen=True)
class LocalityReport:
    """What the locality check found.

    Args:
        refusals: every op that is not the same on a shard.
        positions: nodes to be made global.
        padded_sums: nodes that sum over tokens whatever rows without a token hold: right only where no rank has such
            rows, or with the inserts.
        inserts: what leaves such rows out of some of these sums.
        gap_sums: nodes that take in what tokens of no document hold after attention: right only when no batch has any.
        outputs: the dim of each output that counts tokens, of a tensor with one row for each token of each row of the
            batch.
        parts: whether each output is this rank's part of a sum that one process returns.
        looked_up: nodes that take the first T rows of a table, which are looked up: all of it stays there.
        fewer: nodes whose tensors have so many tokens fewer than the row.
        row_positions: what makes each row's positions by itself, where a batch has several rows.
        resolved: what is put between nodes and their operands so that nodes are the same on a shard. lowered: nodes
            that are taken apart for it. reads: nodes that shift, roll or convolve tokens, and what replaces them.
        states: what is known of each node, but for those of a region that is entered with operands of several kinds.
    """

    refusals: list[Refusal] = field(default_factory=list[Refusal])
    positions: list[PositionGenerator] = field(default_factory=list[PositionGenerator])
    padded_sums: list[fx.Node] = field(default_factory=list[fx.Node])
    inserts: list[Insert] = field(default_factory=list[Insert])
    gap_sums: list[fx.Node] = field(default_factory=list[fx.Node])
    outputs: list[int | None] = field(default_factory=list[int | None])
    parts: list[bool] = field(default_factory=list[bool])
    resolved: list[Insert] = field(default_factory=list[Insert])
    lowered: list[Lowering] = field(default_factory=list[Lowering])
    reads: list[NeighbourRead] = field(default_factory=list[NeighbourRead])
    row_positions: RowPositions | None = None
    states: Mapping[fx.Node, States] = field(default_factory=dict[fx.Node, States])
    looked_up: list[fx.Node] = field(default_factory=list[fx.Node])
    fewer: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])


class Findings:
    """What was found so far.

    `used`, `indexed`, `looked_up`, `in_turn`: nodes that make positions, or take rows of tables, as in `Events`.
    `tables`: nodes that take the first T rows of a table, with its dim. `outputs`, `parts`: as in the report.
    """

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.used: dict[fx.Node, None] = {}
        self.indexed: set[fx.Node] = set()
        self.tables: dict[fx.Node, int] = {}
        self.looked_up: set[fx.Node] = set()
        self.in_turn: set[fx.Node] = set()
        self.padded_sums: dict[fx.Node, tuple[Insert, ...]] = {}
        self.gap_sums: dict[fx.Node, None] = {}
        self.outputs: list[int | None] = []
        self.parts: list[bool] = []

    def refuse(self, node: fx.Node, reason: Reason, detail: str) -> States:
        refusal = Refusal(reason, detail, node)
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        return unknown_like(node)

    def note(self, node: fx.Node, events: Events) -> None:
        """Note of a node what its ops gave rise to, but for sums that take in fill."""
        for found in events.refusals:
            self.refuse(node, found.reason, found.detail)
        self.used.update(dict.fromkeys(events.used))
        self.indexed.update(events.indexed)
        self.looked_up.update(events.looked_up)
        self.in_turn.update(events.in_turn)
        if events.table is not None:
            self.tables[node] = events.table
        if events.gaps:
            self.gap_sums[node] = None

    def note_padded_sum(self, node: fx.Node, inserts: tuple[Insert, ...]) -> None:
        # A region that is entered twice: what it is given may have its tokens in other dims.
        self.padded_sums[node] = inserts if self.padded_sums.get(node, inserts) == inserts else ()

    def report(self, resolver: Resolver, reads: Iterable[NeighbourRead]) -> LocalityReport:
        for node in self.used:
            if node in self.indexed:
                detail = "these positions both index the shard's rows and count the global row: make them twice"
                self.refuse(node, Reason.POSITION_GENERATOR, detail)
        positions = [PositionGenerator(node) for node in self.used]
        for node in self.looked_up & self.in_turn:
            detail = "these rows of a table are both read by index and used for the tokens in turn: take them twice"
            self.refuse(node, Reason.POSITION_GENERATOR, detail)
        in_turn = {node: dim for node, dim in self.tables.items() if node not in self.looked_up}
        positions += [PositionGenerator(node, "table", dim) for node, dim in in_turn.items()]
        inserts = [insert for each in self.padded_sums.values() for insert in each]
        sums = list(self.padded_sums), inserts, list(self.gap_sums)
        found = self.refusals, positions, *sums, self.outputs, self.parts
        tables = [node for node in self.tables if node in self.looked_up]
        return LocalityReport(*found, resolver.inserts, resolver.lowered, list(reads), looked_up=tables)


def why_static(extents: Extents, fixed: Sequence[str]) -> Refusal:
    """What made a constant of the token count: inputs of that size, or a line of the model, where a guard names one."""
    if fixed:
        detail = (
            f"{', '.join(fixed)} came with a fixed number of tokens, {extents.tokens}: pass what `shard` returns, not "
            "copies; or mark the token dims (torch._dynamo.maybe_mark_dynamic), or compile with dynamic=True"
        )
        return Refusal(Reason.TOKEN_INPUT, detail)
    for guard in getattr(extents.shape_env, "guards", ()):
        if _fixes(guard.expr, extents.tokens):
            detail = (
                f"`{guard.sloc}` fixes the number of tokens to the shard's {extents.tokens}, as a loop over tokens "
                "does, or a chunk of one token"
            )
            return Refusal(Reason.TOKEN_COUNT, detail)
    return Refusal(Reason.TOKEN_INPUT, f"the graph was captured for {extents.tokens} tokens a rank only")


def _fixes(condition: Any, tokens: Any) -> bool:
    """Whether a condition is S = tokens, or says so in other words, as S - 12 = 1."""
    if not isinstance(condition, sympy.Eq):
        return False
    difference = sympy.expand(condition.args[0] - condition.args[1])  # pyright: ignore[reportOperatorIssue]
    symbols = [*difference.free_symbols]
    alone = len(symbols) == 1 and difference.is_polynomial(*symbols) and sympy.degree(difference, symbols[0]) == 1
    return tokens in condition.args or (alone and difference.subs({symbols[0]: tokens}) == 0)
