"""What a rank's model returns, with the values of one process and gradients for what averages over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_rewrite.batch.active.marks import is_part
from cp_rewrite.batch.stand_in import StandIn
from cp_rewrite.batch.steps.token_mean import summed
from cp_rewrite.sharding import Sharding

_SMALL = 1 << 16
"""Entries up to which an output is copied: losses and statistics, which training loops change in place."""


def whole(value: Tensor, sharding: Sharding) -> Tensor:
    """An output with the value that one process has, if it is a sum over tokens. Its gradient is this rank's part."""
    return summed(value, sharding) if is_part(value) else value


def scaled(value: Tensor, factor: int) -> Tensor:
    """The same with `factor` times its gradient.

    A new tensor, as other outputs may be computed from the given one. The factor is a node of autograd, which no later
    op can pass by: an op in place on a small output (`loss *= weight`) follows it; on a large one, which shares the
    memory of the given tensor, it is an error of torch.
    """
    if factor == 1 or not value.requires_grad or isinstance(value, StandIn):  # whose gradient is an error
        return value
    out: Tensor = _Scale.apply(value, factor)  # type: ignore[assignment]
    vars(out).update(vars(value))  # what is known of its tokens
    return out


class _Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: int) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return value.clone() if value.numel() <= _SMALL else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None
