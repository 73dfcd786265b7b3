"""The route of `push`: what `needed` moves, without messages, inside one NVLink domain.

A rank writes its rows straight into the expanded rows of all ranks that read them, its own among them; afterwards it
reads the gradients there, and sums them. `push_cut.py` says which keys are read in place instead.

    written in this order     own rows   | rows that early parts await | other rows
    by                        the reader | peers                       | peers
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity
from cp_rewrite.planning.columns import PlaceRow, StageRow
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load
from cp_rewrite.planning.cost.tiles import window_tiles
from cp_rewrite.planning.intervals import Int, expand_ranges, group_rows
from cp_rewrite.planning.plan_input import PlanTensor
from cp_rewrite.planning.schedule import Runs, Schedule, at_least

from .push_cut import PushCut, choose_cut
from .push_stages import (
    Shape,
    StageLoad,
    backward_seconds,
    backward_stages,
    forward_seconds,
    forward_stages,
)
from .route import Arrays, Cost, Route, filled, row_index

_LOADED_BEYOND = 256
"""A kernel loads whole tiles: up to so many rows after the last expanded one must hold numbers, not NaN."""


def push_route(schedule: Schedule, rank: int, *, cut: bool = True, filling: int = 0) -> Arrays:
    """The tables of one rank. R local rows, E expanded rows, N entries of launch 0; leading dims are at least 2.

    Args:
        cut: there may be two parts, and rows may be read in place; the same on all ranks.
        filling: so many rows after the expanded ones hold rows of this rank, if it has any.
    Returns:
        expanded (E,), copied (E or 0,) int8: dummies whose shapes carry E. Nothing is copied where all keys are read in
            place.
        sends (S,) int32, targets (S,) int64: local rows, and where they go: reader << 32 | expanded row of the reader.
            First those that stay on this rank, beginning with those that are read in place too; then those that a
            peer's early part awaits; then the others, peer after peer.
        ends (3,) int32: where each of these three ends; what follows only fills the tables up.
        partners (2,) int32, a bit per rank: those that send rows to this one; those that this one sends rows to.
        capacity (1,) int64: `copied` of the rank that has most, the same on all ranks; 0: no rank copies any.
        place (3,) int64: a `PlaceRow`: which local rows are read in place.
        holder_ptr (R + 1,) int32, holders int64: where copies of each local row are, on all ranks: reader << 32 |
            expanded row of the reader, ascending.
        stages (5,) int64: a `StageRow`: the kernel's work in two parts, of n entries and of the rest.
        rest_cu_seqlens_q, rest_cu_seqlens_k (N - n + 1,) int32: running sums over the rest, from 0.
        loads (P, 6) int64: a `StageLoad` of each rank, by which heads travel in stages. All 0: in
            one, for the host does not know, or some pieces run in launches of their own.
    """
    ranks = range(schedule.world_size)
    # A captured step always waits: in another batch rows of peers may come.
    cuts = [choose_cut(schedule, each) if cut else PushCut(0, 0, awaited=1) for each in ranks]
    mine, tables = cuts[rank], schedule.attention(rank)
    copied = np.where([each.whole for each in cuts], 0, schedule.expanded)
    runs = schedule.runs.take(copied[schedule.runs.reader] > 0)
    runs = runs.take(runs.owner == rank)
    lists = _with_filling(rank, filling, int(copied[rank]), *_sends(runs, rank, cuts, schedule.world_size))
    sends, targets, ends = lists
    partners = [_bits(schedule.received[rank]), _bits(schedule.received[:, rank])]
    place = PlaceRow(mine.source, *((0, mine.count) if mine.whole else (mine.count, 0)))
    holder_ptr, holders = _holders(runs, schedule.local_rows)
    stages = _stages(tables, mine)
    return {
        "expanded": np.zeros(max(2, int(schedule.expanded[rank])), dtype=np.int8),
        "sends": row_index(sends),
        "targets": at_least(targets, 2, 0),
        "ends": ends.astype(np.int32),
        "copied": np.zeros(max(2, int(copied[rank])), dtype=np.int8),
        "partners": np.array(partners, dtype=np.uint32).view(np.int32),
        "capacity": np.array([max(2, int(copied.max())) if copied.any() else 0], dtype=np.int64),
        "place": np.array(place, dtype=np.int64),
        "holder_ptr": holder_ptr,
        "holders": holders,
        "stages": np.array(stages, dtype=np.int64),
        "rest_cu_seqlens_q": tables["cu_seqlens_q"][stages.entries :] - stages.queries,
        "rest_cu_seqlens_k": tables["cu_seqlens_k"][stages.entries :] - stages.keys,
        "loads": _loads(schedule, cuts) * (cut and not schedule.launch.any()),
    }


def fixed_push_route(schedule: Schedule, rank: int, capacity: Capacity) -> Arrays:
    """The same in the sizes of a capacity. Rows after the rank's expanded ones repeat own ones."""
    rows = capacity.rows
    filling = min(_LOADED_BEYOND, rows - int(schedule.expanded[rank]))
    # A captured step replays on batches whose cuts the host can't tell it.
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


