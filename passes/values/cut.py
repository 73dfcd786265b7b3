"""What travels in the place of keys and values, and what each rank then computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx


@dataclass(frozen=True)
class TokenRows:
    """A tensor with one row for each local row.

    Args:
        node: its node. token: the dim that counts tokens. columns: elements of a row.
    """

    node: fx.Node
    token: int
    columns: int


@dataclass(frozen=True)
class Cut:
    """Where on the way to attention rows are exchanged, when not at keys and values.

        c -> up-projection -> k, v          rows: c          nodes: up-projection, k, v

    Args:
        rows: what travels.
        nodes: what is computed again of the rows that came, in the graph's order; keys and values are among them or
            among `rows`.
        numbers: what `nodes` read that is no tensor -> a TokenCount of other rows, or it as it is; or a tuple of
            them.
        autocasts: arguments of those that are open there.
        row_bytes: of a token in `rows`. kv_bytes: of its keys and values. flops: of `nodes`, forward, for one token.
    """

    rows: tuple[TokenRows, ...]
    nodes: tuple[fx.Node, ...]
    numbers: Mapping[fx.Node, Any]
    autocasts: tuple[Any, ...]
    row_bytes: int
    kv_bytes: int
    flops: int

    @property
    def operands(self) -> list[fx.Node]:
        """What is read of the rest of the graph: rows that travel, weights."""
        inside = set(self.nodes)
        read = [source for node in self.nodes for source in node.all_input_nodes if source not in inside]
        return [*dict.fromkeys([*(rows.node for rows in self.rows), *read])]

    def __str__(self) -> str:
        names = ", ".join(rows.node.name for rows in self.rows)
        return (
            f"rows of {names} travel, {self.row_bytes} bytes a token for the {self.kv_bytes} of keys and values, which "
            f"each rank computes of them again: {self.flops / 1e6:.3g} MFLOP a row"
        )
