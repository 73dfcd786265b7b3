"""What makes positions in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.fx as fx

from .resolution import Lowering


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
