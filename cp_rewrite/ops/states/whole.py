"""Recurrences over whole rows, as ops of the captured graph: what one process computes.

Shapes: B rows of T tokens; Hk heads of queries and keys, H heads, K and V head dims; P, G, N, E as in `space.py`; D
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.ops.schemas import bind, gradients, keep, kept
from cp_rewrite.planning.token_reads.chunks import CHUNK, chunk_counts, chunk_rows

from . import by_kernels
from .kinds import INPUTS, Options, chunk_maps, fake_out, inputs_of, options_of, out_dtype, to_rows
from .maps import run_chains
from .trial import right_kernels

_ops: Any = torch.ops.cp_rewrite
_vjp: Any = torch.func.vjp  # autograd has no place inside of an op


@custom_op("cp_rewrite::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Tensor | None, scale: float, l2norm: bool
) -> Tensor:
    """(B, T, H, V) in q's dtype: the gated delta rule of `delta.py`, from a state of 0, computed in fp32 (fp64).

    Args:
        q, k: (B, T, Hk, K). v: (B, T, H, V), H a multiple of Hk. g: (B, T, H), logarithms. beta: (B, T, H).
        offsets: (D + 1,) int32, ascending from 0: sequence i has the rows [offsets[i], offsets[i + 1]) of all B T; rows
            behind the last give 0. None: each of the B rows is one sequence.
        scale: of q, after its norm. l2norm: q and k are divided by their norms over K.
    """
    return _whole("gated_delta_rule", [q, k, v, g, beta], offsets, Options(scale, l2norm))


@custom_op("cp_rewrite::kimi_delta", mutates_args=())
def kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Tensor | None, scale: float, l2norm: bool
) -> Tensor:
    """`gated_delta_rule` with a decay for each channel: g (B, T, H, K)."""
    return _whole("kimi_delta", [q, k, v, g, beta], offsets, Options(scale, l2norm))


@custom_op("cp_rewrite::ssd", mutates_args=())
def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, offsets: Tensor | None) -> Tensor:
    """(B, T, H, P) in fp32 (fp64): SSD of `space.py`, without a skip of x.

    Args:
        x: (B, T, H, P). dt: (B, T, H), after all that is done to it. A: (H,). B, C: (B, T, G, N), H a multiple of G.
        offsets: as of `gated_delta_rule`.
    """
    return _whole("ssd", [x, dt, A, B, C], offsets, Options())


@custom_op("cp_rewrite::selective_scan", mutates_args=())
def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, offsets: Tensor | None) -> Tensor:
    """(B, T, E) in x's dtype: the selective scan of `space.py`, computed in fp32 (fp64), without skip and gate.

    Args:
        x, dt: (B, T, E). A: (E, N). B, C: (B, T, N). offsets: as of `gated_delta_rule`.
    """
    return _whole("selective_scan", [x, dt, A, B, C], offsets, Options())


def _whole(kind: str, inputs: list[Tensor], offsets: Tensor | None, how: Options) -> Tensor:
    bounds = _bounds(inputs[0], offsets)
    if kernels := right_kernels(kind, inputs, len(bounds) - 1, how):
        return by_kernels.whole(kernels, kind, inputs, bounds, how)
    out = _run(kind, inputs, *_chunk_tables(inputs[0], bounds), how)
    return out.to(out_dtype(kind, inputs[0].dtype))


def _run(kind: str, inputs: Sequence[Tensor], rows: Tensor, levels: list[int], how: Options) -> Tensor:
    """(B, T, …), as wide as states are."""
    shape = inputs[0].shape[:2]
    maps, read = chunk_maps(kind, inputs, rows, CHUNK, how)
    states, _ = run_chains(maps, levels, maps.zeros(sum(levels[:1])))
    return to_rows(read(states), rows, shape[0] * shape[1]).unflatten(0, shape)


def _bounds(x: Tensor, offsets: Tensor | None) -> np.ndarray:
    """(D + 1,) int64 of the sequences of x (B, T, …).

    Raises:
        ValueError: offsets that do not ascend from 0, or go beyond the rows.
    """
    count = x.shape[0] * x.shape[1]
    bounds = np.arange(x.shape[0] + 1) * x.shape[1] if offsets is None else offsets.cpu().numpy().astype(np.int64)
    if bounds[0] or (np.diff(bounds) < 0).any() or bounds[-1] > count:
        raise ValueError(f"offsets must ascend from 0 up to at most {count} rows, got {bounds[:8].tolist()}…")
    return bounds


def _chunk_tables(x: Tensor, bounds: np.ndarray) -> tuple[Tensor, list[int]]:
    """`chunk_rows` of sequences of x."""
    starts, lengths = bounds[:-1], np.diff(bounds)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    order = np.argsort(-chunk_counts(lengths), kind="stable")
    rows, levels = chunk_rows(starts[order], lengths[order])
    return torch.from_numpy(rows.reshape(-1)).to(x.device), levels.tolist()


@custom_op("cp_rewrite::states_backward", mutates_args=())
def states_backward(
    dout: Tensor, inputs: list[Tensor], offsets: Tensor | None, kind: str, scale: float, l2norm: bool
) -> list[Tensor]:
    """Gradients of all inputs of a recurrence, computed again from them. Args: kind: the op's name."""
    bounds, how = _bounds(inputs[0], offsets), Options(scale, l2norm)
    if kernels := right_kernels(kind, inputs, len(bounds) - 1, how):
        return by_kernels.whole_backward(kernels, kind, dout, inputs, bounds, how)
    rows, levels = _chunk_tables(inputs[0], bounds)
    out, vjp = _vjp(lambda *leaves: _run(kind, leaves, rows, levels, how), *inputs)
    return [x.contiguous() for x in vjp(dout.to(out.dtype))]


@states_backward.register_fake
def _(dout: Tensor, inputs: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs]


def _register(name: str, fake: Any) -> None:
    """Fake and autograd of a recurrence."""
    named = getattr(_ops, name).default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, **vars(bind(named, inputs)))

    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x = kept(ctx)
        how = options_of(x)
        found = _ops.states_backward(dout, inputs_of(name, x), x.offsets, name, how.scale, how.l2norm)
        return gradients(named, x, **dict(zip(INPUTS[name], found, strict=True)))

    torch.library.register_fake(f"cp_rewrite::{name}", fake)
    register_autograd(f"cp_rewrite::{name}", backward, setup_context=setup_context)


for _name in INPUTS:
    _register(_name, partial(fake_out, _name))
