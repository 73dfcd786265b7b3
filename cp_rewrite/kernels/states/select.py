"""Which recurrences run by kernels: those of fla (flash-linear-attention), of half precision on CUDA GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.select import DeviceFacts, device_facts

_LIBRARY = "fla.ops.cp"
CLASSES = {"gated_delta_rule": "delta.Delta", "kimi_delta": "delta.Kimi", "ssd": "ssd.Ssd"}
"""Of each recurrence that has kernels, the class of this package that calls them."""
SOLVED = {"gated_delta_rule": 1, "kimi_delta": 2}
"""How many tensors (R, H, 64) the forward of such a class solves and the backward reads, of those with any."""


def runs_by_kernels(kind: str, inputs: Sequence[Tensor]) -> bool:
    """Whether a recurrence of these inputs has kernels here."""
    facts = device_facts(inputs[0].device, (_LIBRARY,))
    return not reasons(kind, inputs[0].dtype, inputs[1 if kind != "ssd" else 3].shape[-1], facts)


def reasons(kind: str, dtype: torch.dtype, channels: int, facts: DeviceFacts) -> list[str]:
    """Every reason why kernels can't run it; empty: they can. channels: of keys, the first dim of a state."""
    found: list[str] = []
    if kind not in CLASSES:
        found.append(f"no kernel of {kind}")
    if dtype not in (torch.bfloat16, torch.float16):
        found.append(f"bfloat16 and float16 only, got {str(dtype).removeprefix('torch.')}")
    if channels > 256:
        found.append(f"at most 256 channels of keys, got {channels}")
    if facts.major < 8:
        found.append("needs a CUDA GPU of compute capability 8.0 or newer")
    return found + facts.missing(_LIBRARY, "pip install fla-core")


@cache
def load(kind: str) -> Any:
    """The class that runs a recurrence, imported when asked for, with its libraries."""
    module, _, name = CLASSES[kind].partition(".")
    return getattr(importlib.import_module(f"cp_rewrite.kernels.states.{module}"), name)
