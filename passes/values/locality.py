"""What the locality check found in a graph: what the rewrite does to it, and what each batch is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.fx as fx

from cp_rewrite.batch.active.marks import TokenAxes
from cp_rewrite.planning.plan_input import Neighbours, PlanInput
from cp_rewrite.refusal import Refusal

from .resolution import Insert, Lowering


@dataclass(frozen=True)
class PositionGenerator:
    """A node that makes positions 0, 1, 2, … of the shard, whose values are used per token.

    Args:
        node: `arange`: its (T,) result stands for the rows' global indices. `table`: it takes the first T rows, along
            `dim`, of its first operand; these stand for the rows at the global indices.
        kind: which of both.
        dim: for a table, the dim of the operand that positions run over.
    """

    node: fx.Node
    kind: Literal["arange", "table"] = "arange"
    dim: int = 0

    @property
    def table(self) -> fx.Node | None:
        return None if self.kind == "arange" else self.node.all_input_nodes[0]

    def at(self, index: Any, table: Any) -> Any:
        """What stands for it at places of the row, (T,) int64."""
        dtype = self.node.meta["example_value"].dtype
        return index.to(dtype) if self.kind == "arange" else table.index_select(self.dim, index)


@dataclass(frozen=True)
class RowReader:
    """A node that broadcasts what is computed of positions against rows of the batch.

    Args:
        node: the reader. source: what it reads, the same for all rows.
        dim: of the source's where the rows of the batch belong: one of size 1, or so many dims in front of its own.
    """

    node: fx.Node
    source: fx.Node
    dim: int


@dataclass(frozen=True)
class RowPositions:
    """Positions that all rows of the batch share on one process, computed for each row by itself.

        index = arange(T)                 for each row: its tokens' places
        cos = (index * inv).cos()         shared: for each row by itself
        q * cos                           readers

    Args:
        generators: what makes them. shared: what is computed of them, in the graph's order. readers: of these.
        lowered: those that count with the tokens of a row.
    """

    generators: tuple[PositionGenerator, ...] = ()
    shared: tuple[fx.Node, ...] = ()
    readers: tuple[RowReader, ...] = ()
    lowered: tuple[Lowering, ...] = ()


@dataclass(frozen=True)
class NeighbourRead:
    """What takes the place of a node that shifts, rolls or convolves tokens.

    Args:
        node: the node. source: whose rows are read; its shape is the node's, but for the channels of a convolution.
        token_dim, batch_dim: of the source; None: the batch has one row, or one for all.
        read: what each token reads; None: the source's rows as they are, of which some are left out on one process.
        extras: the rows that all ranks have, in turn: a node whose token dim begins with
            so many of them, or a number.
        conv: the convolution that runs on what was read; None: that is the result.
        group: of the ranks. why: what the report says.
    """

    node: fx.Node
    source: fx.Node
    token_dim: int
    batch_dim: int | None
    read: Neighbours | None
    extras: tuple[tuple[fx.Node | float, int], ...]
    conv: fx.Node | None
    group: str
    why: str

    @property
    def inputs(self) -> tuple[PlanInput, ...]:
        """The plan's tensors that it needs."""
        return () if self.read is None else PlanInput.of_neighbours(self.read)


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
