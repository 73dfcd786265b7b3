"""The tables of a recurrent state that passes through the tokens of a sequence, which lie in pieces on the ranks.

A piece maps the state that enters it, S_out = M · S_in + U. The owner of a piece that is cut at its end sends the
summary (M, U) once to each rank that has a later piece of the sequence, which folds all that come before its own:

    sequence            a b c d e f g h          rank 0 has [a b] [f g], rank 1 has [c d e] [h]
    forward             rank 0 needs ab, cde for f            rank 1 needs ab for c, then cde, fg for h
    backward            rank 0 needs h for g, fg and cde for b       rank 1 needs h, fg for e

The backward is the same from behind: dS_in = Mᵀ · dS_out + C. A summary of a delta rule of H heads has
4 H K (K + V) bytes, of SSD 4 H (1 + N P), of a selective scan 8 E N: what one more cut costs each rank that needs it.
Cuts may be anywhere; one at a multiple of 64 tokens from its sequence's start leaves no chunk less than full.

Shapes: B rows of T tokens, T_l local rows of each; P ranks; C chunks of a rank; N cut pieces of a rank, those that are
cut at their end first; S summaries sent, V received; F steps of a fold; E runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity

from .batch_plan import BatchPlan
from .intervals import CHUNK, Int, chunk_counts, chunk_rows, level_major, overlaps
from .plan_input import States
from .routes.route import Arrays, row_index
from .schedule import at_least


@dataclass(frozen=True)
class _Pieces:
    """Pieces of all ranks, by sequence and by their place in it. Each is (n,) int64: the sequence, the owner, the first
    of the owner's B T_l local rows, how many rows."""

    sequence: Int
    owner: Int
    row: Int
    length: Int

    def back(self) -> _Pieces:
        """The same pieces, the last one first."""
        return _Pieces(self.sequence[::-1], self.owner[::-1], self.row[::-1], self.length[::-1])

    @property
    def late(self) -> NDArray[np.bool_]:
        """(n,): a piece of the sequence is before this one."""
        return np.diff(self.sequence, prepend=-1) == 0


def state_tables(plan: BatchPlan, read: States, rank: int, capacity: Capacity | None = None) -> Arrays:
    """The tables of one rank. Those with `_back` are of the pieces from behind.

    Returns:
        chunk_rows: (64 C,) int32, the local row of each place of the chunks of all pieces, -1: none, see
        `intervals.py`. chunk_levels: int64, chunks of each level.
        cut_pieces: (N,) int32, the number of each cut piece among all of the rank, in the order of chunks; -1: fill.
        summed_chunks, summed_levels: int32 and int64, chunks of the pieces that are cut at their end, level-major.
        send_summaries: (S,) int32, which of N are sent, by destination. Those past the sum of `splits[0]` only fill.
        splits: (2, P) int64, summaries to and from each rank.
        fold_order: (F,) int32 into cat(N, V by source), summaries that are folded, level-major by sequence.
        fold_levels: int64, steps of each level.
        fold_place: (N,) int32 into cat(F states before each step, states at the ends of chains): what enters each cut
            piece; -1: zero.
        runs, run_offsets, run_chunks, run_states: see `kernels/states/select.py`.
    Raises:
        ValueError: a capacity; a token of no document stands before one of a document, against `apart`.
    """
    if capacity is not None:
        raise ValueError(
            "a model with recurrent states takes no capacity: what travels depends on where documents are cut"
        )
    pieces = _pieces(plan, read)
    mine = np.flatnonzero(pieces.owner == rank)
    mine = mine[np.argsort(-chunk_counts(pieces.length[mine]), kind="stable")]
    rows, levels = chunk_rows(pieces.row[mine], pieces.length[mine])
    late, early = pieces.late, pieces.back().late[::-1]
    ends, begins = np.flatnonzero(early[mine]), np.flatnonzero((late & ~early)[mine])
    cut = np.concatenate([ends, begins])
    summed_levels, chain, level = level_major(chunk_counts(pieces.length[mine[ends]]))
    before = np.cumsum(levels) - levels
    if not len(mine):
        rows, levels = np.full((2, CHUNK), -1), np.array([2])
    number = np.full(len(pieces.owner), -1)
    number[mine[cut]] = np.arange(len(cut))
    size = max(2, len(cut))
    tables: Arrays = {
        "chunk_rows": row_index(rows.reshape(-1)),
        "chunk_levels": at_least(levels, 2, 0),
        "cut_pieces": at_least(cut.astype(np.int32), 2, -1),
        "summed_chunks": row_index(before[level] + ends[chain]),
        "summed_levels": at_least(summed_levels, 2, 0),
    }
    entered, left = (np.where(where, number, -1)[mine] for where in (late, early))
    count = len(plan.rows) * plan.local_size
    tables |= run_tables(pieces.row[mine], pieces.length[mine], entered, left, count, size)
    tables |= _fold(pieces, number, size, rank, plan.world_size)
    back = _fold(pieces.back(), number[::-1], size, rank, plan.world_size)
    return tables | {f"{name}_back": array for name, array in back.items()}


def _pieces(plan: BatchPlan, read: States) -> _Pieces:
    columns: list[tuple[Int, ...]] = []
    sequences = 0
    for b, order in enumerate(plan.orders):
        first, end = _sequences(plan, read, b)
        starts, stops, owners, sources = order.segments
        segment, sequence = overlaps(starts, stops, first, end)
        begin = np.maximum(starts[segment], first[sequence])
        row = b * plan.local_size + sources[segment] + begin - starts[segment]
        length = np.minimum(stops[segment], end[sequence]) - begin
        columns.append((sequence + sequences, owners[segment], row, length))
        sequences += len(first)
    return _Pieces(*(np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)))


