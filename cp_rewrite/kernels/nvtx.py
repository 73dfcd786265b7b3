"""Ranges that GPU profilers show."""

from __future__ import annotations

import functools

import torch


class nvtx:
    """A range `cp_rewrite::name` around what runs inside; nothing without a GPU."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _has_nvtx():
            torch.cuda.nvtx.range_push(f"cp_rewrite::{self._name}")

    def __exit__(self, *_: object) -> None:
        if _has_nvtx():
            torch.cuda.nvtx.range_pop()


@functools.cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
