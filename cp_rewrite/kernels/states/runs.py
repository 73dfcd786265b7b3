"""Packed sequences as kernels of fla take them: all rows, run after run, see `planning/token_reads/runs.py`.

Shapes: R rows, E runs, C chunks, N cut pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Rows of a chunk: `chunk_size` of fla."""


@dataclass(frozen=True)
class Runs:
    """The runs of R rows.

    Args:
        offsets: (E + 1,) int32. chunks: (C, 2) int32, run of each chunk and its number in the run.
        entered, left: (run, cut piece) of runs whose pieces are cut at their start, and at their end.
        bounds: (first row, row behind the last) of each run. gaps: of those that are no piece, none empty.
        states: (E,) int32, the cut piece of each run, N for none.
    """

    offsets: Tensor
    chunks: Tensor
    entered: list[tuple[int, int]]
    left: list[tuple[int, int]]
    bounds: list[tuple[int, int]]
    gaps: list[tuple[int, int]]
    states: Tensor

    @staticmethod
    def of_tables(runs: Tensor, offsets: Tensor, chunks: Tensor, states: Tensor) -> Runs:
        """Of the tables of a plan. runs: on the host."""
        table: list[list[int]] = runs.tolist()
        bounds = [(first, stop) for first, stop, *_ in table]
        count = sum(-(-(stop - first) // CHUNK) for first, stop in bounds)
        entered, left = ([(i, row[at]) for i, row in enumerate(table) if row[at] >= 0] for at in (2, 3))
        gaps = [(first, stop) for first, stop, piece, _ in table if piece == -2 and first < stop]
        return Runs(offsets, chunks[:count], entered, left, bounds, gaps, states)

    @property
    def packed(self) -> dict[str, Any]:
        """Arguments of nearly all functions of fla."""
        return {"cu_seqlens": self.offsets, "chunk_indices": self.chunks, "chunk_size": CHUNK}

    def alone(self, run: int) -> Tensor:
        """Offsets of one run."""
        return self.offsets[run : run + 2]

    def states_of(self, cut: Tensor, which: list[tuple[int, int]]) -> Tensor | None:
        """(E, *state) of all runs, of those (N, *state) of cut pieces; None where all are 0."""
        if not which:
            return None
        return torch.cat([cut, cut.new_zeros(1, *cut.shape[1:])]).index_select(0, self.states)

    def without_gaps(self, x: Tensor) -> Tensor:
        """x (1, R, …), in place, 0 in rows of no piece."""
        for start, stop in self.gaps:
            x[:, start:stop] = 0
        return x