def _sequences(plan: BatchPlan, read: States, b: int) -> tuple[Int, Int]:
    """(first token, token behind the last) of each sequence of a row of the batch, or of rows that were joined to one;
    none empty."""
    row = plan.rows[b]
    real = row.lengths > 0
    if read.resets:
        return row.starts[real], row.ends[real]
    first, end = plan.row_bounds[:-1], plan.row_bounds[1:]
    if not read.apart:
        return first, end
    within = np.searchsorted(first, row.starts[real], side="right") - 1
    end = first + np.bincount(within, row.lengths[real], len(first)).astype(np.int64)
    if (row.ends[real] > end[within]).any():
        raise ValueError(
            "a recurrent state of the model carries padding into a document behind it: tokens of no document attend to "
            "nothing here, whatever the model's mask says. Put padding at the end of rows, give it a document of its "
            "own, or let states begin anew at documents"
        )
    return first[first < end], end[first < end]


def _fold(pieces: _Pieces, number: Int, size: int, rank: int, world_size: int) -> Arrays:
    """Tables of what a rank sends, receives and folds. number: of the rank's cut pieces among N, filled up to
    `size`."""
    needed = [_needed(pieces, reader) for reader in range(world_size)]
    mine = pieces.owner == rank
    sent = [np.flatnonzero(need & mine & (reader != rank)) for reader, need in enumerate(needed)]
    step = np.flatnonzero(needed[rank])
    foreign = step[pieces.owner[step] != rank]
    foreign = foreign[np.argsort(pieces.owner[foreign], kind="stable")]
    place = number.copy()  # of each piece in cat(N, V)
    place[foreign] = size + np.arange(len(foreign))
    _, start, counts = np.unique(pieces.sequence[step], return_index=True, return_counts=True)
    chains = np.argsort(-counts, kind="stable")
    levels, chain, level = level_major(counts[chains])
    order = step[start[chains][chain] + level]
    entry = np.full(size, -1)
    found = np.full(len(mine), -1)
    found[order] = np.arange(len(order))
    # The last of a chain's readers comes right behind it: what enters it is the chain's end.
    last = step[start[chains] + counts[chains] - 1] + 1
    found[last] = len(order) + np.arange(len(last))
    entered = np.flatnonzero(mine & pieces.late)
    entry[number[entered]] = found[entered]
    received = np.bincount(pieces.owner[foreign], minlength=world_size)
    return {
        "send_summaries": row_index(number[np.concatenate(sent)]),
        "splits": np.stack([[len(rows) for rows in sent], received]).astype(np.int64),
        "fold_order": row_index(place[order]),
        "fold_levels": at_least(levels, 2, 0),
        "fold_place": entry.astype(np.int32),
    }


def _needed(pieces: _Pieces, reader: int) -> NDArray[np.bool_]:
    """(n,): a later piece of the sequence is the reader's."""
    own = np.flatnonzero(pieces.owner == reader)
    last = np.full(int(pieces.sequence.max(initial=-1)) + 1, -1)
    np.maximum.at(last, pieces.sequence[own], own)
    return np.arange(len(pieces.owner)) < last[pieces.sequence]


def run_tables(starts: Int, lengths: Int, entered: Int, left: Int, rows: int, fill: int) -> Arrays:
    """All local rows of a rank as runs, one behind another, which is how chunked kernels take packed sequences. Each
    piece [start, start + length), none empty and none on another, is a run, and so are the rows between, which hold
    fill or tokens of no sequence:

        pieces [3, 7) [9, 12) of 14 rows        runs  [0, 3) [3, 7) [7, 9) [9, 12) [12, 14)

    Args:
        entered, left: of each piece that is cut at its start, and at its end, the number among the N cut ones; else -1.
        rows: of the rank. fill: the number of none, what `run_states` has where no state enters.
    Returns:
        runs: (E, 4) int64, the first row, the row behind the last, `entered` and `left`, both -2 of what is no piece. E
            is at least 2: empty runs fill it up.
        run_offsets: (E + 1,) int32, ascending to `rows`.
        run_chunks: (C, 2) int32, the run of each chunk, and the chunk's number in it; filled up to 2 with the last.
        run_states: (E,) int32, the cut piece whose state enters or leaves each run, else `fill`.
    """
    order = np.argsort(starts, kind="stable")
    first, stop = starts[order], (starts + lengths)[order]
    before, behind = np.append(0, stop), np.append(first, rows)
    gaps = np.flatnonzero(before < behind)
    none = np.full(len(gaps), -2)
    columns = (first, before[gaps]), (stop, behind[gaps]), (entered[order], none), (left[order], none)
    found = np.stack([np.concatenate(column) for column in columns], 1).astype(np.int64)
    found = found[np.argsort(found[:, 0], kind="stable")]
    found = np.concatenate([found, np.tile([[rows, rows, -2, -2]], (max(0, 2 - len(found)), 1))])
    counts = chunk_counts(found[:, 1] - found[:, 0])
    run = np.repeat(np.arange(len(found)), counts)
    chunks = np.stack([run, np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)], 1)
    cut = found[:, 2:].max(1)
    return {
        "runs": found,
        "run_offsets": np.append(found[:, 0], rows).astype(np.int32),
        "run_chunks": at_least(chunks.astype(np.int32), 2),
        "run_states": np.where(cut < 0, fill, cut).astype(np.int32),
    }
