"""Which kernels run a recurrence: those of FlashQLA and of fla (flash-linear-attention), in half precision on GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.select import DeviceFacts, device_facts

_LIBRARIES = ("fla.ops.cp", "flash_qla")
_FUSED = "fused.Fused"
CLASSES = {"gated_delta_rule": (_FUSED, "delta.Delta"), "kimi_delta": ("delta.Kimi",), "ssd": ("ssd.Ssd",)}
"""Recurrence that has kernels -> the classes of this package that call them, best first."""
SOLVED = {"gated_delta_rule": 1, "kimi_delta": 2}
"""How many tensors (B, T_l, H, 64) the forward of such a class solves and the backward reads, of those with any."""
_LONG, _MANY = 256, 32
"""Rows of a run, in the mean, and runs times heads from which on `_FUSED` is chosen: it makes three states of each run
and head, in fp32, and gives each pair one multiprocessor (on an H200, at 8 heads a row in one run was 0.8 times as
fast as by fla, in two runs 1.0, 16 heads in one 1.2)."""


def runs_by_kernels(kind: str, inputs: Sequence[Tensor], there: DeviceFacts | None = None) -> bool:
    """Whether a recurrence of these inputs has kernels here, or has them, in half precision, on another machine."""
    return bool(_able(kind, inputs, there))


def kernels_for(kind: str, inputs: Sequence[Tensor], runs: int) -> list[str]:
    """The `CLASSES` that can run a recurrence of these inputs. runs: sequences that their rows are in."""
    found = _able(kind, inputs)
    if _FUSED in found:
        (rows, tokens), heads = inputs[0].shape[:2], inputs[2].shape[2]
        if rows * tokens < _LONG * runs or heads * runs < _MANY:
            found.remove(_FUSED)
    return found


def _able(kind: str, inputs: Sequence[Tensor], there: DeviceFacts | None = None) -> list[str]:
    channels, values = (3, 0) if kind == "ssd" else (1, 2)
    dims = inputs[channels].shape[-1], inputs[values].shape[-1]
    facts = device_facts(inputs[0].device, _LIBRARIES) if there is None else there
    dtype = inputs[0].dtype if there is None else torch.bfloat16
    return [name for name in CLASSES.get(kind, ()) if not reasons(name, dtype, *dims, facts)]


def reasons(name: str, dtype: torch.dtype, channels: int, values: int, facts: DeviceFacts) -> list[str]:
    """Every reason why a class of `CLASSES` can't run; empty: it can. channels, values: the dims of a state."""
    found: list[str] = []
    if dtype not in (torch.bfloat16, torch.float16):
        found.append(f"bfloat16 and float16 only, got {str(dtype).removeprefix('torch.')}")
    found += facts.missing("fla.ops.cp", "pip install fla-core")
    if name == _FUSED:
        if (channels, values) != (128, 128):
            found.append(f"head dims of 128 only, got {channels} and {values}")
        return found + facts.unless_capability((9,), "Hopper") + facts.missing("flash_qla", "pip install flash-qla")
    if channels > 256:
        found.append(f"at most 256 channels of keys, got {channels}")
    if facts.major < 8:
        found.append("needs a CUDA GPU of compute capability 8.0 or newer")
    return found


@cache
def load(name: str) -> Any:
    """A class of `CLASSES`, imported when asked for, with its libraries."""
    module, _, of_it = name.partition(".")
    return getattr(importlib.import_module(f"cp_rewrite.kernels.states.{module}"), of_it)
