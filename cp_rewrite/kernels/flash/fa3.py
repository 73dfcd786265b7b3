"""FlashAttention 3 (`flash_attn_interface`), Hopper, as the user has built it. Builds differ: some have no backward."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.select import AttentionSpec, Capabilities, DeviceFacts, Params

from . import varlen
from .varlen import Launch

_LEFT_OUT = "fa3_no_"
_SHORT, _LONG = 256, 4096
"""Queries per entry, on average, between which heads that share keys are not packed into one tile: 2 % faster at 1,200,
15 % at 512, and up to 3 % slower from 32K on (H200)."""


def reasons(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Why this kernel can't run; empty: it can."""
    found = facts.missing("flash_attn_interface", "build it from flash-attention's hopper folder")
    found += facts.unless_capability((9,), "Hopper")
    found += spec.unless_half()
    if spec.head_dim % 8 or spec.head_dim_v % 8 or max(spec.head_dim, spec.head_dim_v) > 256:
        found.append(f"head dims must be multiples of 8 up to 256, got {(spec.head_dim, spec.head_dim_v)}")
    found += _not_built(spec, facts) if not found else []
    if spec.needs_backward:
        if "fa3_backward" not in facts.features and not found:
            found.append("this build of flash_attn_interface has no backward")
        if spec.deterministic and spec.head_dim > 192:
            found.append("no deterministic backward at head dims above 192")
        if spec.softcap:
            found.append("the backward with a soft cap is not in every build; it is not used here")
    return found


def _not_built(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Reasons why this build can't run an attention: what it was made without."""
    left_out = {name.removeprefix(_LEFT_OUT) for name in facts.features if name.startswith(_LEFT_OUT)}
    found = ["this build has no float16"] * (spec.dtype is torch.float16 and "FP16" in left_out)
    found += ["this build has no soft cap"] * (spec.softcap != 0.0 and "SOFTCAP" in left_out)
    largest = max((dim for dim in (64, 96, 128, 192, 256) if f"HDIM{dim}" not in left_out), default=0)
    if max(spec.head_dim, spec.head_dim_v) > largest:
        found.append(f"this build has head dims up to {largest}, got {(spec.head_dim, spec.head_dim_v)}")
    return found


def features() -> set[str]:
    """Features of this build (`fa3_backward`), and what it was made without (`fa3_no_FP16`), as far as it tells."""
    found = {"fa3_backward"} if has_backward() else set[str]()
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError):
        return found
    prefix = "FLASHATTENTION_DISABLE_"
    return found | {_LEFT_OUT + flag.removeprefix(prefix) for flag, is_left_out in flags.items() if is_left_out}


def has_backward() -> bool:
    """True if this build has one, and can be imported at all."""
    try:
        return hasattr(_ops(), "bwd")
    except ImportError:
        return False


@cache
def _ops() -> Any:
    """The library's ops in C++."""
    importlib.import_module("flash_attn_interface")
    return torch.ops.flash_attn_3


def capabilities() -> Capabilities:
    """Its forward runs beside an exchange, in two parts, its backward between the way there and the way back."""
    return Capabilities(overlaps_exchange=True)


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params) -> None:
    # The library's own ops in Python allocate `out` and rely on autograd; those below them take it.
    result = _ops().fwd(
        q, k, v, out=out, softmax_scale=params.scale, softcap=params.softcap, is_causal=launch.causal, num_splits=1,
        pack_gqa=_packs_heads(launch), **_arguments(launch),
    )  # fmt: skip
    lse.copy_(result[1])


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    launch: Launch, params: Params,
) -> None:  # fmt: skip
    if launch.overlap is not None:
        launch.overlap.keys_needed()
    _ops().bwd(
        dout, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv, softmax_scale=params.scale, is_causal=launch.causal,
        deterministic=params.deterministic, **_arguments(launch),
    )  # fmt: skip
    if launch.overlap is not None:
        launch.overlap.gradients_written()


def _packs_heads(launch: Launch) -> bool | None:
    """False where heads that share keys are faster apart; None: the library chooses."""
    entries = launch.cu_seqlens_q.shape[0] - 1
    return False if _SHORT * entries <= launch.stop < _LONG * entries else None


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
