"""A stand-in for flash-attn (2 and 3), whose kernels are for GPUs: the same operators, functions and autograd
functions, with attention written out where they call kernels."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportIncompatibleMethodOverride=false

Out = tuple[Tensor, Tensor, Tensor, Tensor]


How = tuple[float, bool, tuple[int, int], float]
"""Scale, causal, window, soft cap."""


def weights(q: Tensor, k: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """(softmax weights, (H, q, k); derivative of the soft cap, or 1) of (T, H, D)."""
    scale, causal, window, cap = how
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    slope = 1 - torch.tanh(logits / cap).square() if cap else torch.ones_like(logits)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    delta = torch.arange(len(q))[:, None] - torch.arange(len(k))
    left, right = window[0], 0 if causal else window[1]
    seen = ((delta <= left) | (left < 0)) & ((-delta <= right) | (right < 0))
    return logits.masked_fill(~seen, float("-inf")).softmax(-1), slope


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor]:
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    return (torch.einsum("hqk,khd->qhd", weights(q, k, how)[0], v),)


def backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
    heads_kv, heads = k.shape[1], q.shape[1]
    k, v = repeated(k, heads), repeated(v, heads)
    p, slope = weights(q, k, how)
    dp = torch.einsum("qhd,khd->hqk", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * slope * how[0]
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, dout)
    dk, dv = (x.unflatten(1, (heads_kv, -1)).sum(2) for x in (dk, dv))
    return torch.einsum("hqk,khd->qhd", ds, k), dk, dv


def by_document(run: Any, operands: list[Tensor], cu: Tensor | None, how: How) -> tuple[Tensor, ...]:
    """(B, T, H, D) row by row, (T, H, D) document by document."""
    if cu is None:
        return tuple(map(torch.stack, zip(*(run(*row, how) for row in zip(*operands, strict=True)), strict=True)))
    parts = [[x[a:b] for x in operands] for a, b in itertools.pairwise(cu.tolist())]
    return tuple(map(torch.cat, zip(*(run(*part, how) for part in parts), strict=True)))


def others(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape[-2], q.shape[0], dtype=torch.float32), q.new_empty(0), q.new_empty(2).long()


def put(grads: list[Tensor | None], found: tuple[Tensor, ...], dout: Tensor) -> Tensor:
    for grad, value in zip(grads, found, strict=True):
        assert grad is not None
        grad.copy_(value)
    return others(dout)[0]


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> Out:  # fmt: skip
    how = softmax_scale, causal, (window_size_left, window_size_right), softcap
    return by_document(forward, [q, k, v], None, how)[0], *others(q)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False, num_splits: int = 0,
) -> Out:  # fmt: skip
    how = softmax_scale, causal, (window_size_left, window_size_right), softcap
    return by_document(forward, [q, k, v], cu_seqlens_q, how)[0], *others(q)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    how = softmax_scale, causal, (window_size_left, window_size_right), softcap
    return put([dq, dk, dv], by_document(backward, [q, k, v, dout], None, how), dout)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    how = softmax_scale, causal, (window_size_left, window_size_right), softcap
    return put([dq, dk, dv], by_document(backward, [q, k, v, dout], cu_seqlens_q, how), dout)


for op in (_forward, _varlen_forward):
    op.register_fake(lambda q, *_, **__: (torch.empty_like(q), *others(q)))
for op in (_backward, _varlen_backward):
    op.register_fake(lambda dout, q, *_, **__: others(q)[0])


def padded(*operands: Tensor) -> list[Tensor]:
    """Kernels take head dims of multiples of 8."""
    size = operands[0].size(-1)
    return [F.pad(x, [0, 8 - size % 8]) for x in operands] if size % 8 else list(operands)


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_softmax, is_grad_enabled,
    ) -> Any:  # fmt: skip
        is_grad = is_grad_enabled and any(x.requires_grad for x in [q, k, v])
        softmax_scale = q.shape[-1] ** (-0.5) if softmax_scale is None else softmax_scale
        size = q.size(3)
        q, k, v = padded(q, k, v)
        out, lse, mask, state = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, dropout_p, softmax_scale, causal=causal, window_size_left=window_size[0],
            window_size_right=window_size[1], softcap=softcap, alibi_slopes=alibi_slopes,
            return_softmax=return_softmax and dropout_p > 0,
        )  # fmt: skip
        if is_grad:
            ctx.save_for_backward(q, k, v, out, lse, state)
            ctx.how = dropout_p, softmax_scale, causal, window_size[0], window_size[1], softcap, alibi_slopes
            ctx.deterministic = deterministic
        out = out[..., :size]
        return out if not return_softmax else (out, lse, mask)

    @staticmethod
    def backward(ctx, dout, *args) -> Any:
        q, k, v, out, lse, state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        (dout_padded,) = padded(dout)
        torch.ops.flash_attn._flash_attn_backward(
            dout_padded, q, k, v, out, lse, *grads, *ctx.how, ctx.deterministic, rng_state=state
        )
        return *(grad[..., : dout.shape[-1]] for grad in grads), *[None] * 9


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_softmax, block_table, is_grad_enabled,
    ) -> Any:  # fmt: skip
        is_grad = is_grad_enabled and any(x.requires_grad for x in [q, k, v])
        softmax_scale = q.shape[-1] ** (-0.5) if softmax_scale is None else softmax_scale
        size = q.size(2)
        q, k, v = padded(q, k, v)
        out, lse, mask, state = torch.ops.flash_attn._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal=causal,
            window_size_left=window_size[0], window_size_right=window_size[1], softcap=softcap,
            alibi_slopes=alibi_slopes, return_softmax=return_softmax and dropout_p > 0, block_table=block_table,
        )  # fmt: skip
        if is_grad:
            ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, state)
            ctx.how = dropout_p, softmax_scale, causal, window_size[0], window_size[1], softcap, alibi_slopes
            ctx.max_seqlen_q, ctx.max_seqlen_k, ctx.deterministic = max_seqlen_q, max_seqlen_k, deterministic
        out = out[..., :size]
        return out if not return_softmax else (out, lse, mask)

    @staticmethod
    def backward(ctx, dout, *args) -> Any:
        q, k, v, out, lse, cu_q, cu_k, state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        (dout_padded,) = padded(dout)
        torch.ops.flash_attn._flash_attn_varlen_backward(
            dout_padded, q, k, v, out, lse, *grads, cu_q, cu_k, ctx.max_seqlen_q, ctx.max_seqlen_k, *ctx.how,
            ctx.deterministic, rng_state=state,
        )  # fmt: skip
        return *(grad[..., : dout.shape[-1]] for grad in grads), *[None] * 14


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
) -> Any:  # fmt: skip
    return FlashAttnFunc.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
) -> Any:  # fmt: skip
    return FlashAttnVarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, block_table, torch.is_grad_enabled(),
    )  # fmt: skip


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _forward_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None, qv: Tensor | None = None,
    out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Out:  # fmt: skip
    assert softmax_scale is not None
    how = softmax_scale, causal, (window_size_left, window_size_right), softcap
    return by_document(forward, [q, k, v], cu_seqlens_q, how)[0], *others(q)


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    assert softmax_scale is not None
    how = softmax_scale, is_causal, (window_size_left, window_size_right), softcap
    return put([dq, dk, dv], by_document(backward, [q, k, v, dout], cu_seqlens_q, how), dout)


_forward_3.register_fake(lambda q, *_, **__: (torch.empty_like(q), *others(q)))
_backward_3.register_fake(lambda dout, *_, **__: others(dout)[0])


class FlashAttn3VarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
        attention_chunk, softcap,
    ) -> Any:  # fmt: skip
        softmax_scale = q.shape[-1] ** (-0.5) if softmax_scale is None else softmax_scale
        out, lse, *_ = _forward_3(
            q, k, v, None, None, None, None, cu_seqlens_q, cu_seqlens_k, None, None, None, max_seqlen_q, max_seqlen_k,
            None, None, None, None, None, None, None, None, None, softmax_scale, causal=causal,
            window_size_left=window_size[0], window_size_right=window_size[1], attention_chunk=attention_chunk,
            softcap=softcap, num_splits=1, pack_gqa=None, sm_margin=0,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.most = max_seqlen_q, max_seqlen_k
        ctx.how = softmax_scale, causal, window_size[0], window_size[1], softcap
        return out

    @staticmethod
    def backward(ctx, dout, *args) -> Any:
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _backward_3(dout, q, k, v, out, lse, cu_q, cu_k, None, None, *ctx.most, *grads, *ctx.how, False, 0)  # type: ignore[call-arg]
        return *(grad[..., : q.shape[-1]] for grad in grads), *[None] * 9


def flash_attn_3_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0,
) -> Any:  # fmt: skip
    return FlashAttn3VarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
        attention_chunk, softcap,
    )  # fmt: skip


def take_place_for_transformers() -> None:
    """Have transformers find the stand-in where it looks for flash-attn, on this machine without a GPU."""
    utils: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    models: Any = importlib.import_module("transformers").PreTrainedModel

    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    vars(package).update(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
    )
    vars(padding).update(pad_input=utils._pad_input, unpad_input=utils._unpad_input)
    sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
    utils.is_flash_attn_2_available = lambda: True
    utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["general_availability_check"] = lambda: True
    models._flash_attn_can_dispatch = lambda *_, **__: True
