"""Rows of all ranks, and running products.

Shapes: N rows of C columns, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.ops.exchanges.needed import all_to_all_rows

_ops: Any = torch.ops.cp_rewrite


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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks = inputs[1:]


def _summed(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _ops.sum_rows_of_ranks.default(grad.contiguous(), *ctx.ranks), None, None


register_autograd("cp_rewrite::rows_of_ranks", _summed, setup_context=_keep)


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
