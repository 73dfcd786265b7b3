"""The route of rows inside one NVLink domain: what each rank writes into its peers' memory, and reads back.

The needed-only exchange without messages: a rank writes its rows straight into the expanded rows of all ranks that read
them, its own among them, and sums the gradients that it reads there afterwards.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .cost import Device, Model
from .intervals import Int, expand_ranges
from .schedule import Runs, Schedule, at_least
from .tiles import TILE

NAMES = (
    "sends", "targets", "ends", "expanded", "partners", "capacity", "holder_ptr", "holders", "stages",
    "rest_cu_seqlens_q", "rest_cu_seqlens_k",
)  # fmt: skip
"""Names of the route's tensors, in the order in which ops take them. `expanded`, `capacity` and `stages` stay on the
host."""

_DEVICE, _MODEL = Device.named("h200"), Model()
_ROWS_PER_PAIR = _MODEL.tile_flops / TILE**2 / _DEVICE.forward / (_MODEL.kv_bytes / _DEVICE.link)
"""Rows that arrive while the kernel works on one pair of query and key. Only speed depends on it."""
_LAG = 2048
"""Rows that would arrive in the time that passes before the first ones do: 30 us."""
_WORTH = 1024
"""Rows that must arrive beside work, or all come first: two launches cost more than one."""


def push_route(schedule: Schedule, rank: int, *, cut: bool = True, filling: int = 0) -> dict[str, NDArray[np.integer]]:
    """The tables of one rank. R local rows, E expanded rows, N entries of launch 0; leading dims are at least 2.

    Args:
        cut: some rows may come beside work of the forward; the same on all ranks.
        filling: rows after the expanded ones that hold some row of this rank, if it has any.
    Returns:
        sends (S,) int32, targets (S,) int64: local rows, and where they go, as reader << 32 | expanded row of the
            reader: own expanded rows first, then those that peers need at once, then the others, peer after peer.
        ends (3,) int32: where each of these three ends; what follows is filling.
        expanded (E,) int8: of no value; its length counts.
        partners (2,) int32: bit p: rank p sends rows to this one; this one sends rows to rank p.
        capacity (1,) int64: E of the rank that has most, the same on all ranks.
        holder_ptr (R + 1,) int32, holders int64: `Schedule.route("push")`; who contributes to each row's gradient.
        stages (5,) int64: n, rows, keys, early, awaited: the kernel runs over the first n entries, with their query
            rows and expanded rows, and over the rest: over part `early` (0 or 1) while the other one's rows arrive.
            n = 0: there is one part. awaited: rows of peers that must come first.
        rest_cu_seqlens_q, rest_cu_seqlens_k (N - n + 1,) int32: running sums over the rest, from 0.
    """
    cuts = np.array([_cut(schedule, each, cut) for each in range(schedule.world_size)], dtype=np.int64)
    runs = schedule.runs.take(schedule.runs.owner == rank)
    sends, targets, ends = _sends(runs, rank, cuts, schedule.world_size)
    used = int(schedule.expanded[rank])
    more = filling if ends[0] else 0
    sends = np.concatenate([sends[: ends[0]], np.resize(sends[: ends[0]], more), sends[ends[0] :]])
    own = (rank << 32) + used + np.arange(more)
    targets = np.concatenate([targets[: ends[0]], own, targets[ends[0] :]])
    partners = [_bits(schedule.received[rank]), _bits(schedule.received[:, rank])]
    tables = schedule.attention(rank)
    stages = _stages(tables, *cuts[rank])
    n, queries, keys = stages[:3].tolist()
    arrays = (
        at_least(sends.astype(np.int32), 2, 0),
        at_least(targets, 2, 0),
        (ends + more).astype(np.int32),
        np.zeros(max(2, used), dtype=np.int8),
        np.array(partners, dtype=np.uint32).view(np.int32),
        np.array([max(2, int(schedule.expanded.max(initial=0)))], dtype=np.int64),
        *schedule.route("push", rank).values(),
        stages,
        tables["cu_seqlens_q"][n:] - queries,
        tables["cu_seqlens_k"][n:] - keys,
    )
    return dict(zip(NAMES, arrays, strict=True))


def _cut(schedule: Schedule, rank: int, allowed: bool) -> tuple[int, int, int]:
    """(expanded rows before the cut, early part, rows of peers that it reads): the cut between two pieces that lets
    most rows arrive beside work, as many as the early part has work for. 0 rows before it: there is none."""
    mine = slice(*schedule.piece_bounds[rank : rank + 2])
    coming = schedule.runs.take((schedule.runs.reader == rank) & (schedule.runs.owner != rank))
    total = int(coming.length.sum())
    pieces = schedule.pieces.take(mine)
    if not allowed or len(pieces) < 2 or schedule.launch[mine].any():
        return 0, 0, total if allowed else 1
    queries, keys = pieces.q1 - pieces.q0, pieces.key1 - pieces.key0
    # With 1, 2, … pieces before the cut: work there, and rows of peers that they read.
    work = np.cumsum(queries * keys - queries**2 / 2) * _ROWS_PER_PAIR
    before, after = work[:-1] - _LAG, work[-1] - work[:-1] - _LAG
    read = np.bincount(coming.piece - mine.start, coming.length, len(pieces)).cumsum()[:-1]
    beside = np.stack([np.minimum(before, total - read), np.minimum(after, read)])
    early, piece = divmod(int(beside.argmax()), len(pieces) - 1)
    if beside[early, piece] < _WORTH:
        return 0, 0, total
    return int(keys[: piece + 1].sum()), early, int(total - read[piece] if early else read[piece])


def _stages(tables: dict[str, NDArray[np.integer]], keys: int, early: int, awaited: int) -> Int:
    """`stages` of `push_route`, of a cut after `keys` expanded rows."""
    n = int(np.searchsorted(tables["cu_seqlens_k"], keys))
    return np.array([n, tables["cu_seqlens_q"][n], keys, early, awaited], dtype=np.int64)


def _sends(runs: Runs, rank: int, cuts: Int, world_size: int) -> tuple[Int, Int, Int]:
    """(local rows, targets, ends) of `push_route`. Every rank begins with another peer, so that none is written to by
    all at once."""
    keys, early, _ = cuts[runs.reader].T
    at_once = (keys == 0) | ((runs.row >= keys) == early)
    stage = np.where(runs.reader == rank, 0, np.where(at_once, 1, 2))
    order = np.lexsort(((runs.reader - rank) % world_size, stage))
    runs, stage = runs.take(order), stage[order]
    ends = np.cumsum(np.bincount(stage, runs.length, 3)).astype(np.int64)
    targets = expand_ranges((runs.reader << 32) + runs.row, runs.length)
    return expand_ranges(runs.source, runs.length), targets, ends


def _bits(rows: Int) -> int:
    """A bit for each rank that has rows."""
    return int((1 << np.flatnonzero(rows)).sum())
