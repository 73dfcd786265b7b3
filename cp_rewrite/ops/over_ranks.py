"""Parts of a sum made whole over ranks, as ops; each way has the gradient that its name says. Rows of all ranks, and
running products, for scans.

A tensor without tokens has a value and a gradient, and each of them is either whole on every rank or a part that adds
up over the ranks (docs/internals/architecture.md, "Parts and wholes"):

    op                       value             gradient
    sum_over_ranks           part  -> whole    whole <- whole    as it comes in
    largest_over_ranks       part  -> whole    whole <- whole    to the rank that had the largest value
    max_over_ranks           part  -> whole    none
    sum_gradient_over_ranks  whole -> whole    whole <- part     summed over the ranks
    share_out_gradient       whole -> whole    part  <- whole    divided by the number of ranks

The group "" is a group of one rank.

Shapes of rows: N rows of C columns, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.ops.exchanges.needed import all_to_all_rows
from cp_rewrite.torch_internals import process_group

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' `x`; 16-bit floats are summed in fp32."""
    return _all_reduced(x, dist.ReduceOp.SUM, group)


@custom_op("cp_rewrite::sum_gradient_over_ranks", mutates_args=())
def sum_gradient_over_ranks(x: Tensor, group: str) -> Tensor:
    """`x`, the same on all ranks, for uses of which each rank knows only its part of the gradient."""
    return x.clone(memory_format=torch.contiguous_format)


@custom_op("cp_rewrite::share_out_gradient", mutates_args=())
def share_out_gradient(x: Tensor, world_size: int) -> Tensor:
    """`x`, the same on all ranks, for a use that all ranks have in full: together they count it once."""
    return x.clone(memory_format=torch.contiguous_format)


@custom_op("cp_rewrite::max_over_ranks", mutates_args=())
def max_over_ranks(x: Tensor, group: str) -> Tensor:
    """The largest of all ranks' `x`, of numbers that need no gradient."""
    return _all_reduced(x, dist.ReduceOp.MAX, group)


@custom_op("cp_rewrite::largest_over_ranks", mutates_args=())
def largest_over_ranks(x: Tensor, count: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """(the largest of all ranks' `x`, this rank's share of its gradient).

    Args:
        count: how many of this rank's entries have the value `x`. Entries of all ranks that are equally large have
            equal shares, as on one process.
    """
    if not group:
        return x.clone(memory_format=torch.contiguous_format), torch.ones_like(x, memory_format=torch.contiguous_format)
    largest = _all_reduced(x, dist.ReduceOp.MAX, group)
    mine = torch.where(x == largest, count, 0).to(torch.float64)
    return largest, (mine / _all_reduced(mine, dist.ReduceOp.SUM, group)).to(x.dtype)


def _all_reduced(x: Tensor, op: Any, group: str) -> Tensor:
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    total = x.to(wide, copy=True, memory_format=torch.contiguous_format)
    if group:
        dist.all_reduce(total, op=op, group=process_group(group))
    return total.to(x.dtype)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@sum_over_ranks.register_fake
@sum_gradient_over_ranks.register_fake
@share_out_gradient.register_fake
@max_over_ranks.register_fake
def _(x: Tensor, _: Any) -> Tensor:
    return _like(x)


@largest_over_ranks.register_fake
def _(x: Tensor, count: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _keep_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.second = inputs[1]


def _keep_share(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _whole(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


def _summed(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _ops.sum_over_ranks(grad, ctx.second), None


def _divided(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad / ctx.second, None


def _to_the_largest(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
    return grad * ctx.saved_tensors[0], None, None


register_autograd("cp_rewrite::sum_over_ranks", _whole, setup_context=_keep_second)
register_autograd("cp_rewrite::sum_gradient_over_ranks", _summed, setup_context=_keep_second)
register_autograd("cp_rewrite::share_out_gradient", _divided, setup_context=_keep_second)
register_autograd("cp_rewrite::largest_over_ranks", _to_the_largest, setup_context=_keep_share)


@custom_op("cp_rewrite::rows_of_ranks", mutates_args=())
def rows_of_ranks(x: Tensor, world_size: int, group: str) -> Tensor:
    """(P N, C): all ranks' `x` (N, C), rank after rank, of any dtype. Each rank's gradient is that of its own uses."""
    if not group:
        return x.clone(memory_format=torch.contiguous_format)
    splits = [x.shape[0]] * world_size
    # Of whole numbers and bools the bytes travel: not every backend has a type for them.
    rows = x.contiguous().view(torch.uint8).repeat(world_size, 1)
    return all_to_all_rows(rows, splits, splits, group).view(x.dtype)


@rows_of_ranks.register_fake
def _(x: Tensor, world_size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] * world_size, x.shape[1])


@custom_op("cp_rewrite::sum_rows_of_ranks", mutates_args=())
def sum_rows_of_ranks(x: Tensor, world_size: int, group: str) -> Tensor:
    """(N, C): this rank's rows of `x` (P N, C), summed over the ranks; 16-bit floats in fp32."""
    size = x.shape[0] // world_size
    if not group:
        return x.clone(memory_format=torch.contiguous_format)
    splits = [size] * world_size
    parts = all_to_all_rows(x, splits, splits, group).unflatten(0, (world_size, size))
    return parts.sum(0)


@sum_rows_of_ranks.register_fake
def _(x: Tensor, world_size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // world_size, x.shape[1])


def _keep_ranks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks = inputs[1:]


def _summed_rows(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _ops.sum_rows_of_ranks.default(grad.contiguous(), *ctx.ranks), None, None


register_autograd("cp_rewrite::rows_of_ranks", _summed_rows, setup_context=_keep_ranks)


@custom_op("cp_rewrite::running_product", mutates_args=())
def running_product(x: Tensor) -> Tensor:
    """cumprod of (L, N, C) along dim 1. An op of its own: compilers take its gradient apart by the number of rows."""
    return x.cumprod(1)


@running_product.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("cp_rewrite::running_product_backward", mutates_args=())
def running_product_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, right where x has zeros."""
    return torch.ops.aten.cumprod_backward(grad, x, 1, x.cumprod(1)).clone()


@running_product_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _of_product(ctx: Any, grad: Tensor) -> Tensor:
    return _ops.running_product_backward.default(grad, ctx.saved_tensors[0])


register_autograd("cp_rewrite::running_product", _of_product, setup_context=_keep_input)
