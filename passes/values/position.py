"""What makes positions in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.fx as fx


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
