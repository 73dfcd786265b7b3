"""The numbers an attention kernel needs besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Params:
    """Args: scale: softmax scale. softcap: logits become softcap * tanh(logits / softcap), 0.0 means none.
    deterministic: the backward must be bitwise repeatable. unrounded: the backward gives fp32 gradients of keys and
    values; only where `Capabilities.unrounded_gradients` says that the kernel can."""

    scale: float
    softcap: float = 0.0
    deterministic: bool = False
    unrounded: bool = False
