"""The route of rows inside one NVLink domain: what each rank writes into its peers' memory, and reads back.

The needed-only exchange without messages: a rank writes its rows straight into the expanded rows of all ranks that read
them, its own among them, and sums the gradients that it reads there afterwards. Where a rank's first or last entries
have all their keys side by side among its own rows, these are read *in place*: by the forward, and, where all entries
are such, by the backward, too. (Backwards in two parts cost more than the copies.)

    rank's entries       document 1 | document 2 | end of document 3
    its keys             in place   | in place   | expanded: written by peers, and by itself
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity
from cp_rewrite.planning.columns import PlaceRow, StageRow
from cp_rewrite.planning.devices import Device, Model
from cp_rewrite.planning.intervals import Int, expand_ranges, group_rows
from cp_rewrite.planning.schedule import Runs, Schedule, at_least
from cp_rewrite.planning.tiles import TILE

from .route import Arrays, PlanTensor, Route, filled

TENSORS = (
    PlanTensor("expanded", on_host=True),
    PlanTensor("sends"),
    PlanTensor("targets"),
    PlanTensor("ends", static=True),
    PlanTensor("copied", on_host=True),
    PlanTensor("partners", static=True),
    PlanTensor("capacity", on_host=True, static=True),
    PlanTensor("place", on_host=True, static=True),
    PlanTensor("holder_ptr"),
    PlanTensor("holders"),
    PlanTensor("stages", on_host=True, static=True),
    PlanTensor("rest_cu_seqlens_q"),
    PlanTensor("rest_cu_seqlens_k"),
)
_DEVICE, _MODEL = Device.named("h200"), Model()
_ROWS_PER_PAIR = _MODEL.tile_flops / TILE**2 / _DEVICE.forward / (_MODEL.kv_bytes / _DEVICE.link)
"""Rows that arrive while the kernel works on one pair of query and key. Only speed depends on it."""
_LAG = 2048
"""Rows that would arrive in the time that passes before the first ones do: 30 us."""
_WORTH = 1024
"""Rows that must arrive beside work, or be read in place: two launches cost more than one."""
_LOADED_BEYOND = 256
"""Rows past the last expanded one that a kernel may load with it: they must hold numbers."""


@dataclass(frozen=True)
class Cut:
    """Where a rank's entries fall in two parts, and which of them reads local rows in place.

    Args:
        keys: expanded rows before the cut; 0: there is one part.
        early: the part (0 or 1) that can begin first. awaited: rows of peers that it reads.
        source, count: the early part's keys (all, if there is one part) are local rows [source, source + count) in
            place; 0 of them: none are.
    """

    keys: int
    early: int
    awaited: int
    source: int = 0
    count: int = 0

    @property
    def whole(self) -> bool:
        """All keys are read in place, by the backward, too."""
        return self.keys == 0 < self.count


def push_route(schedule: Schedule, rank: int, *, cut: bool = True, filling: int = 0) -> Arrays:
    """The tables of one rank. R local rows, E expanded rows, N entries of launch 0; leading dims are at least 2.

    Args:
        cut: there may be two parts, and rows may be read in place; the same on all ranks.
        filling: rows after the expanded ones that hold some row of this rank, if it has any.
    Returns:
        sends (S,) int32, targets (S,) int64: local rows, and where they go, as reader << 32 | expanded row of the
            reader: own ones first, and of these such that are read in place; then those that peers need at once, then
            the others, peer after peer.
        ends (3,) int32: where each of these three ends; what follows is filling.
        expanded (E,), copied (E or 0,) int8: of no value; their lengths count. Nothing is copied where all keys are
            read in place.
        partners (2,) int32: bit p: rank p sends rows to this one; this one sends rows to rank p.
        capacity (1,) int64: `copied` of the rank that has most, the same on all ranks; 0: no rank copies any.
        place (3,) int64: a `PlaceRow`: which local rows are read in place.
        holder_ptr (R + 1,) int32, holders int64: the copied rows of all ranks that hold each local row, as
            reader << 32 | its expanded row, ascending.
        stages (5,) int64: a `StageRow`: where the kernel's work falls in two parts, of n entries and the rest. The
            early part reads what is read in place.
        rest_cu_seqlens_q, rest_cu_seqlens_k (N - n + 1,) int32: running sums over the rest, from 0.
    """
    cuts = [_cut(schedule, each, cut) for each in range(schedule.world_size)]
    copied = np.where([each.whole for each in cuts], 0, schedule.expanded)
    runs = schedule.runs.take(copied[schedule.runs.reader] > 0)
    runs = runs.take(runs.owner == rank)
    sends, targets, ends = _with_filling(
        rank, filling, int(copied[rank]), *_sends(runs, rank, cuts, schedule.world_size)
    )
    partners = [_bits(schedule.received[rank]), _bits(schedule.received[:, rank])]
    tables = schedule.attention(rank)
    mine = cuts[rank]
    stages = _stages(tables, mine)
    place = PlaceRow(mine.source, *((0, mine.count) if mine.whole else (mine.count, 0)))
    arrays = (
        np.zeros(max(2, int(schedule.expanded[rank])), dtype=np.int8),
        at_least(sends.astype(np.int32), 2, 0),
        at_least(targets, 2, 0),
        ends.astype(np.int32),
        np.zeros(max(2, int(copied[rank])), dtype=np.int8),
        np.array(partners, dtype=np.uint32).view(np.int32),
        np.array([max(2, int(copied.max())) if copied.any() else 0], dtype=np.int64),
        np.array(place, dtype=np.int64),
        *_holders(runs, schedule.local_rows),
        np.array(stages, dtype=np.int64),
        tables["cu_seqlens_q"][stages.entries :] - stages.queries,
        tables["cu_seqlens_k"][stages.entries :] - stages.keys,
    )
    return dict(zip((tensor.name for tensor in TENSORS), arrays, strict=True))


def fixed_push_route(schedule: Schedule, rank: int, capacity: Capacity) -> Arrays:
    """The same in the sizes of a capacity. Rows after the rank's expanded ones repeat some."""
    rows = capacity.rows
    filling = min(_LOADED_BEYOND, rows - int(schedule.expanded[rank]))
    # The host can't tell a captured step where to cut.
    route = push_route(schedule, rank, cut=False, filling=filling)
    most = schedule.world_size * rows
    return {
        **route,
        "sends": filled(route["sends"], most, 0),
        "targets": filled(route["targets"], most, 0),
        "expanded": np.zeros(rows, dtype=np.int8),
        "copied": np.zeros(rows, dtype=np.int8),
        "capacity": np.array([rows], dtype=np.int64),
        "holders": filled(route["holders"], most, 0),
        "rest_cu_seqlens_q": np.zeros(2, dtype=np.int32),
        "rest_cu_seqlens_k": np.zeros(2, dtype=np.int32),
    }


