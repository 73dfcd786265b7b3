"""How a node that is not the same on a shard is made so: its operands get other claims, or its ops are made whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding

_ops: Any = torch.ops.cp_rewrite


class Conversion(Enum):
    """Makes another claim true of a tensor that carries no tokens; the value is the op's name."""

    SUM = "sum_over_ranks"
    """A part becomes whole."""
    SUM_GRADIENT = "sum_gradient_over_ranks"
    """Whole, for a use that knows a part of the gradient on each rank."""
    SHARE_OUT = "share_out_gradient"
    """Whole, for a use that every rank has in full."""
    DIVIDE = "div"
    """The whole as equal parts, for a sum with other parts."""


@dataclass(frozen=True)
class Converted:
    """Puts a tensor through conversions. group: of the ranks."""

    conversions: tuple[Conversion, ...]
    group: str
    world_size: int

    def __call__(self, x: Any) -> Any:
        for conversion in self.conversions:
            if conversion is Conversion.DIVIDE:
                x = torch.div(x, self.world_size)
            else:
                op = getattr(_ops, conversion.value).default
                x = op(x, self.world_size if conversion is Conversion.SHARE_OUT else self.group)
        return x


@dataclass(frozen=True)
class Ranks:
    """What an op that is made whole reads of the plan. has_token: (B, T_l) bool. row_tokens: (1,), tokens of a row."""

    group: str
    world_size: int
    has_token: Tensor
    row_tokens: Tensor

    def sum(self, part: Tensor) -> Tensor:
        """The whole of a part."""
        return _ops.sum_over_ranks.default(part, self.group)

    def largest(self, part: Tensor, count: Tensor) -> Tensor:
        """The largest of all ranks; `count` entries of this rank have the value of its part."""
        return _ops.largest_over_ranks.default(part, count, self.group)[0]


Whole = Callable[[Ranks, Any, dict[str, Any]], Any]
"""Runs an ATen op over the tokens of all ranks: (ranks, the op, its arguments by name) -> its results."""


@dataclass(frozen=True)
class Step:
    """What is done to one ATen op that runs below a node.

    Args:
        place: how many ops ran before it. op: its name.
        converted: index among the op's tensors -> its conversions.
        whole: what runs in the op's place; None: the op itself.
        writes: the op writes into a tensor that is converted.
        reason, detail: why the op is refused as it is.
    """

    place: int
    op: str
    converted: tuple[tuple[int, tuple[Conversion, ...]], ...]
    whole: Whole | None
    writes: bool
    reason: Reason
    detail: str


def group_of(sharding: Sharding) -> str:
    """The group that sums run over; "" for one rank."""
    return sharding.group_name if sharding.world_size > 1 else ""


@dataclass(frozen=True)
class Lowering:
    """A node that is taken apart into ATen ops, some of which are changed.

    Args:
        node: of the graph or of a nested region in it.
        steps: the ops to change. autocasts: arguments of the autocast regions that the node stands in.
    """

    node: fx.Node
    steps: tuple[Step, ...]
    autocasts: tuple[Sequence[Any], ...] = ()

    @property
    def why(self) -> str:
        """For the report."""
        return ", ".join(f"{step.op} over the tokens of all ranks" for step in self.steps if step.whole) or (
            "sums inside of it are needed whole"
        )
