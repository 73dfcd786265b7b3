"""A part of a graph that runs over some of a rank's rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from cp_rewrite.passes.graph.modes import Mode


@dataclass(frozen=True, eq=False)
class TileRegion:
    """Nodes that run tile by tile, in order.

    Args:
        rows: tensors with rows that they read from outside. wholes: tensors that all tiles read. results: nodes that
            others read. states: of `rows` and `results`. widest: bytes a row of the widest tensor inside. mode: modes
            that are open where they stand. again: the backward computes all of it once more in any case. chunks: how
            many tiles there are, where a loop of the model says so, else 0.
    """

    nodes: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    wholes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    states: Mapping[fx.Node, Any]
    widest: int
    mode: Mode
    again: bool = False
    chunks: int = 0
