"""Packed sequences as kernels of fla take them: all rows, run after run, see `planning/token_reads/states.py`.

Shapes: R rows, E runs, C chunks, N cut pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Rows of a chunk: `chunk_size` of fla."""
_FEW = 4
"""Runs that are passed through one by one."""


@dataclass(frozen=True)
class Runs:
    """The runs of R rows.

    Args:
        offsets: (E + 1,) int32. chunks: (C, 2) int32, run of each chunk and its number in the run.
        entered, left: (run, cut piece) of runs whose pieces are cut at their start, and at their end.
        bounds: (first row, row behind the last) of each run. gaps: of those that are no piece, none empty.
        states: (E,) int32, the cut piece of each run, N for none.
        spans: the first chunk of each run, and C.
    """

    offsets: Tensor
    chunks: Tensor
    entered: list[tuple[int, int]]
    left: list[tuple[int, int]]
    bounds: list[tuple[int, int]]
    gaps: list[tuple[int, int]]
    states: Tensor
    spans: list[int]

    @staticmethod
    def of_tables(runs: Tensor, offsets: Tensor, chunks: Tensor, states: Tensor) -> Runs:
        """Runs by the tables of a plan. runs: on the host."""
        table: list[list[int]] = runs.tolist()
        bounds = [(first, stop) for first, stop, *_ in table]
        spans = [0, *accumulate(-(-(stop - first) // CHUNK) for first, stop in bounds)]
        entered, left = ([(i, row[at]) for i, row in enumerate(table) if row[at] >= 0] for at in (2, 3))
        gaps = [(first, stop) for first, stop, piece, _ in table if piece == -2 and first < stop]
        return Runs(offsets, chunks[: spans[-1]], entered, left, bounds, gaps, states, spans)

    @property
    def cut_at_ends(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """`left`, in two: of sequences' first pieces, and of those that a state enters too."""
        entered = {run for run, _ in self.entered}
        first, middle = ([item for item in self.left if (item[0] in entered) is late] for late in (False, True))
        return first, middle

    @property
    def packed(self) -> dict[str, Any]:
        """Arguments of nearly all functions of fla."""
        return self.solved | {"chunk_size": CHUNK}

    @property
    def solved(self) -> dict[str, Any]:
        """Arguments of functions that see the size of chunks in what was solved in them."""
        return {"cu_seqlens": self.offsets, "chunk_indices": self.chunks}

    def alone(self, run: int) -> dict[str, Any]:
        """`packed` of one run, and where its first chunk is among its own."""
        first, stop = self.span(run)
        none = self.offsets.new_zeros(2)
        return {
            "cu_seqlens": self.offsets[run : run + 2], "chunk_indices": self.chunks[first:stop], "chunk_offsets": none,
            "chunk_size": CHUNK,
        }  # fmt: skip

    def apart(self, runs: Sequence[int]) -> Tensor:
        """Offsets by which every other sequence is one of `runs`, given in ascending order: the last comes first, so
        that those between end before they start, and are of no length."""
        return self.numbers([bound for run in reversed(runs) for bound in self.bounds[run]])

    def numbers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """The values on the device of the rows, int32, without waiting for it."""
        cuda = self.offsets.is_cuda
        return torch.tensor(values, dtype=torch.int32, pin_memory=cuda).to(self.offsets.device, non_blocking=True)

    def span(self, run: int) -> tuple[int, int]:
        """The first chunk of a run, and the one behind its last."""
        return self.spans[run], self.spans[run + 1]

    def all_at_once(self, cut: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
        """Whether a pass over all runs tells sooner what `cut` ones do than passes over these: they are many; or they
        are most of the rows, and it is the only pass, since no state enters or leaves `others`."""
        rows = sum(self.bounds[run][1] - self.bounds[run][0] for run, _ in cut)
        return len(cut) > _FEW or (not others and 2 * rows > self.bounds[-1][1])

    def states_of(self, cut: Tensor, which: list[tuple[int, int]]) -> Tensor | None:
        """(E, *state) of all runs, of those (N, *state) of cut pieces; None where all are 0."""
        if not which:
            return None
        return torch.cat([cut, cut.new_zeros(1, *cut.shape[1:])]).index_select(0, self.states)

    def clean(self, x: Tensor) -> Tensor:
        """x (1, R, …) with 0 in rows of no piece."""
        return self.without_gaps(x.clone()) if self.gaps else x

    def without_gaps(self, x: Tensor) -> Tensor:
        """x (1, R, …), in place, 0 in rows of no piece."""
        for start, stop in self.gaps:
            x[:, start:stop] = 0
        return x
