"""The launches of a batch: how often a variable-length kernel is called, and over what.

Such a kernel takes running sums of query and key lengths and one window per launch. Launch 0 is the one of
`Tables.cu_seqlens_*`. Pieces that need another window (documents' ends under a two-sided window) run in launches of
their own over gathered query rows; their keys lie side by side already.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.kernels.inputs import Tables
from cp_rewrite.planning.columns import PieceRow
from cp_rewrite.planning.intervals import Int

from .overlap import BackwardOverlap

_SHORTEST = 256
"""`max_q` and `max_k` are at least this: FA4 compiles further variants for shorter ones, which gain nothing here."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of the kernel.

    Args:
        cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on the device.
        rows: int64 on the device, the local rows this launch gathers; None: rows [0, stop) as they are.
        stop: query rows that the kernel sees.
        keys: (k0, k1): it sees the expanded rows [k0, k1).
        window: (left, right), bottom-right aligned; None: no limit.
        max_q, max_k: the longest entry of each side.
        gaps: some rows in [0, stop) belong to no piece of this launch.
        dirty: some of these belong to no piece of any launch, so they may hold NaN.
        overlap: what a backward calls between its steps, for kernels that overlap with an exchange.
        kept: what was found out about this launch by one layer, for the others.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    rows: Tensor | None
    stop: int
    keys: tuple[int, int]
    window: tuple[int | None, int | None]
    max_q: int
    max_k: int
    gaps: bool = False
    dirty: bool = False
    overlap: BackwardOverlap | None = None
    kept: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def causal(self) -> bool:
        return self.window == (None, 0)


_launches = WeakTensorKeyDictionary()


def launches_of(tables: Tables, rows: int) -> tuple[Launch, ...]:
    """The launches of a batch, number 0 first; made once per batch, on the host, and kept as long as its pieces."""
    pieces = tables.pieces
    # The version counts writes: tables that are refilled in place hold another batch.
    version = 0 if pieces.is_inference() else pieces._version
    known = _launches.get(pieces)
    if known is None or known[0] is not tables.cu_seqlens_q or known[1] != version:
        known = _launches[pieces] = (tables.cu_seqlens_q, version, _make_launches(tables, rows))
    return known[2]


def _make_launches(tables: Tables, rows: int) -> tuple[Launch, ...]:
    if tables.sizes_are_bounds:
        return (_fixed_launch(tables, rows),)
    pieces = PieceRow(*tables.pieces.numpy().T)
    pieces = pieces.take((pieces.q1 > pieces.q0) & (pieces.k1 > pieces.k0))
    found = [_main_launch(tables, pieces, rows)]
    for number in np.unique(pieces.launch):
        if number:
            found.append(_gathered_launch(pieces.take(pieces.launch == number), tables.cu_seqlens_q.device))
    return tuple(found)


def _fixed_launch(tables: Tables, rows: int) -> Launch:
    """One launch over all rows that serves every batch of a capacity; some rows may belong to no piece."""
    first = tables.first_launch
    cu_seqlens, keys = (tables.cu_seqlens_q, tables.cu_seqlens_k), (0, sys.maxsize)
    window = _window(first.left, first.right)
    return Launch(*cu_seqlens, None, rows, keys, window, first.max_q, first.max_k, True, True)


def _main_launch(tables: Tables, all_pieces: PieceRow[Int], rows: int) -> Launch:
    """Launch 0.

    local rows    a a a b b b c c . .      a, b, c: pieces; . : no document's
    all pieces of launch 0                 stop = 8, no gaps: the rows at the end are left out
    b of another launch                    stop = 10, gaps: b and the end are entries without keys
    """
    pieces = all_pieces.take(all_pieces.launch == 0)
    covered, stop = _covered(pieces)
    gaps, dirty = stop != covered, False
    cu_q, cu_k = tables.cu_seqlens_q, tables.cu_seqlens_k
    if gaps:
        dirty, stop = _covered(all_pieces)[0] != rows, rows
    elif stop < rows:
        # Only the last rows are not in this launch: the entries before them are the pieces.
        cu_q, cu_k = cu_q[: len(pieces.q0) + 1], cu_k[: len(pieces.q0) + 1]
    first = tables.first_launch
    keys = (0, int(pieces.k1.max(initial=0)))
    sizes = max(first.max_q, _SHORTEST), max(first.max_k, _SHORTEST)
    return Launch(cu_q, cu_k, None, stop, keys, _window(first.left, first.right), *sizes, gaps, dirty)


def _covered(pieces: PieceRow[Int]) -> tuple[int, int]:
    """(query rows in pieces, one past the last of them)."""
    return int((pieces.q1 - pieces.q0).sum()), int(pieces.q1.max(initial=0))


def _gathered_launch(pieces: PieceRow[Int], device: torch.device) -> Launch:
    """A launch of a number above 0, over the query rows of its pieces put behind one another."""
    q_lengths, k_lengths = pieces.q1 - pieces.q0, pieces.k1 - pieces.k0
    start = np.cumsum(q_lengths) - q_lengths  # of each piece among the gathered rows
    rows = np.repeat(pieces.q0 - start, q_lengths) + np.arange(int(q_lengths.sum()))
    if (pieces.k0[1:] != pieces.k1[:-1]).any():
        raise ValueError("the keys of one launch must lie side by side in the expanded rows")
    return Launch(
        _running_sum(q_lengths, device),
        _running_sum(k_lengths, device),
        torch.from_numpy(rows).to(device, non_blocking=True),
        len(rows),
        (int(pieces.k0[0]), int(pieces.k1[-1])),
        _window(int(pieces.left[0]), int(pieces.right[0])),
        max(int(q_lengths.max()), _SHORTEST),
        max(int(k_lengths.max()), _SHORTEST),
    )


def _running_sum(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(total).to(device, non_blocking=True)


def _window(left: int, right: int) -> tuple[int | None, int | None]:
    return (None if left < 0 else left), (None if right < 0 else right)
