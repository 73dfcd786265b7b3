"""A wide output that a graph no longer gives, and how it is made of what the graph gives in its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from cp_rewrite.ops.tiles import Region


@dataclass(frozen=True)
class LeftOut:
    """One output.

    Args:
        place: its place among the outputs, where None is given. region: what makes it, over some rows at a time.
        operands: the region's: inputs of the graph, or places among all that the graph gives. orders: of their dims,
            as the region takes them.
        order: the dims of the output as the region gives them. sizes: of these dims; None: of the one that counts rows.
        trained: gradients reach it.
    """

    place: int
    region: Region
    operands: tuple[fx.Node | int, ...]
    orders: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    sizes: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    trained: bool
    tile: int
