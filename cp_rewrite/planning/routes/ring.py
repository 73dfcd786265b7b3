"""What a rank does in each step of a ring: which of its pieces meet the rows that have just come round.

In step s rank r holds the key rows of rank (r - s) mod P. The keys of a piece that this owner has are cut into runs of
consecutive tokens, each an *entry* with a mask of its own, still aligned at the bottom right:

    piece: queries 4 5, keys 0 1 2 3 4 5, causal; owners of the keys  A A B B A A
    step 0 (own rows, A)      keys 0 1 | 4 5      one entry: all queries see 0 1, so causal over 0 1 4 5 is right
    step 1 (rows of B)        keys 2 3            one entry, full

A run that ends e keys before the piece's last key sees (left, right) as (left - e, right + e). Queries past the reach
of a run are left out of its entry, so that its window is never negative. Entries of one piece that are no single
window together run in *rounds* one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.planning.columns import LaunchRow, PieceRow, RoundRow
from cp_rewrite.planning.intervals import Int, expand_ranges, overlaps, sum_lists
from cp_rewrite.planning.pieces import Pieces, order_by_launch
from cp_rewrite.planning.schedule import Schedule, kernel_tables

from .route import KERNEL_TABLES, Arrays, PlanTensor, Route

TENSORS = (PlanTensor("kv_rows"), PlanTensor("sum_ptr"), PlanTensor("sum_rows"), PlanTensor("rounds", on_host=True))
_ALL = np.int64(1) << 40
"""A window side that limits nothing."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Runs of one rank's keys, (N,) int64 arrays, by piece, step, key: queries [q0, q1) see rows [source, source +
    keys) of the step's owner under (left, right). Runs with the same `entry` are one, and run in round `number` of
    their step."""

    q0: Int
    q1: Int
    source: Int
    keys: Int
    left: Int
    right: Int
    step: Int
    entry: Int
    number: Int


def ring_entries(schedule: Schedule, rank: int) -> Entries:
    """The entries of all steps of one rank."""
    starts, stops, owners, sources = schedule.segments
    pieces = schedule.pieces.take(slice(*schedule.piece_bounds[rank : rank + 2]))
    piece, segment = overlaps(pieces.key0, pieces.key1, starts, stops)
    step = (rank - owners[segment]) % schedule.world_size
    order = np.lexsort((starts[segment], step, piece))
    piece, segment, step = piece[order], segment[order], step[order]

    p = pieces.take(piece)
    low, high = np.maximum(p.key0, starts[segment]), np.minimum(p.key1, stops[segment])
    source, keys, ahead = sources[segment] + low - starts[segment], high - low, p.key1 - high
    left = np.where(p.left < 0, _ALL, p.left) - ahead
    right = np.where(p.right < 0, _ALL, p.right) + ahead
    # The last queries see only keys after the run, the first ones only keys before it.
    late = np.maximum(-left, 0)
    queries, left, right = p.q1 - p.q0 - late, left + late, right - late
    early = np.maximum(queries - keys - right, 0)
    hidden = np.maximum(early + keys - queries - left, 0)
    q0, q1, source, keys = p.q0 + early, p.q1 - late, source + hidden, keys - hidden

    keep = (q1 > q0) & (keys > 0)
    columns = (q0, q1, source, keys, left, right, step, piece, ahead)
    q0, q1, source, keys, left, right, step, piece, ahead = (column[keep] for column in columns)
    # A window that hides nothing is written as no limit, but not where that would part pieces of one launch.
    group = np.cumsum(_changes(piece, step))
    alone = np.bincount(group, minlength=1)[group] == 1 if len(group) else np.zeros(0, dtype=np.bool_)
    plain = (ahead == 0) & alone
    left = np.where((left < _ALL // 2) & (plain | (left < keys - 1)), left, -1)
    right = np.where((right < _ALL // 2) & ((ahead == 0) | (right < q1 - q0 - 1)), right, -1)
    follows = np.zeros(len(q0), dtype=np.bool_)
    full = (left < 0) & (right < 0)
    follows[1:] = full[:-1] & (left[1:] < 0) & (q0[1:] == q0[:-1]) & (q1[1:] == q1[:-1]) & (np.diff(group) == 0)
    entry = np.cumsum(~follows) - 1
    first = np.flatnonzero(np.diff(group, prepend=-1)) if len(group) else np.zeros(0, dtype=np.int64)
    number = entry - np.repeat(entry[first], np.diff(np.append(first, len(group))))
    return Entries(q0, q1, source, keys, left, right, step, entry, number)


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


RING = Route(TENSORS, ring_tables, in_steps=True)


def _joined(name: str, arrays: list[NDArray[np.integer]]) -> NDArray[np.integer]:
    """One array of all rounds, filled up to 2 entries: compilers specialise 0 and 1."""
    rows = {"pieces": PieceRow, "launches": LaunchRow, "rounds": RoundRow}
    columns = (len(rows[name]._fields),) if name in rows else ()
    dtype = np.int64 if columns else np.int32
    size = sum(map(len, arrays))
    filling = np.full((max(0, 2 - size), *columns), -1 if name == "rounds" else 0, dtype=dtype)
    return np.concatenate([*arrays, filling]).astype(dtype)


def _round_tables(entries: Entries, chosen: NDArray[np.bool_], rows: int) -> dict[str, NDArray[np.integer]]:
    runs = np.flatnonzero(chosen)
    ids = entries.entry[runs]
    last = np.append(np.flatnonzero(np.diff(ids)), len(ids) - 1)
    index = runs[last]
    keys = np.bincount(np.cumsum(np.diff(ids, prepend=ids[0]) != 0), entries.keys[runs]).astype(np.int64)
    zero = np.zeros(len(index), dtype=np.int64)
    pieces = Pieces(zero, entries.q0[index], entries.q1[index], zero, keys, entries.left[index], entries.right[index])
    order, launch = order_by_launch(pieces)
    # Runs in the order of their entries.
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
