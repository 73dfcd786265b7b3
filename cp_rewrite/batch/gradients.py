"""Sums over the ranks of what each has of a global batch: of losses and other values, then of parameter gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cp_rewrite.agree import turns
from cp_rewrite.sharding import Sharding, require_sharding
from cp_rewrite.torch_internals import process_group

from .marks import known_part, mark_part, token_dim_of
from .steps import before_sum, is_summed, mark_summed


def token_mean(total: Tensor, count: Tensor | float, sharding: Sharding) -> Tensor:
    """The one-process mean, from per-rank sums.

        mean = (sum of `total` over ranks) / (sum of `count` over ranks)

    The value is the same on every rank. The gradient that reaches `total` is 1 / (global count): this rank's part, so
    parameter gradients summed over ranks (`sum_gradients`) are those of one process. `count` gets no gradient.

        loss = F.cross_entropy(logits, labels, reduction="sum")     # labels shifted before the cut
        loss = cp.token_mean(loss, (labels != -100).sum(), sharding)

    Args:
        total: this rank's sum over its tokens, floating point, any shape (one mean per entry).
        count: how many tokens (or how much weight) this rank summed; a number or a tensor that broadcasts to `total`.
        sharding: the annotation; the sums run over its group.
    Returns:
        Tensor of the shape and dtype of `total`; 0 with gradient 0 where the global count is 0.
    Raises:
        TypeError: `total` is no floating-point tensor, or `sharding` no Sharding.
    """
    if not isinstance(total, Tensor) or not total.is_floating_point():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"total must be a floating-point tensor, got {getattr(total, 'dtype', total)!r}")
    weight = torch.as_tensor(count, device=total.device).detach().expand(total.shape)
    return _token_mean(total, weight, _group_name(require_sharding(sharding)))[0]


def whole(value: Tensor, sharding: Sharding) -> Tensor:
    """The value on one process of an output of a compiled model: the sum over ranks of a part, as of a summed loss; a
    mean loss as it is. See `Sharding.whole`."""
    if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"whole() takes a tensor that the model returned, got {type(value).__name__}")
    if sharding.world_size == 1:
        return value
    if token_dim_of(value) is not None:
        raise ValueError(
            f"whole() was given a value for each token, of shape {tuple(value.shape)}: sharding.unshard(x, "
            f"{token_dim_of(value)}) gives those of the whole row"
        )
    part = known_part(value)
    if part is None:
        raise ValueError(
            "whole() can't tell whether this is a rank's part or the whole: give it what the compiled model returned, "
            "as it was returned, sharding.whole(model(**local).loss) / n. Of per-token outputs, which a loss of your "
            "own is made of, cp.token_mean(sum, count, sharding) is the mean of the whole batch"
        )
    return summed(value, sharding) if part else value


def summed(part: Tensor, sharding: Sharding) -> Tensor:
    """The sum of a part over ranks, the same on all. The gradient that reaches `part` is this rank's alone."""
    if part.is_floating_point():
        total = token_mean(part, float(sharding.rank == 0), sharding)
    else:
        total = part.clone()
        dist.all_reduce(total, group=process_group(_group_name(sharding)))
    mark_part(total, False)
    return total


_threads: list[str] = []
"""While `cp_rewrite.check` runs: the group of the threads that play the ranks. The model's own annotation, which it
passes to `token_mean`, knows nothing of them."""


@contextmanager
def group_of_threads(name: str) -> Generator[None]:
    """Inside, sums run over this group, whatever the annotation says."""
    _threads.append(name)
    try:
        yield
    finally:
        _threads.pop()


def _group_name(sharding: Sharding) -> str:
    if _threads:
        return _threads[-1]
    return sharding.group_name if sharding.world_size > 1 and not isinstance(sharding.mesh, int) else ""


@torch.library.custom_op("cp_rewrite::token_mean", mutates_args=())
def _token_mean(total: Tensor, count: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """(mean, 1 / global count). Sums run in float64, which holds every token count exactly. "" is a group of one."""
    sums = torch.stack([total.to(torch.float64), count.to(torch.float64)])
    if group:
        dist.all_reduce(sums, group=process_group(group))
    inverse = torch.where(sums[1] == 0, torch.zeros_like(sums[1]), 1 / sums[1])
    # The sum is divided, not multiplied: that rounds as one process does.
    mean = torch.where(sums[1] == 0, torch.zeros_like(sums[0]), sums[0] / sums[1])
    return mean.to(total.dtype), inverse.to(total.dtype)


@_token_mean.register_fake
def _(total: Tensor, count: Tensor, group: str) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(total, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
    return grad * ctx.saved_tensors[0], None, None


torch.library.register_autograd("cp_rewrite::token_mean", _backward, setup_context=_save)


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
    turns.on_gradients(sharding, [f"parameter {i}: {grad.dtype} {tuple(grad.shape)}" for i, grad in named])
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