PUSH = Route(TENSORS, push_route, fixed_push_route)


def _cut(schedule: Schedule, rank: int, allowed: bool) -> Cut:
    """The cut before or after the entries that can read in place; where these are few, the one between two pieces that
    lets most rows arrive beside work, as many as the early part has work for."""
    mine = slice(*schedule.piece_bounds[rank : rank + 2])
    runs = schedule.runs.take(schedule.runs.reader == rank)
    coming = runs.take(runs.owner != rank)
    total = int(coming.length.sum())
    if not allowed or schedule.launch[mine].any():
        return Cut(0, 0, total if allowed else 1)
    expanded = int(schedule.expanded[rank])
    source, count, early = max(_in_place(runs, rank), key=lambda block: block[1])
    if count == expanded > 0:
        return Cut(0, 0, 0, source, count)
    if total and count >= _WORTH:
        return Cut(expanded - count if early else count, early, 0, source, count)
    pieces = schedule.pieces.take(mine)
    if len(pieces) < 2:
        return Cut(0, 0, total)
    queries, keys = pieces.q1 - pieces.q0, pieces.key1 - pieces.key0
    # With 1, 2, … pieces before the cut: work there, and rows of peers that they read.
    work = np.cumsum(queries * keys - queries**2 / 2) * _ROWS_PER_PAIR
    before, after = work[:-1] - _LAG, work[-1] - work[:-1] - _LAG
    read = np.bincount(coming.piece - mine.start, coming.length, len(pieces)).cumsum()[:-1]
    beside = np.stack([np.minimum(before, total - read), np.minimum(after, read)])
    early, piece = divmod(int(beside.argmax()), len(pieces) - 1)
    if beside[early, piece] < _WORTH:
        return Cut(0, 0, total)
    return Cut(int(keys[: piece + 1].sum()), early, int(total - read[piece] if early else read[piece]))


