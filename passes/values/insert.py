"""What a rewrite puts between a node and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from cp_rewrite.batch.active import PlanInput


@dataclass(frozen=True)
class Insert:
    """`node` reads what `emit` makes of `operand`, in the operand's place; other nodes that read it are left alone.

        y = x.sum()     ->     masked = where(has_token, x, 0); y = masked.sum()

    Args:
        node: the reader; any node of the graph or of a nested region in it.
        operand: one of its operands. What `emit` gives has the operand's shape and dtype.
        emit: called with proxies, of the operand and of `inputs`: it makes the new nodes by torch's functions.
        why: what it is for, as the report says it.
        inputs: the plan's tensors that it needs.
    """

    node: fx.Node
    operand: fx.Node
    emit: Callable[..., Any]
    why: str
    inputs: tuple[PlanInput, ...] = ()
