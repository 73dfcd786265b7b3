"""The recurrences by name, and their inputs in chunks.

Shapes: R local rows, C chunks of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .maps import Maps, Read, delta_maps, selective_maps, ssd_maps


@dataclass(frozen=True)
class Options:
    """Options of delta rules. scale: of queries. l2norm: queries and keys are divided by their norms."""

    scale: float = 1.0
    l2norm: bool = False


_KINDS: dict[str, Callable[[Sequence[Tensor], Options], tuple[Maps, Read]]] = {
    "gated_delta_rule": lambda inputs, how: delta_maps(inputs, how.scale, how.l2norm),
    "kimi_delta": lambda inputs, how: delta_maps(inputs, how.scale, how.l2norm),
    "ssd": lambda inputs, _: ssd_maps(inputs),
    "selective_scan": lambda inputs, _: selective_maps(inputs),
}
_DELTA, _SPACE = ("q", "k", "v", "g", "beta"), ("x", "dt", "A", "B", "C")
INPUTS = {"gated_delta_rule": _DELTA, "kimi_delta": _DELTA, "ssd": _SPACE, "selective_scan": _SPACE}
"""Inputs with gradients, in order. All have rows but A, a weight."""


def inputs_of(kind: str, known: SimpleNamespace) -> list[Tensor]:
    """The inputs that `INPUTS` names, among an op's arguments by name."""
    return [getattr(known, name) for name in INPUTS[kind]]


def options_of(known: SimpleNamespace) -> Options:
    """The options among an op's arguments by name."""
    return Options(getattr(known, "scale", 1.0), getattr(known, "l2norm", False))


def out_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of results, by that of the first input."""
    return wide(dtype) if kind == "ssd" else dtype


def fake_out(kind: str, *inputs: Any) -> Tensor:
    """The result of an op over rows, without its values."""
    first = inputs[0]
    shape = (inputs[2] if INPUTS[kind] is _DELTA else first).shape
    return first.new_empty(shape, dtype=out_dtype(kind, first.dtype))


def state_shapes(kind: str, inputs: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Shapes of one state, and of what moves it."""
    first, third, fourth = inputs[0], inputs[2], inputs[3]
    if kind == "selective_scan":
        return list(third.shape), list(third.shape)
    heads = third.shape[2] if INPUTS[kind] is _DELTA else first.shape[2]
    if kind == "ssd":
        return [heads, fourth.shape[3], first.shape[3]], [heads, 1, 1]
    return [heads, first.shape[3], third.shape[3]], [heads, first.shape[3], first.shape[3]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds states of inputs of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def chunk_maps(kind: str, inputs: Sequence[Tensor], rows: Tensor, size: int, how: Options) -> tuple[Maps, Read]:
    """Maps of the chunks of inputs (B, T, …). rows: (C L,) among B T, -1: none. size: L."""
    dtype = wide(inputs[0].dtype)
    chunked = [
        x.to(dtype) if name == "A" else _chunks(x.flatten(0, 1), rows, size).to(dtype)
        for name, x in zip(INPUTS[kind], inputs, strict=True)
    ]
    return _KINDS[kind](chunked, how)


def _chunks(x: Tensor, rows: Tensor, size: int) -> Tensor:
    """(C, L, …) of (R, …); 0 where there is no row, whatever other rows hold."""
    if not x.shape[0]:
        return x.new_zeros(rows.numel() // size, size, *x.shape[1:])
    there = (rows >= 0).view(-1, *[1] * (x.ndim - 1))
    found = torch.where(there, x.index_select(0, rows.clamp(min=0)), 0.0)
    return found.unflatten(0, (-1, size))


def to_rows(results: Tensor, rows: Tensor, size: int) -> Tensor:
    """(R, …) of the results of chunks (C, L, …): 0 in rows of no chunk. size: R."""
    found = results.flatten(0, 1)
    out = found.new_zeros(size + 1, *found.shape[1:])
    return out.index_copy(0, torch.where(rows < 0, size, rows).long(), found)[:size]
