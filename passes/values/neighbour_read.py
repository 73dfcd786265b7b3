"""A tensor whose token rows are made of other tokens' rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from cp_rewrite.planning.plan_input import Neighbours, PlanInput


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