def push_seconds(load: Load, device: Device, model: Model, _: int) -> float:
    """`push`: rows travel beside the kernel, which waits for all of them or runs in stages of heads."""
    shape = Shape(*model.heads, model.head_dim, model.head_dim, model.item_bytes)
    coming = load.received.sum(1)
    columns = zip(load.tiles.tolist(), coming.tolist(), (load.expanded - coming).tolist(), strict=True)
    loads = tuple(StageLoad(0, round(tiles), 0, rows, own, 0) for tiles, rows, own in columns)
    there, back = forward_stages(loads, shape), backward_stages(loads, shape, kept=False)
    forward = max(forward_seconds(each, shape, there, device) for each in loads)
    return forward + max(backward_seconds(each, shape, back, False, device) for each in loads)


PUSH = Route(
    (
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
        PlanTensor("loads", on_host=True, static=True),
    ),
    push_route,
    fixed_push_route,
    cost=Cost(push_seconds, in_one_node=True),
)


def _stages(tables: Arrays, cut: PushCut) -> StageRow[int]:
    n = int(np.searchsorted(tables["cu_seqlens_k"], cut.keys))
    return StageRow(n, int(tables["cu_seqlens_q"][n]), cut.keys, cut.early, cut.awaited)


def _loads(schedule: Schedule, cuts: list[PushCut]) -> Int:
    """`loads` of `push_route`."""
    pieces, runs = schedule.pieces, schedule.runs
    tiles = window_tiles(pieces.q1 - pieces.q0, pieces.key1 - pieces.key0, pieces.left, pieces.right)
    coming = np.bincount(runs.reader, np.where(runs.owner == runs.reader, 0, runs.length), schedule.world_size)
    found: list[StageLoad] = []
    for rank, cut in enumerate(cuts):
        mine = slice(*schedule.piece_bounds[rank : rank + 2])
        before = np.cumsum((pieces.key1 - pieces.key0)[mine]) <= cut.keys
        first, second = float(tiles[mine][before].sum()), float(tiles[mine][~before].sum())
        rows = int(coming[rank])
        own = 0 if cut.whole else int(schedule.expanded[rank]) - rows
        if cut.keys == 0:
            found.append(StageLoad(0, round(second), 0, rows, own, 0))
        else:
            early, late = (second, first) if cut.early else (first, second)
            found.append(StageLoad(round(early), round(late), cut.awaited, rows, own, cut.count))
    return np.array(found, dtype=np.int64)


def _sends(runs: Runs, rank: int, cuts: list[PushCut], world_size: int) -> tuple[Int, Int, Int]:
    """(local rows, targets, ends) of `push_route`. Every rank begins with the peer after it: at no time do all ranks
    write to one."""
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
    """The same, and own rows go to this rank's expanded rows [used, used + filling) too, if there are own ones."""
    own = int(ends[0])
    more = filling if own else 0
    rows, into = np.resize(sends[:own], more), (rank << 32) + used + np.arange(more)
    return np.insert(sends, own, rows), np.insert(targets, own, into), ends + more


def _holders(runs: Runs, rows: int) -> tuple[NDArray[np.int32], Int]:
    """(holder_ptr, holders) of `push_route`, from the runs that one rank owns."""
    holders = expand_ranges((runs.reader << 32) + runs.row, runs.length)
    ptr, members = group_rows(expand_ranges(runs.source, runs.length), rows)
    return ptr.astype(np.int32), at_least(holders[members], 2, 0)


def _bits(rows: Int) -> int:
    """A number with a bit for each rank that has rows."""
    return int((1 << np.flatnonzero(rows)).sum())
