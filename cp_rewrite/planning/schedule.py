"""The schedule of every rank's attention, and where the rows it reads live: pieces, kernel tables, and runs of rows.

A rank's *local rows* are the rows of its tensors: its tokens, and fill. The keys of its pieces are gathered into one
buffer of *expanded rows*, piece after piece; a key that two pieces need is there twice.

    document of 8 tokens, causal, rank 0 owns [0, 2) and [6, 8)

    local rows      0 1 2 3                         tokens 0 1 6 7
    pieces          q [0, 2)      q [2, 4)          of local rows
    keys            [0, 2)        [0, 8)            of tokens
    expanded rows   0 1           2 3 4 5 6 7 8 9   tokens 0 1 | 0 1 2 3 4 5 6 7
    runs            0 1           2 3, 4 … 7, 8 9   from ranks 0 | 0, 1, 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.layouts.token_order import TokenOrder, common_local_size

from .intervals import Int, overlaps, union
from .names import LaunchRow, PieceRow
from .pieces import Pieces, Segments, cut_pieces, order_by_launch
from .sections import flat_sections

D = TypeVar("D", bound=np.integer)


@dataclass(frozen=True, eq=False)
class Runs:
    """Keys that lie side by side on their owner: one entry per run in each (M,) int64 array, by reader, then by row.

    Expanded rows [row, row + length) of rank `reader` are local rows [source, source + length) of rank `owner`.

    Args:
        piece: the piece that reads them, as an index into `Schedule.pieces`.
    """

    piece: Int
    reader: Int
    row: Int
    owner: Int
    source: Int
    length: Int

    def take(self, index: NDArray[np.bool_] | Int) -> Runs:
        """The runs at `index`."""
        columns = (self.piece, self.reader, self.row, self.owner, self.source, self.length)
        return Runs(*(column[index] for column in columns))


@dataclass(frozen=True, eq=False)
class Schedule:
    """The attention of all ranks over one batch under one mask.

    Args:
        world_size: ranks P.
        local_rows: R, of each rank: T_l for every row of the batch.
        pieces: of all ranks; within a rank ordered as the expanded rows are: by launch, then by local row.
        launch: (N,) int64: each piece's launch on its rank, 0 first.
        segments: who owns which tokens of the batch.
    """

    world_size: int
    local_rows: int
    pieces: Pieces
    launch: Int
    segments: Segments

    @cached_property
    def piece_bounds(self) -> Int:
        """(P + 1,) int64: pieces of rank r are those from piece_bounds[r] up to piece_bounds[r + 1]."""
        return np.searchsorted(self.pieces.rank, np.arange(self.world_size + 1))

    @cached_property
    def expanded(self) -> Int:
        """(P,) int64 expanded rows of each rank."""
        total = np.concatenate([[0], np.cumsum(self.pieces.keys)])
        return np.diff(total[self.piece_bounds])

    def attention(self, rank: int) -> dict[str, NDArray[np.integer]]:
        """The kernel tables of one rank, in a fixed order. Leading dims are at least 2: compilers specialise 0 and 1.

        Returns:
            cu_seqlens_q, cu_seqlens_k: (N + 1,) int32: running sums of the entries that a kernel runs over. Entries
                cover all R local rows in order, their keys count expanded rows. Local rows of no piece, and pieces of
                other launches than launch 0, are entries with no key.
            pieces: (N', 7) int64 `columns.PieceRow`, by launch, then by local row. Entries of zeros (q0 == q1) at the
                end only fill up to 2.
            launches: (G, 4) int64 `columns.LaunchRow`, most work first. cu_seqlens describe launch 0, and its max_q
                covers entries with no key too. An entry with max_q == 0 only fills up to 2.
        """
        mine = slice(*self.piece_bounds[rank : rank + 2])
        return kernel_tables(self.pieces.take(mine), self.launch[mine], self.local_rows)

    @cached_property
    def runs(self) -> Runs:
        """Sources of the expanded rows of all ranks."""
        piece, owner, source, length = self._runs_of(np.arange(len(self.pieces)))
        # Expanded rows count from 0 on each rank: those before a run, less all of the ranks before its reader.
        reader = self.pieces.rank[piece]
        row = np.cumsum(length) - length - np.concatenate([[0], np.cumsum(self.expanded)])[reader]
        return Runs(piece, reader, row, owner, source, length)

    @cached_property
    def remote(self) -> tuple[Int, Int, Int, Int]:
        """(piece, owner, source, length) of those of `runs` whose rows another rank owns."""
        piece, owner, source, length = self._runs_of(np.flatnonzero(self.pieces.away))
        far = owner != self.pieces.rank[piece]
        return piece[far], owner[far], source[far], length[far]

    def _runs_of(self, chosen: Int) -> tuple[Int, Int, Int, Int]:
        """(piece, owner, source, length) of the runs of the pieces at `chosen`."""
        starts, stops, owners, sources = self.segments
        pieces, key0, key1 = self.pieces.take(chosen).key_runs
        # A run for each pair of a run of a piece's keys and a segment that overlap: tokens [low, high) of the batch.
        keys, segment = overlaps(key0, key1, starts, stops)
        low = np.maximum(key0[keys], starts[segment])
        high = np.minimum(key1[keys], stops[segment])
        return chosen[pieces[keys]], owners[segment], sources[segment] + low - starts[segment], high - low

    @cached_property
    def received(self) -> Int:
        """(P, P) int64 KV rows that rank [0] receives from rank [1], each once; the diagonal is 0."""
        piece, owner, source, length = self.remote
        pair = self.pieces.rank[piece] * self.world_size + owner
        # One long line of P x P pairs (reader, owner) of R + 1 slots each: slot i is local row i of the owner, the last
        # one is empty, so that no range goes on in the next pair. A run covers slots; rows that several runs of a pair
        # read are covered once by their union.
        stride = self.local_rows + 1
        slots = pair * stride + source
        starts, stops = union(slots, slots + length)
        rows = np.bincount(starts // stride, stops - starts, self.world_size**2).astype(np.int64)
        return rows.reshape(self.world_size, self.world_size)


def build(
    rows: Sequence[Documents], orders: Sequence[TokenOrder], mask: PackedMask, local_size: int | None = None
) -> Schedule:
    """The schedule of one batch.

    Args:
        rows: documents of each row of the batch; all rows have the same total.
        orders: token order of each row, for the same number of ranks.
        mask: what each query sees.
        local_size: T_l, local rows of each rank for every row; None: as many as the orders need.
    """
    size = common_local_size(orders) if local_size is None else local_size
    segments = _segments(orders, size)
    pieces = cut_pieces(segments, flat_sections(rows, mask), mask)
    order, launch = order_by_launch(pieces)
    world_size = orders[0].world_size
    return Schedule(world_size, len(rows) * size, pieces.take(order), launch, segments)


def kernel_tables(pieces: Pieces, launch: Int, local_rows: int) -> dict[str, NDArray[np.integer]]:
    """`Schedule.attention` of the pieces of one rank, ordered by launch, then by local row."""
    k1 = np.cumsum(pieces.keys)
    k0 = k1 - pieces.keys
    columns = PieceRow(pieces.q0, pieces.q1, k0, k1, pieces.left, pieces.right, launch)
    cu_q, cu_k = _cover_rows(pieces.take(np.flatnonzero(launch == 0)), local_rows)
    launches = _launches(columns)
    launches.max_q[0] = np.diff(cu_q).max(initial=0)
    return {
        "cu_seqlens_q": at_least(cu_q.astype(np.int32), 3),
        "cu_seqlens_k": at_least(cu_k.astype(np.int32), 3),
        "pieces": at_least(np.stack(columns, axis=1), 2, 0),
        "launches": np.stack(launches, axis=1),
    }


def _segments(orders: Sequence[TokenOrder], local_size: int) -> Segments:
    """The segments of all rows. Row b of the batch has the batch's tokens from b T on, and local rows from b T_l on."""
    total = orders[0].total
    parts: list[Segments] = []
    for b, order in enumerate(orders):
        starts, stops, owners, sources = order.segments
        parts.append((starts + b * total, stops + b * total, owners, sources + b * local_size))
    starts, stops, owners, sources = (np.concatenate(column) for column in zip(*parts, strict=True))
    return starts, stops, owners, sources


def _launches(pieces: PieceRow[Int]) -> LaunchRow[Int]:
    """The launches of a rank's pieces."""
    count = int(pieces.launch.max(initial=-1)) + 1
    launches = LaunchRow(*np.zeros((4, max(count, 2)), dtype=np.int64))
    launches.left[pieces.launch] = pieces.left  # the same for all pieces of a launch
    launches.right[pieces.launch] = pieces.right
    np.maximum.at(launches.max_q, pieces.launch, pieces.q1 - pieces.q0)
    np.maximum.at(launches.max_k, pieces.launch, pieces.k1 - pieces.k0)
    return launches


def _cover_rows(pieces: Pieces, local_rows: int) -> tuple[Int, Int]:
    """(cu_seqlens_q, cu_seqlens_k): entries for the pieces, and with no key for the local rows between them.

    pieces q [0, 2) and [5, 8) of 9 local rows, 2 and 4 keys

        entries         [0, 2)   [2, 5)   [5, 8)   [8, 9)
        cu_seqlens_q  0        2        5        8        9
        cu_seqlens_k  0        2        2        6        6
    """
    # Gap, piece, gap, piece, …, gap: the bound of each and its keys; empty gaps are dropped.
    zero = np.zeros(len(pieces), dtype=np.int64)
    keys = np.stack([zero, pieces.keys], axis=1).reshape(-1)
    bounds = np.append(np.stack([pieces.q0, pieces.q1], axis=1).reshape(-1), local_rows)
    lengths = np.diff(bounds, prepend=0)
    keep = lengths > 0
    cu_k = np.concatenate([[0], np.cumsum(np.append(keys, 0)[keep])])
    return np.concatenate([[0], bounds[keep]]), cu_k


def at_least(array: NDArray[D], size: int, fill: int | None = None) -> NDArray[D]:
    """`array` with its leading dim filled up to `size` with `fill`; None: with its last entry."""
    missing = size - len(array)
    if missing <= 0:
        return array
    tail = np.full((missing, *array.shape[1:]), array[-1] if fill is None else fill, dtype=array.dtype)
    return np.concatenate([array, tail])
