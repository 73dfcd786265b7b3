"""The route of `p2p`: what a rank's pieces read of the rows that it holds in each step of a ring.

In step s rank r holds the key rows of rank (r - s) mod P. The keys that a piece has among them are cut into runs of
consecutive tokens, each with a window of its own, still aligned at the bottom right. Runs that one window describes are
an *entry* of the kernel:

    piece: queries 4 5, keys 0 1 2 3 4 5, causal; owners of the keys  A A B B A A
    step 0 (own rows, A)      keys 0 1 | 4 5      one entry: all queries see 0 1, so causal over 0 1 4 5 is right
    step 1 (rows of B)        keys 2 3            one entry, full

The window (left, right) of a run that ends e keys before the piece's last key is (left - e, right + e). Entries of one
piece and step run one after another, in *rounds*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.planning.cost.constants import RING_BACKWARD, RING_FORWARD, TILE, TILE_ROW_OVERHEAD
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load, both_kernels, expanded_seconds, transfer_seconds
from cp_rewrite.planning.intervals import Int, expand_ranges, sum_lists
from cp_rewrite.planning.names import LaunchRow, PieceRow, RoundRow
from cp_rewrite.planning.pieces import Pieces, order_by_launch
from cp_rewrite.planning.plan_input import KERNEL_TABLES, PlanTensor
from cp_rewrite.planning.schedule import Schedule, kernel_tables

from .route import Arrays, Cost, Route

TENSORS = (PlanTensor("kv_rows"), PlanTensor("sum_ptr"), PlanTensor("sum_rows"), PlanTensor("rounds", on_host=True))
_ALL = np.int64(1) << 40
"""A window side that limits nothing."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Runs of one rank's keys, (N,) int64 arrays, by piece, step, key: queries [q0, q1) see rows [source, source +
    keys) of the step's owner under (left, right). Runs with the same `entry` are one, in round `number` of the step."""

    q0: Int
    q1: Int
    source: Int
    keys: Int
    left: Int
    right: Int
    step: Int
    entry: Int
    number: Int


class _KeyRuns(NamedTuple):
    """Runs of keys that each piece reads of each owner, (N,) int64 arrays, by piece, step, key: queries [q0, q1) see
    rows [source, source + keys) of the step's owner under (left, right); `ahead` keys of the piece come after the
    run."""

    piece: Int
    step: Int
    ahead: Int
    q0: Int
    q1: Int
    source: Int
    keys: Int
    left: Int
    right: Int


def ring_entries(schedule: Schedule, rank: int) -> Entries:
    """The entries of all steps of one rank."""
    runs = _key_runs(schedule, rank)
    group = np.cumsum(_changes(runs.piece, runs.step), dtype=np.int64)
    left, right = _windows(runs, group)
    # A run that all queries see is one entry with the next one of its piece and step, if the same queries see this too.
    follows = np.zeros(len(group), dtype=np.bool_)
    full = (left < 0) & (right < 0)
    same = ~_changes(group, runs.q0, runs.q1)
    follows[1:] = full[:-1] & (left[1:] < 0) & same[1:]
    entry = np.cumsum(~follows) - 1
    # Entries of a piece and step are numbered from 0.
    first = np.flatnonzero(np.diff(group, prepend=-1)) if len(group) else np.zeros(0, dtype=np.int64)
    number = entry - np.repeat(entry[first], np.diff(np.append(first, len(group))))
    return Entries(runs.q0, runs.q1, runs.source, runs.keys, left, right, runs.step, entry, number)


def _key_runs(schedule: Schedule, rank: int) -> _KeyRuns:
    """Only queries that see a key of the run, and keys that one of them sees."""
    runs = schedule.runs.take(schedule.runs.reader == rank)
    step = (rank - runs.owner) % schedule.world_size
    order = np.lexsort((runs.row, step, runs.piece))
    runs, step = runs.take(order), step[order]
    piece, source, keys = runs.piece, runs.source, runs.length
    # Keys of the piece after the run: its expanded rows end where the next piece's begin.
    ends = np.cumsum(schedule.pieces.keys)
    p = schedule.pieces.take(piece)
    ahead = ends[piece] - (np.cumsum(schedule.expanded) - schedule.expanded)[rank] - runs.row - keys
    left = np.where(p.left < 0, _ALL, p.left) - ahead
    right = np.where(p.right < 0, _ALL, p.right) + ahead
    # Query i of n sees key j of m where -left <= j - (i + m - n) <= right. With left < 0 the last queries see no key:
    # without them the window's corner moves. Then the first queries that see none, and the first keys that none sees.
    late = np.maximum(-left, 0)
    queries, left, right = p.q1 - p.q0 - late, left + late, right - late
    early = np.maximum(queries - keys - right, 0)
    hidden = np.maximum(early + keys - queries - left, 0)
    q0, q1, source, keys = p.q0 + early, p.q1 - late, source + hidden, keys - hidden
    keep = (q1 > q0) & (keys > 0)
    columns = (piece, step, ahead, q0, q1, source, keys, left, right)
    return _KeyRuns(*(column[keep] for column in columns))


