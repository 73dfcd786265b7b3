"""Where a push cuts a rank's entries in two parts, so that rows arrive while the kernel works, and which keys are read
in place.

    entries of a rank     document 1 | document 2 | end of document 3
    their keys            own rows, side by side  | own rows and peers'
    cut                                           ^ the early part is in place, the late one's rows arrive beside it

Keys are read in place where they lie side by side in the rank's own rows, and their gradients written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.planning.cost.constants import PUSH_CUT_ROWS, PUSH_LAG, TILE
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.pieces import Pieces
from cp_rewrite.planning.schedule import Runs, Schedule

_DEVICE, _MODEL = Device.named("h200"), Model()
_ROWS_PER_PAIR = _MODEL.tile_flops / TILE**2 / _DEVICE.forward / (_MODEL.kv_bytes / _DEVICE.link)
"""Rows that arrive while the kernel works on one pair of a query and a key. Only speed depends on it."""


@dataclass(frozen=True)
class PushCut:
    """Args:
    keys: expanded rows before the cut; 0: there is one part.
    early: the part (0 or 1) that can begin first. awaited: how many rows of peers it reads.
    source, count: local rows [source, source + count) are read in place: they are the early part's keys, or all keys
        where there is one part. count = 0: none are.
    """

    keys: int
    early: int
    awaited: int
    source: int = 0
    count: int = 0

    @property
    def whole(self) -> bool:
        """All keys are read in place, by the backward too."""
        return self.keys == 0 < self.count


def choose_cut(schedule: Schedule, rank: int) -> PushCut:
    """The cut before or after the entries whose keys are read in place, or, where these are few, between two pieces."""
    mine = slice(*schedule.piece_bounds[rank : rank + 2])
    runs = schedule.runs.take(schedule.runs.reader == rank)
    coming = runs.take(runs.owner != rank)
    total = int(coming.length.sum())
    if schedule.launch[mine].any():
        return PushCut(0, 0, total)
    expanded = int(schedule.expanded[rank])
    source, count, early = max(_in_place(runs, rank), key=lambda block: block[1])
    if count == expanded > 0:
        return PushCut(0, 0, 0, source, count)
    if total and count >= PUSH_CUT_ROWS:
        return PushCut(expanded - count if early else count, early, 0, source, count)
    pieces = schedule.pieces.take(mine)
    if len(pieces) < 2:
        return PushCut(0, 0, total)
    return _between_pieces(pieces, np.bincount(coming.piece - mine.start, coming.length, len(pieces)))


def _between_pieces(pieces: Pieces, coming: NDArray[Any]) -> PushCut:
    """The cut between two of a rank's pieces that lets most rows arrive beside work: as many as the late part waits
    for, and the early part has work for. `coming`: rows of peers that each piece reads."""
    total = int(coming.sum())
    queries, keys = pieces.q1 - pieces.q0, pieces.keys
    # With 1, 2, … pieces before the cut: rows that work before and after it gives time for, and rows read before it.
    work = np.cumsum(queries * keys - queries**2 / 2) * _ROWS_PER_PAIR
    before, after = work[:-1] - PUSH_LAG, work[-1] - work[:-1] - PUSH_LAG
    read = coming.cumsum()[:-1]
    beside = np.stack([np.minimum(before, total - read), np.minimum(after, read)])  # by early part
    early, piece = divmod(int(beside.argmax()), len(pieces) - 1)
    if beside[early, piece] < PUSH_CUT_ROWS:
        return PushCut(0, 0, total)
    return PushCut(int(keys[: piece + 1].sum()), early, int(total - read[piece] if early else read[piece]))


def _in_place(runs: Runs, rank: int) -> list[tuple[int, int, int]]:
    """(source, count, part) of the first and of the last pieces' keys, as many as are local rows [source, source +
    count) of the rank. `runs` are those that it reads."""
    if not len(runs.row):
        return [(0, 0, 0)]
    own = runs.owner == rank
    follows = own[1:] & own[:-1] & (runs.source[1:] == (runs.source + runs.length)[:-1])
    bounds = np.flatnonzero(np.diff(runs.piece, prepend=-1, append=-1))  # before the first run of each piece; the end
    head = _leading(follows) if own[0] else 0
    tail = _leading(follows[::-1]) if own[-1] else 0
    stop = int(bounds[bounds <= head].max())  # whole pieces only
    start = int(bounds[bounds >= len(own) - tail].min())
    count = int(runs.length[start:].sum())
    blocks = [(int(runs.source[0]), int(runs.length[:stop].sum()), 0)]
    return blocks + ([(int(runs.source[start]), count, 1)] if count else [])


def _leading(follows: NDArray[np.bool_]) -> int:
    """How many runs lie side by side, from the first one on; `follows` says of each but the first whether it follows
    the one before."""
    return 1 + int(np.append(follows, False).argmin())
