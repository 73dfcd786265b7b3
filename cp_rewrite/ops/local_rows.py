"""Rows of one rank, as ops with their fakes: gathered, summed and packed, found by their tokens, taken by their places,
copied, multiplied up, convolved; and what a model reads in rows without a token, which fill up a rank
(`with_valid_fill`). Nothing here travels.

Shapes: R local rows, E expanded rows, Hkv key heads, D and V head dims of k and v, C = Hkv * (D + V). Rows are (N, C).
Of a batch: B rows of T tokens, T_l local rows on this rank. Of a convolution: C and O channels in and out, G groups, K
taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.kernels import rows as row_kernels

from .schemas import bind, call, gradients, keep, kept

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::gather_rows", mutates_args=())
def gather_rows(src: Tensor, rows: Tensor) -> Tensor:
    """(E, C): row `rows[i]` of `src` (N, C). `rows` (E,) int32."""
    return row_kernels.gather_rows(src, rows)


@gather_rows.register_fake
def _(src: Tensor, rows: Tensor) -> Tensor:
    return src.new_empty(rows.shape[0], src.shape[1])


@custom_op("cp_rewrite::sum_rows", mutates_args=())
def sum_rows(x: Tensor, ptr: Tensor, rows: Tensor, size: int) -> Tensor:
    """(size, C) fp32 (fp64 for fp64): row i is the sum of `x` (E, C) at `rows[2 i]` and `rows[2 i + 1]`, where these
    are not negative, and at `rows[ptr[i]:ptr[i + 1]]`, in that order: two runs are bitwise equal.

    `ptr` (size + 1,) int32, `rows` (at least 2 size,) int32: `intervals.sum_lists`.
    """
    return row_kernels.sum_rows(x, ptr, rows)


@sum_rows.register_fake
def _(x: Tensor, ptr: Tensor, rows: Tensor, size: int) -> Tensor:
    # The size is an argument: a fake size read off `ptr` would make guards on the plan's tensors.
    return x.new_empty(size, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))


@custom_op("cp_rewrite::pack_rows", mutates_args=())
def pack_rows(k: Tensor, v: Tensor, after: Tensor) -> Tensor:
    """`pack_kv`, but not before `after` is there (see `exchange_kv`)."""
    return pack_kv(k, v)


@pack_rows.register_fake
def _(k: Tensor, v: Tensor, after: Tensor) -> Tensor:
    return k.new_empty(k.shape[0], packed_width(k, v))


def packed_width(k_RHD: Any, v_RHV: Any) -> Any:
    """C: the elements of a row that `pack_kv` makes."""
    return k_RHD.shape[1] * (k_RHD.shape[2] + v_RHV.shape[2])


def pack_kv(k_RHD: Any, v_RHV: Any) -> Any:
    """(R, C) rows that hold all k heads, then all v heads: what travels. Inverse: `split_kv`."""
    return torch.cat([k_RHD.flatten(1), v_RHV.flatten(1)], 1)


def packed_after(k_RHD: Any, v_RHV: Any, after: Tensor | None) -> Any:
    """`pack_kv`, after `after` if there is one."""
    return pack_kv(k_RHD, v_RHV) if after is None else _ops.pack_rows.default(k_RHD, v_RHV, after)


def split_kv(kv_EC: Tensor, heads: int, dim_qk: int, dim_v: int) -> tuple[Tensor, Tensor]:
    """Views (E, heads, dim_qk) and (E, heads, dim_v) of rows packed by `pack_kv`."""
    rows, width = kv_EC.shape[0], heads * dim_qk
    return kv_EC[:, :width].view(rows, heads, dim_qk), kv_EC[:, width:].view(rows, heads, dim_v)


def as_rows(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """dk and dv packed like k and v, without a copy when a kernel wrote them into one such buffer."""
    base = dk._base
    shape = k.shape[0], packed_width(k, v)
    if base is not None and base is dv._base and base.shape == shape and base.is_contiguous():
        return base
    return torch.cat([dk.flatten(1), dv.flatten(1)], 1)


@custom_op("cp_rewrite::local_rows", mutates_args=())
def local_rows(
    token_rows_TB: Tensor, token: Tensor, row: Tensor | None, in_document_TB: Tensor | None, size: int
) -> Tensor:
    """The local rows of tokens, -1 of those that other ranks have.

        rank 0 has tokens 0 1 5, rank 1 has 2 3 4      T = 6
        token_rows on rank 1                           -1 -1 0 1 2 -1
        local_rows of tokens 3, 5                      1, -1

    Args:
        token_rows_TB: int64, of the plan.
        token: places in the global row, int64; a negative one counts from its end.
        row: rows of the batch, int64, that broadcast with `token`. None: `token` counts through all rows of the batch,
            and so does the result, by `size` local rows for each.
        in_document_TB: bool, of the plan; with it, a token of no document is an error.
    Raises:
        IndexError: there is no such token. On a GPU, an assertion there.
        ValueError: it belongs to no document. On a GPU, an assertion there.
    """
    place, of = _by_row(token, *token_rows_TB.shape) if row is None else (token, row)
    found = token_rows_TB[place, of]
    if row is None:
        found = torch.where(found < 0, found, found + of * size)
    if in_document_TB is not None:
        _check_documents(in_document_TB[place, of], place)
    return found


def _by_row(token: Tensor, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """(place in its row, row of the batch) of numbers that count through all rows."""
    outside = (token < -tokens * rows) | (token >= tokens * rows)
    if not token.is_cuda and outside.any():
        raise IndexError(f"index {int(token[outside][0])} is out of bounds for {rows} rows of {tokens} tokens")
    token = torch.where(token < 0, token + tokens * rows, token)
    return token % tokens, token // tokens


def _check_documents(inside: Tensor, token: Tensor) -> None:
    if inside.is_cuda:
        torch._assert_async(inside.all(), f"the model {_PADDING}")
    elif not inside.all():
        place = int(token.expand_as(inside)[~inside][0])
        raise ValueError(f"the model reads what attention gave to token {place} of a row, and {_PADDING}")


_PADDING = (
    "picks a token of no document: it is padding, which attends to nothing here, whatever the model's mask says. Pick "
    "a token of a document, or give padding a document of its own"
)


@local_rows.register_fake
def _(token_rows_TB: Tensor, token: Tensor, row: Tensor | None, in_document_TB: Tensor | None, size: int) -> Tensor:
    shape = token.shape if row is None else torch.broadcast_shapes(token.shape, row.shape)
    return token.new_empty(shape, dtype=torch.int64)


@custom_op("cp_rewrite::snapshot", mutates_args=())
def snapshot(x: Tensor) -> Tensor:
    """A copy of `x`, of any shape and dtype. Compilers see no more of it: they neither fold it into `x` nor compute it
    again in a backward."""
    return x.clone()


@snapshot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


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


register_autograd(
    "cp_rewrite::running_product",
    lambda ctx, grad: _ops.running_product_backward.default(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


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


def take_tokens(x: Tensor, dim: int, index_BT: Tensor) -> Tensor:
    """x with the entries `index_BT` of `dim`, for each row of the batch its own.

    Args:
        x: tokens at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        index_BT: (B, N) int64.
    Returns:
        x with N entries at `dim`.
    """
    if len(index_BT) == 1:
        return x.index_select(dim, index_BT[0])
    sizes = [*x.shape[:dim], index_BT.shape[1], *x.shape[dim + 1 :]]
    return x.gather(dim, beside(index_BT, x, dim).expand(sizes))


def beside(x_BT: Tensor, like: Tensor, dim: int) -> Tensor:
    """A value per token, as it stands beside those of `like`, whose tokens are at `dim`, by broadcasting."""
    shape = [1] * like.ndim
    shape[dim] = x_BT.shape[1]
    if len(x_BT) > 1:
        shape[dim - 1] = len(x_BT)
    return x_BT.view(shape)


def with_valid_fill(x: Tensor, dim: int, has_token_BT: Tensor, source_BT: Tensor, spare: Tensor | None) -> Tensor:
    """A tensor of a rank's tokens with copies of its own rows in those that hold no token, and with its strides.

        x            a b c 0 0
        has_token    1 1 1 0 0
        source       0 1 2 1 1
        result       a b c b b

    Fill is then as valid to a model as tokens are, whatever has made the tensor. No gradient goes there.

    Args:
        x: T_l rows at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        has_token_BT: (B, T_l) bool. source_BT: (B, T_l) int64, the row that each is a copy of; T_l: `spare`.
        spare: one row, for those of which this rank has nothing to copy; None: they stay as they are.
    """
    several = len(source_BT) > 1
    alike = [d for d in range(x.ndim) if x.stride(d) == 0 and d != dim and not (several and d == dim - 1)]
    one = x
    for d in alike:  # expanded: one number for many places, as the compiled graph was promised
        one = one.narrow(d, 0, 1)
    rows = one.detach()
    if spare is None:
        own = torch.arange(source_BT.shape[1], device=source_BT.device)
        rows = take_tokens(rows, dim, torch.where(source_BT < len(own), source_BT, own))
    else:
        rows = take_tokens(torch.cat([rows, spare], dim), dim, source_BT)
    found = torch.where(beside(has_token_BT, one, dim), one, rows)
    if found.stride() != one.stride():
        found = torch.empty_strided(one.shape, one.stride(), dtype=x.dtype, device=x.device).copy_(found)
    return found.expand(x.shape)
