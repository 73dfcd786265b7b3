"""The selective scan by kernels of ours, `csrc/selective_*.cu`.

All chunks are worked on side by side: first their states at the end, from 0 at the start. These are passed on from
chunk to chunk; then results come from the states that enter. The backward goes the same ways from behind.

Shapes: R rows, E channels with N numbers of a state for each, which stand at S places; C chunks, U runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.kernels import cuda

from .select import Runs

_BLOCK = 128
"""Threads of a block."""
_SHARED = 32
"""Places up to which the 48 KB that a block may share are enough for all of its threads in the backward."""
_TOGETHER = 8
"""Blocks of channels whose parts of the gradients of B and C are added where they are computed."""


class Selective:
    """A selective scan over packed runs. inputs: x, dt, A, B, C of `ops/states/ops.py`, of (1, R) rows."""

    kept: Sequence[Tensor] = ()

    def __init__(self, inputs: Sequence[Tensor], runs: Runs, *_: object) -> None:
        self.inputs, self.runs = inputs, runs
        self.x, dt, rate, write, look = (x.squeeze(0) if x.ndim > 2 else x for x in inputs)
        self.dt = dt if dt.dtype == self.x.dtype else dt.float()
        self.places = max(4, 1 << (rate.shape[1] - 1).bit_length())
        self.rate, self.write, self.look = (self._filled(x.float()) for x in (rate / math.log(2), write, look))
        self.spans = runs.numbers(runs.spans)
        self.sums = self.rate.new_empty(len(runs.chunks), self.x.shape[1])
        self.states = self._ends(self.x, self.write, back=False)

    def summarize(self, move: Tensor, add: Tensor) -> None:
        """Write what pieces do that are cut at their end, in fp32 (…, E, N): what decays the state that enters, and
        what is added."""
        self._pass_cut(self.states, self.runs.left, add, move, back=False)

    def out(self, states: Tensor | None) -> Tensor:
        """(1, R, E). states: (U, E, N) fp32, what enters each run; None: 0."""
        self._pass(self.states, states, back=False)
        out = torch.empty_like(self.x)
        self._launch(
            "selective_out", len(self.runs.chunks), self.x, self.dt, self.rate, self.write, self.look, self.states, out,
            self.runs.chunks, self.runs.offsets,
        )  # fmt: skip
        return out.unsqueeze(0)

    def begin_backward(self, dout: Tensor, states: Tensor | None) -> None:
        """Compute what gradients need of the states that entered the runs."""
        self._pass(self.states, states, back=False)
        self.dout = dout.squeeze(0).to(self.x.dtype)
        self.back = self._ends(self.dout, self.look, back=True)

    def of_entries(self, found: Tensor) -> None:
        """Write (…, E, N): gradients of the states that enter cut pieces, of the pieces' own results alone."""
        self._pass_cut(self.back, self.runs.entered, found, None, back=True)

    def gradients(self, ends: Tensor | None) -> list[Tensor]:
        """Gradients of the inputs. ends: (U, E, N) fp32, gradients of the states that leave the runs; None: 0."""
        self._pass(self.back, ends, back=True)
        dx, d_dt, (rows, channels) = torch.empty_like(self.x), torch.empty_like(self.dt), self.x.shape
        block = _BLOCK if self.places <= _SHARED else _BLOCK // 2
        splits = -(-channels * self.places // (4 * block * _TOGETHER))
        parts = self.rate.new_empty(splits, rows, 2, self.places)
        self._launch(
            "selective_back", len(self.runs.chunks), self.x, self.dt, self.rate, self.write, self.look, self.dout,
            self.states, self.back, dx, d_dt, parts, rows, self.runs.chunks, self.runs.offsets, blocks=splits,
            block=block,
        )  # fmt: skip
        empty = set(self.runs.gaps)
        for run, bounds in enumerate(self.runs.bounds):
            if bounds in empty:
                self.back[slice(*self.runs.span(run))] = 0
        found = dx, d_dt, self.back.sum(0), parts[:, :, 0].sum(0), parts[:, :, 1].sum(0)
        widths = [x.shape[-1] for x in self.inputs]
        found = (x[..., :width].contiguous() for x, width in zip(found, widths, strict=True))
        return [x.to(like.dtype).view_as(like) for x, like in zip(found, self.inputs, strict=True)]

    def _ends(self, x: Tensor, vectors: Tensor, back: bool) -> Tensor:
        """(C, E, S): states at the ends of chunks, from 0; or what results of chunks say of states at their starts."""
        ends = self.rate.new_empty(len(self.runs.chunks), *self.rate.shape)
        self._launch(
            "selective_ends", len(ends), x, self.dt, self.rate, vectors, ends, self.sums, self.runs.chunks,
            self.runs.offsets, macros=_BACK[back],
        )  # fmt: skip
        return ends

    def _pass(self, states: Tensor, entered: Tensor | None, back: bool) -> None:
        """Make of states (C, E, S) at the ends of chunks, in place, those that enter them."""
        entered = None if entered is None else self._filled(entered)
        self._launch(
            "selective_pass", len(self.runs.bounds), states, self.sums, self.rate, self.spans, None, entered, None,
            None, blocks=-(-self.rate.numel() // _BLOCK), macros=_BACK[back],
        )  # fmt: skip

    def _pass_cut(
        self, states: Tensor, cut: list[tuple[int, int]], left: Tensor, moves: Tensor | None, back: bool
    ) -> None:
        """Write what leaves the runs of `cut`, from 0, and what decays states that enter, at the numbers of their
        pieces."""
        if not cut:
            return
        pairs = self.runs.numbers([number for pair in cut for number in pair])
        into = [None if x is None else self._filled(x) for x in (left, moves)]
        self._launch(
            "selective_pass", len(cut), states, self.sums, self.rate, self.spans, pairs, None, *into,
            blocks=-(-self.rate.numel() // _BLOCK), macros=_BACK[back],
        )  # fmt: skip
        for x, filled in zip((left, moves), into, strict=True):
            if x is not None and filled is not None:
                x.copy_(filled[..., : x.shape[-1]])

    def _launch(
        self, name: str, count: int, *args: Tensor | int | None, blocks: int = 0, block: int = _BLOCK,
        macros: cuda.Macros = (),
    ) -> None:  # fmt: skip
        """Launch a kernel on `count` chunks or runs, each in so many blocks; 0: one thread takes a channel."""
        device, channels = self.x.device, self.x.shape[1]
        blocks = blocks or -(-channels // block)
        shape = (cuda.DTYPES[self.x.dtype], "1"), ("STATES", str(self.places)), ("BLOCK", str(block))
        dt = (("DT_FP32", "1"),) if self.dt.dtype != self.x.dtype else ()
        values = (0 if x is None else x if isinstance(x, int) else x.data_ptr() for x in args)
        kernel = cuda.kernel(name, device, (*shape, *dt, *macros))
        cuda.launch(kernel, count * blocks, block, device, *values, channels, blocks)

    def _filled(self, x: Tensor) -> Tensor:
        """A copy (…, S) of (…, N), 0 at the places that are left over."""
        return F.pad(x, (0, self.places - x.shape[-1]))


_BACK: tuple[cuda.Macros, cuda.Macros] = (), (("BACK", "1"),)
