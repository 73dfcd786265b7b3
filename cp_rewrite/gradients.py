"""Parameter gradients over a context-parallel group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .sharding import Sharding

_LARGE = 1 << 20
"""Bytes from which a gradient travels alone, in place; smaller ones are put together."""


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], sharding: Sharding) -> None:
    """Sum parameter gradients over the context-parallel group, in place.

    Each rank's loss is its tokens' part of the global loss, so gradients are summed, not averaged. Call it after
    backward, with gradients of the same parameters on all ranks. With DDP or FSDP over the same group, which average,
    scale the loss by the world size instead.
    """
    if sharding.world_size == 1:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    alone = [grad for grad in grads if grad.nbytes >= _LARGE and grad.is_contiguous()]
    sums: list[Any] = [dist.all_reduce(grad, group=sharding.group, async_op=True) for grad in alone]
    known = set(map(id, alone))
    _sum_together([grad for grad in grads if id(grad) not in known], sharding)
    for work in sums:
        work.wait()


def _sum_together(grads: list[Tensor], sharding: Sharding) -> None:
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        group = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in group])
        dist.all_reduce(flat, group=sharding.group)
        for grad, part in zip(group, flat.split([grad.numel() for grad in group]), strict=True):
            grad.copy_(part.view_as(grad))
