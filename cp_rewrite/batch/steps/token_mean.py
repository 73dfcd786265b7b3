"""Sums and means over all tokens of a global batch, from what each rank has."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_rewrite.batch.active.marks import known_part, mark_part, token_dim_of
from cp_rewrite.sharding import Sharding, require_sharding
from cp_rewrite.torch_internals import process_group


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
    """What one process has, of an output of a compiled model: the sum over ranks of a part, as of a summed loss; a mean
    loss as it is. See `Sharding.whole`."""
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
