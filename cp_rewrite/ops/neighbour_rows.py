"""Rows of neighbouring tokens, whoever holds them: only those that a rank lacks travel; gradients go back the same way.

`convolve_rows` is a convolution over tokens, of rows that stand side by side as their tokens do in the row.

Shapes: R local rows, V rows received, X rows that all ranks have, E expanded rows, C columns; of a convolution C and O
channels in and out, G groups, K taps.
`planning/token_reads/neighbours.py` draws the tables.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.ops import local_rows
from cp_rewrite.ops.exchanges.needed import all_to_all_rows
from cp_rewrite.ops.schemas import bind, call, gradients, keep, kept

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::neighbour_rows", mutates_args=())
def neighbour_rows(
    x: Tensor,
    extras: Tensor,
    rows: Tensor,
    send_rows: Tensor,
    splits: Tensor,
    sum_ptr: Tensor,
    sum_rows: Tensor,
    return_ptr: Tensor,
    return_rows: Tensor,
    group: str,
) -> Tensor:
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
    grad: Tensor,
    splits: Tensor,
    send_rows: Tensor,
    sum_ptr: Tensor,
    sum_rows: Tensor,
    return_ptr: Tensor,
    return_rows: Tensor,
    size: int,
    others: int,
    group: str,
) -> Tensor:
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


@custom_op("cp_rewrite::convolve_rows", mutates_args=())
def convolve_rows(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out_rows: Tensor, dilation: int, groups: int
) -> Tensor:
    """(R, O): entry i is conv1d of the rows out_rows[i], out_rows[i] + dilation, …, K of them.

    An op of its own, since compilers would guard the sizes of a convolution over E rows, which every batch changes.

    Args:
        rows: (E, C). weight: (O, C / G, K). bias: (O,). out_rows: int32, R different ones, of `neighbours_route`.
    """
    out = F.conv1d(rows.t().unsqueeze(0), weight, bias, dilation=dilation, groups=groups)
    return out[0].t().index_select(0, out_rows.flatten())


@convolve_rows.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, out_rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(out_rows.numel(), weight.shape[0])


@custom_op("cp_rewrite::convolve_rows_backward", mutates_args=())
def convolve_rows_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, out_rows: Tensor, dilation: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, weight and bias, of that of the result (R, O)."""
    entries = rows.shape[0] - dilation * (weight.shape[2] - 1)
    full = grad.new_zeros(entries, grad.shape[1]).index_copy_(0, out_rows.flatten().long(), grad)
    numbers = [weight.shape[0]], [1], [0], [dilation], False, [0], groups, [True, True, True]
    inputs = full.t().unsqueeze(0), rows.t().unsqueeze(0), weight
    d_rows, d_weight, d_bias = torch.ops.aten.convolution_backward(*inputs, *numbers)
    return d_rows[0].t().contiguous(), d_weight, d_bias


@convolve_rows_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _keep_convolved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x = bind(_ops.convolve_rows.default, inputs)
    keep(ctx, rows=x.rows, weight=x.weight, out_rows=x.out_rows, dilation=x.dilation, groups=x.groups)
    ctx.has_bias = x.bias is not None


def _convolved_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    known = kept(ctx)
    d_rows, d_weight, d_bias = call(_ops.convolve_rows_backward.default, known, grad=grad)
    known.bias = None
    named = {"rows": d_rows, "weight": d_weight, "bias": d_bias if ctx.has_bias else None}
    return gradients(_ops.convolve_rows.default, known, **named)


register_autograd("cp_rewrite::convolve_rows", _convolved_backward, setup_context=_keep_convolved)
