"""FlashAttention 2 as stock torch ships it: there on every CUDA GPU from Ampere on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.select import AttentionSpec, DeviceFacts, Params

from . import varlen
from .varlen import Launch

_aten: Any = torch.ops.aten


def reasons(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Why this kernel can't run; empty: it can."""
    found = facts.unless_capability(range(8, 100), "Ampere or newer")
    found += spec.unless_half()
    if spec.head_dim != spec.head_dim_v:
        found.append(f"head dims of keys and values must be equal, got {spec.head_dim} and {spec.head_dim_v}")
    if spec.head_dim % 8 or not 8 <= spec.head_dim <= 256:
        found.append(f"head dims must be multiples of 8 from 8 to 256, got {spec.head_dim}")
    if spec.softcap:
        found.append("no soft cap of the logits")
    return found


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params) -> None:
    result = _aten._flash_attention_forward(
        q, k, v, *_lengths(launch), 0.0, launch.causal, False, scale=params.scale, **_window(launch)
    )
    out.copy_(result[0])
    # +inf is what this kernel writes for a row that sees no key.
    lse.copy_(result[1].masked_fill_(result[1] == torch.inf, -torch.inf))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    launch: Launch, params: Params,
) -> None:  # fmt: skip
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    # The kernel reads its own +inf for rows without a key; their probabilities are exp(s - inf) = 0.
    lse = lse.contiguous().masked_fill(lse == -torch.inf, torch.inf)
    with _deterministic(params.deterministic):
        grads = _aten._flash_attention_backward(
            dout, q, k, v, out, lse, *_lengths(launch), 0.0, launch.causal, seed, unused, scale=params.scale,
            **_window(launch),
        )  # fmt: skip
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


def _lengths(launch: Launch) -> tuple[Tensor, Tensor, int, int]:
    return launch.cu_seqlens_q, launch.cu_seqlens_k, launch.max_q, launch.max_k


def _window(launch: Launch) -> dict[str, int | None]:
    if launch.causal:
        return {}
    left, right = (-1 if side is None else side for side in launch.window)
    return {} if left < 0 and right < 0 else {"window_size_left": left, "window_size_right": right}


@contextmanager
def _deterministic(on: bool) -> Generator[None]:
    """Set torch's global switch, which the op reads: it has no argument for that."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if on:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


forward, backward = varlen.functions(_forward, _backward)
