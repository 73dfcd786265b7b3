"""Values and rows that ranks exchange beside attention, as ops: sums over ranks, rows of all ranks, rows of
neighbouring tokens; each has the gradient that its name says.

A tensor without tokens has a value and a gradient, and each of them is either whole on every rank or a part that adds
up over the ranks (docs/internals/architecture.md, "Parts and wholes"):

    op                       value             gradient
    sum_over_ranks           part  -> whole    whole <- whole    as it comes in
    sum_gradient_over_ranks  whole -> whole    whole <- part     summed over the ranks
    share_out_gradient       whole -> whole    part  <- whole    divided by the number of ranks
    max_over_ranks           part  -> whole    none
    largest_over_ranks       part  -> whole    whole <- whole    to the rank that had the largest value

`rows_of_ranks` and `sum_rows_of_ranks` are for scans. `neighbour_rows` gives rows of neighbouring tokens, whoever holds
them: only those that a rank lacks travel, and gradients go back the same way; `planning/reads.py` draws the tables.

The group "" is a group of one rank.

Shapes of rows: N rows of C columns, P ranks; of neighbours R local rows, V rows received, X rows that all ranks have, E
expanded rows, C columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.torch_internals import process_group

from . import local_rows
from .exchanges.needed import all_to_all_rows
from .schemas import bind, call, keep, kept

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


register_autograd("cp_rewrite::sum_over_ranks", lambda ctx, grad: (grad, None), setup_context=_keep_second)
register_autograd(
    "cp_rewrite::sum_gradient_over_ranks",
    lambda ctx, grad: (_ops.sum_over_ranks(grad, ctx.second), None),
    setup_context=_keep_second,
)
register_autograd(
    "cp_rewrite::share_out_gradient", lambda ctx, grad: (grad / ctx.second, None), setup_context=_keep_second
)
register_autograd(
    "cp_rewrite::largest_over_ranks",
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None, None),
    setup_context=_keep_share,
)


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


@custom_op("cp_rewrite::neighbour_rows", mutates_args=())
def neighbour_rows(
    x: Tensor, extras: Tensor, rows: Tensor, send_rows: Tensor, splits: Tensor,
    sum_ptr: Tensor, sum_rows: Tensor, return_ptr: Tensor, return_rows: Tensor, group: str,
) -> Tensor:  # fmt: skip
    """(E, C): rows of this rank, of others and `extras`, as `rows` names them.

    Args:
        x: (R, C), of any dtype. extras: (X, C), the same on all ranks.
        rows, …, return_rows: of `neighbours_route` (splits on the host).
        group: name of the process group; "" for one rank.
    """
    found = [x.contiguous()]
    if group:
        send, recv = splits.tolist()
        # Of whole numbers and bools the bytes travel: not every backend has a type for them.
        leaving = found[0].index_select(0, send_rows[: sum(send)]).view(torch.uint8)
        with nvtx("neighbours"):
            found.append(all_to_all_rows(leaving, recv, send, group).view(x.dtype))
    return torch.cat([*found, extras.to(x.dtype)]).index_select(0, rows.flatten())


@neighbour_rows.register_fake
def _(x: Tensor, extras: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return x.new_empty(rows.numel(), x.shape[1])


@custom_op("cp_rewrite::return_neighbour_rows", mutates_args=())
def return_neighbour_rows(
    grad: Tensor, splits: Tensor, send_rows: Tensor,
    sum_ptr: Tensor, sum_rows: Tensor, return_ptr: Tensor, return_rows: Tensor,
    size: int, others: int, group: str,
) -> Tensor:  # fmt: skip
    """The transpose of `neighbour_rows`: (R + X, C) sums of gradients (E, C), in fp32 (fp64 for fp64), in a fixed
    order. Those of `extras` are this rank's part. Args: size: R. others: X."""
    if not group:
        return local_rows.sum_rows(grad, sum_ptr, sum_rows, size + others)
    send, recv = splits.tolist()
    summed = local_rows.sum_rows(grad, sum_ptr, sum_rows, size + sum(recv) + others)
    own, foreign, rest = summed.split([size, sum(recv), others])
    with nvtx("neighbours_backward"):
        returned = all_to_all_rows(foreign, send, recv, group)
    return torch.cat([local_rows.sum_rows(torch.cat([own, returned]), return_ptr, return_rows, size), rest])


@return_neighbour_rows.register_fake
def _(*inputs: Any) -> Tensor:
    x = bind(_ops.return_neighbour_rows.default, inputs)
    wide = torch.promote_types(x.grad.dtype, torch.float32)
    return x.grad.new_empty(x.size + x.others, x.grad.shape[1], dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x = bind(_ops.neighbour_rows.default, inputs)
    tables = {name: getattr(x, name) for name in ("splits", "send_rows", "sum_ptr", "sum_rows")}
    tables |= {"return_ptr": x.return_ptr, "return_rows": x.return_rows, "group": x.group}
    keep(ctx, **tables, size=x.x.shape[0], others=x.extras.shape[0], dtypes=(x.x.dtype, x.extras.dtype))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    known = kept(ctx)
    total = call(_ops.return_neighbour_rows.default, known, grad=grad)
    x, extras = total.split([known.size, known.others])
    return (x.to(known.dtypes[0]), extras.to(known.dtypes[1]), *[None] * 8)


register_autograd("cp_rewrite::neighbour_rows", _backward, setup_context=_keep)
