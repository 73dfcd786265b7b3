"""Recurrences by kernels: the ops of `ops.py`, over pieces and over whole rows, on GPUs where `kernels/states` can run
them.

Shapes: R = B T_l rows; N cut pieces as in `planning/states.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.kernels.states.select import CHUNK, SOLVED, Runs, load, runs_by_kernels
from cp_rewrite.planning.states import run_tables

from .maps import INPUTS, Maps, Options, fold, out_dtype, state_shapes, wide


def forward(
    kernels: str, kind: str, inputs: Sequence[Tensor], t: SimpleNamespace, how: Options, group: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """As an op on pieces gives. kernels: of `kernels/states/select.py`. t: tables of a plan by name."""
    runs = _runs_of_plan(t)
    with _on(inputs[0]):
        kernel = _kernel(kernels, kind, inputs, runs, how)
        own = _maps(kind, inputs, len(t.cut_pieces))
        kernel.summarize(own.move, own.add)
        with nvtx("states"):
            entries = fold(own, t, "", group)
        out = kernel.out(runs.states_of(entries, runs.entered))
        kept = [x[0].unflatten(0, inputs[0].shape[:2]) for x in kernel.kept]
        return _rows(runs, out, inputs).to(out_dtype(kind, inputs[0].dtype)), entries, own.move, kept


def not_kept(kind: str, inputs: Sequence[Tensor], l2norm: bool) -> list[Tensor]:
    """Empty tensors in the shapes of what `forward` keeps, with queries and keys as they are."""
    if kind not in SOLVED or not runs_by_kernels(kind, inputs):
        return []
    q, k, v, *_ = inputs
    normed: list[Tensor] = []
    for x in (q, k) if l2norm else ():
        normed += x.clone(memory_format=torch.contiguous_format), x.new_zeros(x.shape[:3], dtype=torch.float32)
    return [*normed, *(k.new_zeros(*v.shape[:3], CHUNK) for _ in range(SOLVED[kind]))]


def backward(
    kernels: str, kind: str, dout: Tensor, entries: Tensor, moves: Tensor, kept: Sequence[Tensor],
    inputs: Sequence[Tensor], t: SimpleNamespace, how: Options, group: str,
) -> list[Tensor]:  # fmt: skip
    """As `states_on_pieces_backward` gives."""
    runs = _runs_of_plan(t)
    with _on(inputs[0]):
        kernel = _kernel(kernels, kind, inputs, runs, how, kept)
        kernel.begin_backward(_flat(dout), runs.states_of(entries, runs.entered))
        own = torch.zeros_like(entries)
        kernel.of_entries(own)
        dense = INPUTS[kind][0] == "q"
        with nvtx("states_backward"):
            ends = fold(Maps(moves.mT if dense else moves, own, dense), t, "_back", group)
        return _gradients(kind, kernel.gradients(runs.states_of(ends, runs.left)), inputs, runs)


def whole(kernels: str, kind: str, inputs: Sequence[Tensor], bounds: np.ndarray, how: Options) -> Tensor:
    """As an op over whole rows gives. bounds: of sequences, ascending from 0."""
    runs = _runs_of_rows(bounds, inputs[0])
    with _on(inputs[0]):
        kernel = _kernel(kernels, kind, inputs, runs, how)
        none = _maps(kind, inputs, 0)
        kernel.summarize(none.move, none.add)
        out = kernel.out(None)
        return _rows(runs, out, inputs).to(out_dtype(kind, inputs[0].dtype))


def whole_backward(
    kernels: str, kind: str, dout: Tensor, inputs: Sequence[Tensor], bounds: np.ndarray, how: Options
) -> list[Tensor]:
    """As `states_backward` gives."""
    runs = _runs_of_rows(bounds, inputs[0])
    with _on(inputs[0]):
        kernel = _kernel(kernels, kind, inputs, runs, how)
        kernel.begin_backward(_flat(dout), None)
        kernel.of_entries(_maps(kind, inputs, 0).add)
        return _gradients(kind, kernel.gradients(None), inputs, runs)


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _kernel(
    kernels: str, kind: str, inputs: Sequence[Tensor], runs: Runs, how: Options, kept: Sequence[Tensor] = ()
) -> Any:
    flat = [x if name == "A" else _flat(x) for name, x in zip(INPUTS[kind], inputs, strict=True)]
    return load(kernels)(flat, runs, how.scale, how.l2norm, [_flat(x) for x in kept])


def _flat(x: Tensor) -> Tensor:
    """(1, R, …) of (B, T_l, …)."""
    return x.flatten(0, 1).unsqueeze(0).contiguous()


def _maps(kind: str, inputs: Sequence[Tensor], count: int) -> Maps:
    state, move = state_shapes(kind, inputs)
    new, dtype = inputs[0].new_zeros, wide(inputs[0].dtype)
    return Maps(new(count, *move, dtype=dtype), new(count, *state, dtype=dtype), INPUTS[kind][0] == "q")


def _rows(runs: Runs, x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """(B, T_l, …) of (1, R, …); 0 in rows of no piece."""
    return runs.without_gaps(x)[0].unflatten(0, inputs[0].shape[:2])


def _gradients(kind: str, found: list[Tensor], inputs: Sequence[Tensor], runs: Runs) -> list[Tensor]:
    return [x if name == "A" else _rows(runs, x, inputs) for name, x in zip(INPUTS[kind], found, strict=True)]


def _runs_of_plan(t: SimpleNamespace) -> Runs:
    return Runs.of_tables(t.runs, t.run_offsets, t.run_chunks, t.run_states)


def _runs_of_rows(bounds: np.ndarray, x: Tensor) -> Runs:
    real = np.diff(bounds) > 0
    starts, lengths = bounds[:-1][real], np.diff(bounds)[real]
    uncut = np.full(len(starts), -1)
    tables = run_tables(starts, lengths, uncut, uncut, x.shape[0] * x.shape[1], 0)
    found = {name: torch.from_numpy(table) for name, table in tables.items()}
    return Runs.of_tables(found.pop("runs"), *(table.to(x.device) for table in found.values()))
