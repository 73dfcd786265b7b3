"""What the locality check found, while it walks and in the end."""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from cp_rewrite.batch.active.marks import TokenAxes
from cp_rewrite.passes.values.locality import Locality, NeighbourRead, PositionGenerator
from cp_rewrite.refusal import Reason, Refusal

from .node.node_facts import Events
from .node.run import States, unknown_like
from .resolver import Resolver


class Findings:
    """What was found so far.

    `used`, `indexed`, `looked_up`, `in_turn`: nodes that make positions, or take rows of tables, as in `Events`.
    `tables`: nodes that take the first T rows of a table, with its dim. `fill_sums`, `outputs`, `parts`: as in
    `Locality`.
    """

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.used: dict[fx.Node, None] = {}
        self.indexed: set[fx.Node] = set()
        self.tables: dict[fx.Node, int] = {}
        self.looked_up: set[fx.Node] = set()
        self.in_turn: set[fx.Node] = set()
        self.fill_sums: dict[fx.Node, None] = {}
        self.padding_sums: dict[fx.Node, None] = {}
        self.outputs: list[int | None] = []
        self.axes: list[TokenAxes | None] = []
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
        if events.sums_padding:
            self.padding_sums[node] = None

    def report(self, resolver: Resolver, reads: Iterable[NeighbourRead]) -> Locality:
        for node in self.used:
            if node in self.indexed:
                detail = "these positions both index the shard's rows and count the global row: make them twice"
                self.refuse(node, Reason.POSITION_GENERATOR, detail)
        for node in self.looked_up & self.in_turn:
            detail = "these rows of a table are both read by index and used for the tokens in turn: take them twice"
            self.refuse(node, Reason.POSITION_GENERATOR, detail)
        tables = [PositionGenerator(n, "table", dim) for n, dim in self.tables.items() if n not in self.looked_up]
        return Locality(
            refusals=tuple(self.refusals),
            positions=(*map(PositionGenerator, self.used), *tables),
            looked_up=tuple(node for node in self.tables if node in self.looked_up),
            inserts=tuple(resolver.inserts),
            lowered=tuple(resolver.lowered),
            reads=tuple(reads),
            fill_sums=tuple(self.fill_sums),
            padding_sums=tuple(self.padding_sums),
            outputs=tuple(self.outputs),
            axes=tuple(self.axes),
            parts=tuple(self.parts),
        )
