"""Ranges that GPU profilers show."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch


def nvtx(name: str) -> Any:
    """A range `cp_rewrite::name` around what runs inside; nothing without a GPU."""
    return torch.cuda.nvtx.range(f"cp_rewrite::{name}") if _has_nvtx() else nullcontext()


@functools.cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