def _in_place(runs: Runs, rank: int) -> list[tuple[int, int, int]]:
    """(source, count, 0 or 1): the most expanded rows at the beginning and at the end, of whole pieces, that are local
    rows [source, source + count). `runs` are those that the rank reads."""
    if not len(runs.row):
        return [(0, 0, 0)]
    own = runs.owner == rank
    follows = own[1:] & own[:-1] & (runs.source[1:] == (runs.source + runs.length)[:-1])
    bounds = np.flatnonzero(np.diff(runs.piece, prepend=-1, append=-1))  # before the first run of each piece; the end
    head = _leading(follows) if own[0] else 0
    tail = _leading(follows[::-1]) if own[-1] else 0
    stop = int(bounds[bounds <= head].max())
    start = int(bounds[bounds >= len(own) - tail].min())
    count = int(runs.length[start:].sum())
    blocks = [(int(runs.source[0]), int(runs.length[:stop].sum()), 0)]
    return blocks + ([(int(runs.source[start]), count, 1)] if count else [])


def _leading(follows: NDArray[np.bool_]) -> int:
    """Runs that lie side by side, from the first one on; `follows` tells whether the next one does."""
    return 1 + int(np.append(follows, False).argmin())


def _stages(tables: Arrays, cut: Cut) -> StageRow[int]:
    n = int(np.searchsorted(tables["cu_seqlens_k"], cut.keys))
    return StageRow(n, int(tables["cu_seqlens_q"][n]), cut.keys, cut.early, cut.awaited)


def _sends(runs: Runs, rank: int, cuts: list[Cut], world_size: int) -> tuple[Int, Int, Int]:
    """(local rows, targets, ends) of `push_route`. Every rank begins with another peer, so that none is written to by
    all at once."""
    columns = [(cut.keys, cut.early, cut.count) for cut in cuts]
    keys, early, count = np.array(columns, dtype=np.int64)[runs.reader].T
    in_early = (keys == 0) | ((runs.row >= keys) == early)
    # Where the early part reads in place, nothing is needed at once.
    stage = np.where(runs.reader == rank, 0, np.where(in_early & (count == 0), 1, 2))
    order = np.lexsort(((runs.reader - rank) % world_size, ~in_early, stage))
    runs, stage = runs.take(order), stage[order]
    ends = np.cumsum(np.bincount(stage, runs.length, 3)).astype(np.int64)
    targets = expand_ranges((runs.reader << 32) + runs.row, runs.length)
    return expand_ranges(runs.source, runs.length), targets, ends


def _with_filling(rank: int, filling: int, used: int, sends: Int, targets: Int, ends: Int) -> tuple[Int, Int, Int]:
    """The same with own rows that fill `filling` of this rank's rows after the first `used`, if it has own ones."""
    own = int(ends[0])
    more = filling if own else 0
    rows, into = np.resize(sends[:own], more), (rank << 32) + used + np.arange(more)
    return np.insert(sends, own, rows), np.insert(targets, own, into), ends + more


def _holders(runs: Runs, rows: int) -> tuple[NDArray[np.int32], Int]:
    """(holder_ptr, holders) of `push_route`, of the runs of one owner."""
    holders = expand_ranges((runs.reader << 32) + runs.row, runs.length)
    ptr, members = group_rows(expand_ranges(runs.source, runs.length), rows)
    return ptr.astype(np.int32), at_least(holders[members], 2, 0)


def _bits(rows: Int) -> int:
    """A bit for each rank that has rows."""
    return int((1 << np.flatnonzero(rows)).sum())
