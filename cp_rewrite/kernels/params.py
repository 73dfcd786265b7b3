"""The numbers an attention kernel needs beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Params:
    """Args: scale: softmax scale. softcap: logits become softcap * tanh(logits / softcap), 0.0 means none.
    deterministic: the backward must be bitwise repeatable. wide: it gives gradients of keys in fp32, not rounded, where
    the kernel `keeps_sums`."""

    scale: float
    softcap: float = 0.0
    deterministic: bool = False
    wide: bool = False
