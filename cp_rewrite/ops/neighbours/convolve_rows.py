"""A convolution over tokens, of rows that stand side by side as their tokens do in the row.

Shapes: E expanded rows, R local rows, C and O channels in and out, G groups, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.ops.schemas import bind, call, gradients, keep, kept

_ops: Any = torch.ops.cp_rewrite


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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x = bind(_ops.convolve_rows.default, inputs)
    keep(ctx, rows=x.rows, weight=x.weight, out_rows=x.out_rows, dilation=x.dilation, groups=x.groups)
    ctx.has_bias = x.bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    known = kept(ctx)
    d_rows, d_weight, d_bias = call(_ops.convolve_rows_backward.default, known, grad=grad)
    known.bias = None
    named = {"rows": d_rows, "weight": d_weight, "bias": d_bias if ctx.has_bias else None}
    return gradients(_ops.convolve_rows.default, known, **named)


register_autograd("cp_rewrite::convolve_rows", _backward, setup_context=_keep)