def _windows(runs: _KeyRuns, group: Int) -> tuple[Int, Int]:
    """(left, right), -1 where a side hides nothing. But the right side of a run that ends with its piece stays as it
    is, and the left one too if this is the only run of its `group` (piece and step): pieces with equal windows share a
    launch."""
    alone = np.bincount(group, minlength=1)[group] == 1 if len(group) else np.zeros(0, dtype=np.bool_)
    last = runs.ahead == 0
    left = np.where((runs.left < _ALL // 2) & ((last & alone) | (runs.left < runs.keys - 1)), runs.left, -1)
    right = np.where((runs.right < _ALL // 2) & (last | (runs.right < runs.q1 - runs.q0 - 1)), runs.right, -1)
    return left, right


def ring_tables(schedule: Schedule, rank: int) -> Arrays:
    """The tables of one rank, those of all rounds one after another.

    Returns:
        cu_seqlens_q, cu_seqlens_k, pieces, launches: as in `Schedule.attention`, per round.
        kv_rows: (E,) int32, rows of the step's owner, expanded. sum_ptr: (rounds (R + 1),), sum_rows: int32, per round
            the expanded rows that contribute to each of the owner's rows (`intervals.sum_lists`).
        rounds: (n, 11) int64 `RoundRow`s, by step.
    """
    entries = ring_entries(schedule, rank)
    parts: dict[str, list[NDArray[np.integer]]] = {tensor.name: [] for tensor in KERNEL_TABLES + TENSORS}
    at = np.zeros(5, dtype=np.int64)
    for step, number in sorted(set(zip(entries.step.tolist(), entries.number.tolist(), strict=True))):
        made = _round_tables(entries, (entries.step == step) & (entries.number == number), schedule.local_rows)
        for name, array in made.items():
            parts[name].append(array)
        sizes = [len(made[name]) for name in ("cu_seqlens_q", "pieces", "launches", "kv_rows", "sum_rows")]
        parts["rounds"].append(np.array([RoundRow(step, *np.stack([at, at + sizes], axis=1).reshape(-1))]))
        at = at + sizes
    return {name: _joined(name, arrays) for name, arrays in parts.items()}


def ring_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`p2p`: P steps, each a kernel over one rank's keys beside a transfer, then a merge of out and log-sum-exp.

    In the backward keys travel beside a step's kernel, fp32 gradients beside the next one; the last go home alone.
    """
    ranks, rows = load.world_size, load.local_rows
    across = np.array([rows if ranks_per_node < ranks else 0])
    step = transfer_seconds(np.array([rows]) - across, across, model.kv_bytes, replace(device, link=device.ring))
    more_rows = (ranks - 1) * TILE_ROW_OVERHEAD * rows / TILE
    there, back = both_kernels(load.tiles.max() + more_rows, load.launches * ranks, device, model)
    merged = rows * model.q_bytes / device.memory
    summed = rows * model.kv_bytes / device.memory
    once, more, keys = RING_FORWARD
    there += (once + more * (ranks - 1)) * merged + keys * summed
    once, more, keys, more_keys = RING_BACKWARD
    back += (once + more * ranks) * merged + (keys + more_keys * ranks) * summed
    copied = expanded_seconds(load, device, model)
    first, last = (ranks - 1) / ranks, 1 / ranks
    forward = max(there * first, (ranks - 1) * step) + there * last
    backward = max(back, 3 * (ranks - 1) * step) + 2 * step
    return forward + backward + copied


RING = Route(TENSORS, ring_tables, in_steps=True, cost=Cost(ring_seconds))


def _joined(name: str, arrays: list[NDArray[np.integer]]) -> NDArray[np.integer]:
    """One array of all rounds, filled up to 2 entries: compilers specialise 0 and 1."""
    rows = {"pieces": PieceRow, "launches": LaunchRow, "rounds": RoundRow}
    columns = (len(rows[name]._fields),) if name in rows else ()
    dtype = np.int64 if columns else np.int32
    size = sum(map(len, arrays))
    filling = np.full((max(0, 2 - size), *columns), -1 if name == "rounds" else 0, dtype=dtype)
    return np.concatenate([*arrays, filling]).astype(dtype)


def _round_tables(entries: Entries, chosen: NDArray[np.bool_], rows: int) -> Arrays:
    """The tables of one round, of the `chosen` runs; `rows` is R."""
    runs = np.flatnonzero(chosen)
    ids = entries.entry[runs]
    last = np.append(np.flatnonzero(np.diff(ids)), len(ids) - 1)
    index = runs[last]  # an entry's last run has its window: the runs before it are full
    keys = np.bincount(np.cumsum(np.diff(ids, prepend=ids[0]) != 0), entries.keys[runs]).astype(np.int64)
    zero = np.zeros(len(index), dtype=np.int64)
    window = entries.left[index], entries.right[index]
    pieces = Pieces(zero, entries.q0[index], entries.q1[index], zero, keys, *window, zero, zero > 0)
    order, launch = order_by_launch(pieces)
    # The kernel wants entries by launch, then by row: so must their runs be.
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    runs = runs[np.argsort(position[np.searchsorted(entries.entry[index], ids)], kind="stable")]
    kv_rows = expand_ranges(entries.source[runs], entries.keys[runs])
    ptr, members = sum_lists(kv_rows, rows)
    tables = kernel_tables(pieces.take(order), launch, rows)
    return {**tables, "kv_rows": kv_rows, "sum_ptr": ptr, "sum_rows": members}


def _changes(*columns: Int) -> NDArray[np.bool_]:
    """(N,) True where any column differs from the entry before; False for the first."""
    change = np.zeros(len(columns[0]), dtype=np.bool_)
    for column in columns:
        change[1:] |= np.diff(column) != 0
    return change
