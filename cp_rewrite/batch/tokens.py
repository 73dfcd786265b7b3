"""Tokens of a tensor, cut to what one rank owns, and joined again from all ranks' parts in the order of the global row.

`cut_tokens` and `join_tokens` are of plain tensors, `unshard` of a rank's, with a gradient; `gathered` joins an output
of a compiled model by what the proof noted of it, `by_axes` one whose tokens are anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.ops.local_rows import beside, take_tokens
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding

from .active import last_plan, to_device
from .as_row import to_local
from .marks import TokenAxes, batch_number, token_axes_of, token_dim_of


def cut_tokens(x: Tensor, dim: int, indices: NDArray[np.int64], fill: float) -> Tensor:
    """One rank's part of a tensor of the global batch. Inverse: `join_tokens` of all ranks' parts.

        T = 6 tokens of one row     a b c d e f
        indices                     0 5 -1
        result                      a f fill

    Args:
        x: T tokens at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        indices: (B, T_l) int64: the tokens to take of each row of the batch; -1: `fill`.
    Returns:
        x with T_l entries at `dim`.
    """
    cut = take_tokens(x, dim, to_device(torch.from_numpy(np.maximum(indices, 0)), x.device))
    if not (indices < 0).any():
        return cut
    hole = to_device(torch.from_numpy(indices < 0), x.device)
    return cut.masked_fill(beside(hole, x, dim), fill)


def join_tokens(x: Tensor, dim: int, plan: BatchPlan) -> Tensor:
    """A tensor of the global batch from all ranks' parts of it, which stand one behind another along `dim`.

    T = 4 tokens, rank 0 owns 0 and 3     parts 0 3 | 1 2     sources 0 2 3 1
    """
    sources = np.empty((len(plan.rows), plan.rows[0].total), dtype=np.int64)
    for rank in range(plan.world_size):
        for row, local in enumerate(plan.local_indices(rank)):
            sources[row, local[local >= 0]] = rank * plan.local_size + np.flatnonzero(local >= 0)
    return cut_tokens(x, dim, sources, 0)


def unshard(sharding: Sharding, x: Tensor, dim: int) -> Tensor:
    """Tokens of all ranks in the order of the global row.

    Args:
        x: this rank's tensor of the batch that was cut last: T_l tokens at `dim`, rows of the batch (if several) at
            `dim - 1`.
        dim: token dim; negative ones count from the end.
    Returns:
        The global tensor, T tokens at `dim`, on every rank. Its gradient is cut, not summed over ranks: a loss
        computed from it counts once, and parameter gradients are summed over the group as for local losses.
    Raises:
        TypeError, ValueError: no tensor, no dim of it with as many tokens as a rank has, or not the rows before it.
        RuntimeError: before any batch was cut by this annotation.
    """
    last = last_plan(sharding)
    if last is None:
        raise RuntimeError("unshard() needs the plan of a batch: call it inside or after `with sharding.shard(batch)`")
    plan = last.plan
    if not isinstance(x, Tensor) or type(dim) is not int:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"unshard() takes a tensor and its token dim, got {type(x).__name__} and {dim!r}")
    x = to_local(x)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dim of x, which has shape {tuple(x.shape)}, got {dim}")
    dim = dim % x.ndim
    if x.shape[dim] != plan.local_size:
        raise ValueError(f"dim {dim} of x has {x.shape[dim]} tokens, but a rank's part has {plan.local_size}")
    rows, axes = len(plan.rows), token_axes_of(x)
    before = axes[dim - 1] if dim and axes else ("B",)
    if rows > 1 and (dim == 0 or x.shape[dim - 1] != rows or before != ("B",)):
        raise ValueError(
            f"x, of shape {tuple(x.shape)}, does not have the {rows} rows of the batch at the dim before its tokens at "
            f"dim {dim}: move them there"
        )
    if batch_number(x) not in (None, last.handed.number):
        raise ValueError("x is of another batch than the last one: call unshard() before the next batch is cut")
    return cast(Tensor, _Unshard.apply(x, dim, sharding, plan))


def gathered(sharding: Sharding, x: Tensor) -> Tensor:
    """An output of a compiled model with its tokens in global order, by what the proof noted of it; others as they are.

    (T_l, B, V), (B, V, T_l), (B T_l, V) and the like are brought into (B, T_l, …), and back.

    Raises:
        ValueError: it has tokens of one of several rows of the batch, and no one knows of which.
    """
    dim, axes = token_dim_of(x), token_axes_of(x)
    if dim is not None:
        return unshard(sharding, x, dim)
    last = last_plan(sharding)
    if axes is None or last is None:
        return x
    rows = len(last.plan.rows)
    if not has_rows(axes) and rows > 1:
        raise ValueError(
            f"gather_outputs: an output of shape {tuple(x.shape)} has tokens of one row of the batch, which holds "
            f"{rows}, each cut in an order of its own: return all, (B, T, …), or leave gather_outputs out"
        )
    return by_axes([x], axes, last.plan, lambda parts, dim: unshard(sharding, parts[0], dim))


def has_rows(axes: TokenAxes) -> bool:
    """True if a dim counts the rows of the batch."""
    return any("B" in (factors or ()) for factors in axes)


def by_axes(
    parts: Sequence[Tensor], axes: TokenAxes, plan: BatchPlan, join: Callable[[list[Tensor], int], Tensor]
) -> Tensor:
    """Ranks' parts of an output, joined where its tokens are by `axes`: `join` is given them as (B, T_l, …), or as
    (T_l, …) where no dim counts the rows, and their token dim."""
    local = {"T": plan.local_size, "B": len(plan.rows)}
    names = [f for factors in axes for f in (factors or (None,))]
    front = [names.index(name) for name in ("B", "T") if name in names]

    def spread(x: Tensor) -> Tensor:
        for place in reversed(range(x.ndim)):
            if factors := axes[place]:
                x = x.unflatten(place, [local[f] if isinstance(f, str) else f for f in factors])
        return x.movedim(front, list(range(len(front))))

    whole = join([*map(spread, parts)], len(front) - 1).movedim(list(range(len(front))), front)
    for place, factors in enumerate(axes):
        whole = whole.flatten(place, place + len(factors or (None,)) - 1)
    return whole


class _Unshard(torch.autograd.Function):
    """All-gather and order; backward: this rank's tokens of the gradient, without a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sharding: Sharding, plan: BatchPlan) -> Tensor:
        ctx.dim, ctx.indices = dim, plan.local_indices(sharding.rank)
        if sharding.world_size == 1:
            parts = [x]
        else:
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(sharding.world_size)]
            dist.all_gather(parts, x.contiguous(), group=sharding.group)
        return join_tokens(torch.cat(parts, dim), dim, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return cut_tokens(grads[0], ctx.dim, ctx.indices, 0), None, None, None


def map_tensors(change: Callable[[Tensor], Tensor], out: Any) -> Any:
    """`out` with each tensor changed; mappings, as ModelOutput is one, in place."""
    if isinstance(out, Tensor):
        return change(out)
    if isinstance(out, Mapping):
        for key in list(cast(Mapping[str, Any], out)):
            cast(dict[str, Any], out)[key] = map_tensors(change, out[key])
        return cast(Any, out)
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(map_tensors(change, value) for value in cast(tuple[Any, ...], out)))
    if isinstance(out, list | tuple):
        return type(out)(map_tensors(change, value) for value in cast(list[Any], out))
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        fields = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
        return dataclasses.replace(out, **{name: map_tensors(change, value) for name, value in fields.items()})
    return out
