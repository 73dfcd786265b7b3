"""What the locality check found in a graph: what the rewrite does to it, and what each batch is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from cp_rewrite.batch.active.marks import TokenAxes
from cp_rewrite.refusal import Refusal

from .neighbour_read import NeighbourRead
from .position import PositionGenerator, RowPositions
from .resolution import Insert, Lowering


@dataclass(frozen=True)
class Locality:
    """What the locality check found.

    Args:
        refusals: every op that is not the same on a shard.
        positions: nodes to be made global.
        row_positions: what makes positions for each row of the batch by itself, in the place of `positions`; None:
            there are none, or all rows share them.
        looked_up: nodes that take the first T rows of a table, which are looked up: all of it stays there.
        inserts: what is put between nodes and their operands.
        lowered: nodes that are taken apart.
        reads: nodes that shift, roll or convolve tokens, and what replaces them.
        fewer: nodes whose tensors have so many tokens fewer than the row, and keep a row for each.
        states: what is known of each node, but for those of a region that is entered with operands of several kinds.
        fill_sums: sums over tokens that rows without a token would change, whatever is inserted.
        padding_sums: what takes in values of tokens of no document after attention: right only when no batch has any.
        outputs: the dim of each output that counts tokens, of a tensor with one row for each token of each row of the
            batch; None of others.
        axes: of each other output that has tokens, in which dims; None of all others.
        parts: whether each output is this rank's part of a sum that one process returns.
    """

    refusals: tuple[Refusal, ...] = ()
    positions: tuple[PositionGenerator, ...] = ()
    row_positions: RowPositions | None = None
    looked_up: tuple[fx.Node, ...] = ()
    inserts: tuple[Insert, ...] = ()
    lowered: tuple[Lowering, ...] = ()
    reads: tuple[NeighbourRead, ...] = ()
    fewer: Mapping[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    states: Mapping[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    fill_sums: tuple[fx.Node, ...] = ()
    padding_sums: tuple[fx.Node, ...] = ()
    outputs: tuple[int | None, ...] = ()
    axes: tuple[TokenAxes | None, ...] = ()
    parts: tuple[bool, ...] = ()

    def changed(self) -> Iterator[fx.Node]:
        """Nodes that the rewrite replaces or gives other operands."""
        yield from (found.node for found in (*self.inserts, *self.lowered, *self.reads, *self.positions))
        if self.row_positions is not None:
            yield from (found.node for found in (*self.row_positions.generators, *self.row_positions.readers))
            yield from self.row_positions.shared
