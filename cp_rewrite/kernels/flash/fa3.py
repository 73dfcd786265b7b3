"""FlashAttention 3 (`flash_attn_interface`), Hopper, as the user has built it. Builds differ: some have no backward."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import AttentionSpec, DeviceFacts

from . import varlen
from .launches import Launch


def reasons(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Why this kernel can't run; empty: it can."""
    found = facts.missing("flash_attn_interface", "build it from flash-attention's hopper folder")
    found += facts.unless_capability((9,), "Hopper")
    found += spec.unless_half()
    if spec.head_dim % 8 or spec.head_dim_v % 8 or max(spec.head_dim, spec.head_dim_v) > 256:
        found.append(f"head dims must be multiples of 8 up to 256, got {(spec.head_dim, spec.head_dim_v)}")
    if spec.needs_backward:
        if "fa3_backward" not in facts.features and not found:
            found.append("this build of flash_attn_interface has no backward")
        if spec.deterministic and spec.head_dim > 192:
            found.append("no deterministic backward at head dims above 192")
        if spec.softcap:
            found.append("the backward with a soft cap is not in every build; it is not used here")
    return found


def has_backward() -> bool:
    """Whether this build has one, and can be imported at all."""
    try:
        return hasattr(_interface(), "_flash_attn_backward") and hasattr(torch.ops.flash_attn_3, "bwd")
    except ImportError:
        return False


@cache
def _interface() -> Any:
    return importlib.import_module("flash_attn_interface")


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params) -> None:
    result = _interface()._flash_attn_forward(
        q, k, v, softmax_scale=params.scale, softcap=params.softcap, causal=launch.causal, **_arguments(launch)
    )
    out.copy_(result[0])
    lse.copy_(result[1])


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    launch: Launch,
    params: Params,
) -> None:
    _interface()._flash_attn_backward(
        dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=params.scale, is_causal=launch.causal,
        deterministic=params.deterministic, **_arguments(launch),
    )  # fmt: skip


def _arguments(launch: Launch) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in launch.window)
    return {
        "cu_seqlens_q": launch.cu_seqlens_q,
        "cu_seqlens_k": launch.cu_seqlens_k,
        "max_seqlen_q": launch.max_q,
        "max_seqlen_k": launch.max_k,
        "window_size_left": left,
        "window_size_right": right,
    }


forward, backward = varlen.functions(_forward, _backward)
