"""Parameter gradients over a context-parallel group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .sharding import Sharding


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], sharding: Sharding) -> None:
    """Sum parameter gradients over the context-parallel group, in place, one all-reduce per dtype.

    Each rank's loss is its tokens' part of the global loss, so gradients are summed, not averaged. Call it after
    backward. With DDP or FSDP over the same group, which average, scale the loss by the world size instead.
    """
    if sharding.world_size == 1:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        group = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in group])
        dist.all_reduce(flat, group=sharding.group)
        for grad, part in zip(group, flat.split([grad.numel() for grad in group]), strict=True):
            grad.copy_(part.view_as(grad))
