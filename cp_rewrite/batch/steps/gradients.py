"""Parameter gradients over a context-parallel group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cp_rewrite.batch import agree
from cp_rewrite.sharding import Sharding, require_sharding

from .backward import before_sum, is_summed, mark_summed

_LARGE = 1 << 20
"""Bytes from which a gradient is summed alone, in place; smaller ones are copied into one tensor first."""


def note_summed(parameters: Iterable[nn.Parameter]) -> None:
    """Note that the gradients of these are summed over the group by other means."""
    for parameter in parameters:
        parameter._cp_rewrite_summed = True  # type: ignore[attr-defined]


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], sharding: Sharding) -> None:
    """Sum parameter gradients over the context-parallel group, in place.

    Each rank's loss is its tokens' part of the global loss, so gradients are summed, not averaged. Call it once per
    optimizer step, on all ranks, after the last backward and before gradients are clipped; a second call without a
    backward in between does nothing. With DDP or FSDP over the same group, which average, scale the loss by the world
    size instead.

    Args:
        parameters: as `model.parameters()` gives them; those without a gradient are passed over.
        sharding: the annotation.
    Raises:
        TypeError: no iterable of parameters, or a gradient is sparse, as of `nn.Embedding(sparse=True)`.
        RuntimeError: on every rank, where ranks have gradients of different parameters, or one doesn't call it (see
            `check_batches`); where gradients were summed before and changed since.
    """
    everything: Any = parameters
    if isinstance(everything, Tensor | nn.Module):
        raise TypeError(f"parameters must be an iterable such as model.parameters(), got {type(everything).__name__}")
    everything = list(everything)
    if not all(isinstance(parameter, Tensor) for parameter in everything):
        raise TypeError("parameters must hold parameters, as model.parameters() does, not names or groups of them")
    if require_sharding(sharding).world_size == 1:
        return
    # A parameter that is listed twice, as tied weights may be, is summed once.
    once = dict.fromkeys(everything)
    if any(hasattr(parameter, "_cp_rewrite_summed") for parameter in once):
        raise TypeError("cp.parallelize's model has its gradients summed after each backward: leave out sum_gradients")
    before_sum(sharding)
    unsummed = [(i, p) for i, p in enumerate(once) if p.grad is not None and not is_summed(sharding, p)]
    named: list[tuple[int, Tensor]] = [(i, p.grad) for i, p in unsummed]
    sparse = next((grad for _, grad in named if grad.layout != torch.strided), None)
    if sparse is not None:
        raise TypeError(f"a gradient of shape {tuple(sparse.shape)} is sparse: make it dense (sparse=False)")
    agree.on_gradients(sharding, [f"parameter {i}: {grad.dtype} {tuple(grad.shape)}" for i, grad in named])
    grads = [grad for _, grad in named]
    alone = [grad for grad in grads if grad.nbytes >= _LARGE and grad.is_contiguous()]
    sums: list[Any] = [dist.all_reduce(grad, group=sharding.group, async_op=True) for grad in alone]
    known = set(map(id, alone))
    _sum_together([grad for grad in grads if id(grad) not in known], sharding)
    for work in sums:
        work.wait()
    mark_summed(sharding, [p for _, p in unsummed])


def _sum_together(grads: list[Tensor], sharding: Sharding) -> None:
    """One sum for all gradients of a dtype."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        group = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in group])
        dist.all_reduce(flat, group=sharding.group)
        for grad, part in zip(group, flat.split([grad.numel() for grad in group]), strict=True):
            grad.copy_(part.view_as(grad))
