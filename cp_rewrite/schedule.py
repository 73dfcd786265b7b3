"""What every rank's attention does: pieces of documents, the keys they need, and where those rows live.

A piece is a maximal run of consecutive tokens of one document on one rank. It attends to keys [key0, key1) of its
document with one plain kernel mask, aligned at the bottom right as flash kernels do when lengths differ: query i of n
sees key j of m when  -left <= j - (i + m - n) <= right.

Keys are gathered into one buffer of *expanded rows*, piece after piece; a row that two pieces need is there twice.

    document of 8 tokens, causal, rank 0 owns [0, 2) and [6, 8)
    pieces          q [0, 2) keys [0, 2)      q [6, 8) keys [0, 8)
    local rows      0 1 2 3                   (tokens 0 1 6 7)
    expanded rows   0 1 | 2 3 4 5 6 7 8 9     (tokens 0 1 | 0 1 2 3 4 5 6 7)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .documents import Documents
from .intervals import Int, expand_ranges, group_rows, overlaps, union
from .layouts import TokenOrder, common_local_size
from .masks import PackedMask

Int32 = NDArray[np.int32]
D = TypeVar("D", bound=np.integer)
ROUTES = ("local", "all_gather", "needed", "pull")


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of all ranks, by rank, then by local row: one entry per piece in each (N,) int64 array.

    Args:
        rank: the owner.
        q0, q1: flat local rows [q0, q1) of the owner.
        key0, key1: keys [key0, key1), as flat global rows b T + t.
        left, right: the kernel's window for this piece; -1: no limit.
    """

    rank: Int
    q0: Int
    q1: Int
    key0: Int
    key1: Int
    left: Int
    right: Int

    def take(self, index: Int | slice) -> Pieces:
        """The pieces at `index`."""
        return Pieces(*(column[index] for column in self.columns))

    @property
    def columns(self) -> tuple[Int, ...]:
        return (self.rank, self.q0, self.q1, self.key0, self.key1, self.left, self.right)

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, eq=False)
class Runs:
    """Keys that lie side by side on their owner: expanded rows [row, row + length) of rank `reader` are local rows
    [source, source + length) of rank `owner`. (M,) int64 arrays, by reader, then by expanded row."""

    reader: Int
    row: Int
    owner: Int
    source: Int
    length: Int

    def take(self, index: NDArray[np.bool_]) -> Runs:
        """The runs at `index`."""
        return Runs(*(column[index] for column in (self.reader, self.row, self.owner, self.source, self.length)))


@dataclass(frozen=True, eq=False)
class Schedule:
    """The attention of all ranks over one batch under one mask.

    Args:
        world_size: ranks P.
        rows: local rows R of each rank: batch rows x local row size.
        pieces: of all ranks; within a rank ordered as the expanded rows are: by launch, then by local row.
        launch: (N,) int64: each piece's launch on its rank, 0 first.
        segments: (starts, stops, owners, sources): who owns flat global rows [start, stop), from which local row on.
    """

    world_size: int
    rows: int
    pieces: Pieces
    launch: Int
    segments: tuple[Int, Int, Int, Int]

    @cached_property
    def piece_bounds(self) -> Int:
        """(P + 1,) pieces of rank r are [piece_bounds[r], piece_bounds[r + 1])."""
        return np.searchsorted(self.pieces.rank, np.arange(self.world_size + 1))

    @cached_property
    def expanded(self) -> Int:
        """(P,) expanded rows of each rank."""
        total = np.concatenate([[0], np.cumsum(self.pieces.key1 - self.pieces.key0)])
        return np.diff(total[self.piece_bounds])

    def attention(self, rank: int) -> dict[str, NDArray[np.integer]]:
        """The kernel tables of one rank, in a fixed order. Leading dims are at least 2: compilers specialise 0 and 1.

        Returns:
            cu_seqlens_q, cu_seqlens_k: (N + 1,) int32. Entries cover all R local rows in order. Rows of no piece, and
                pieces of other launches than launch 0, are entries with no key. cu_seqlens_k counts expanded rows.
            pieces: (N', 7) int64: q0, q1 (flat local rows), k0, k1 (expanded rows), left, right, launch; by launch,
                then by row. All-zero rows (q0 == q1) at the end only fill up to 2.
            launches: (G, 4) int64: left, right, max_q, max_k; most work first; cu_seqlens describe launch 0, and its
                max_q covers entries with no key too. A row with max_q == 0 only fills up to 2.
        """
        mine = slice(*self.piece_bounds[rank : rank + 2])
        pieces, launch = self.pieces.take(mine), self.launch[mine]
        k1 = np.cumsum(pieces.key1 - pieces.key0)
        k0 = k1 - (pieces.key1 - pieces.key0)
        table = np.stack([pieces.q0, pieces.q1, k0, k1, pieces.left, pieces.right, launch], axis=1)
        cu_q, cu_k = _cover_rows(pieces.take(np.flatnonzero(launch == 0)), self.rows)
        launches = _launches(table)
        launches[0, 2] = np.diff(cu_q).max(initial=0)
        return {
            "cu_seqlens_q": _at_least(cu_q.astype(np.int32), 3),
            "cu_seqlens_k": _at_least(cu_k.astype(np.int32), 3),
            "pieces": _at_least(table, 2, 0),
            "launches": launches,
        }

    @cached_property
    def runs(self) -> Runs:
        """Where the expanded rows of all ranks come from."""
        starts, stops, owners, sources = self.segments
        key0, key1 = self.pieces.key0, self.pieces.key1
        piece, segment = overlaps(key0, key1, starts, stops)
        low = np.maximum(key0[piece], starts[segment])
        high = np.minimum(key1[piece], stops[segment])
        row = np.cumsum(high - low) - (high - low)
        reader = self.pieces.rank[piece]
        row -= np.concatenate([[0], np.cumsum(self.expanded)])[reader]
        return Runs(reader, row, owners[segment], sources[segment] + low - starts[segment], high - low)

    def route(self, exchange: str, rank: int) -> dict[str, NDArray[np.integer]]:
        """The row tables of one rank for one way of moving rows, in a fixed order. P ranks, R local rows, E expanded.

        `local`: kv_rows (E,) local row of each expanded row; sum_ptr (R + 1,), sum_rows (E,): the expanded rows that
            contribute to each local row. For one rank.
        `all_gather`: the same over the P R gathered rows (owner R + local row).
        `needed`: send_rows (S,) local rows by destination; splits (2, P) rows sent to and received from each rank;
            kv_rows (E,) into cat(R local rows, V received rows by source); sum_ptr (R + V + 1,), sum_rows (E,);
            return_ptr (R + 1,), return_rows (R + S,) into cat(own sums (R), rows that come back (S)).
        `pull`: kv_rows as in all_gather; pull_ptr (R + 1,), pull_rows int64: reader << 32 | its expanded row.
        Raises:
            ValueError: an unknown exchange, or `local` with more than one rank.
        """
        if exchange == "local" and self.world_size > 1:
            raise ValueError(f"the local route is for one rank, this schedule has {self.world_size}")
        if exchange in ("local", "all_gather"):
            return self._gathered_route(rank)
        if exchange == "needed":
            return self._needed_route(rank)
        if exchange == "pull":
            return self._pull_route(rank)
        raise ValueError(f"exchange must be one of {', '.join(ROUTES)}; got {exchange!r}")

    def _gathered_rows(self, rank: int) -> Int:
        runs = self.runs.take(self.runs.reader == rank)
        return expand_ranges(runs.owner * self.rows + runs.source, runs.length)

    def _gathered_route(self, rank: int) -> dict[str, NDArray[np.integer]]:
        kv_rows = self._gathered_rows(rank)
        ptr, members = group_rows(kv_rows, self.world_size * self.rows)
        return {"kv_rows": _index(kv_rows), "sum_ptr": _index(ptr), "sum_rows": _index(members)}

    def _needed_route(self, rank: int) -> dict[str, NDArray[np.integer]]:
        runs = self.runs.take(self.runs.reader == rank)
        slots = runs.owner * self.rows + runs.source
        remote = runs.owner != rank
        starts, stops = union(slots[remote], (slots + runs.length)[remote])
        before = np.cumsum(stops - starts) - (stops - starts)
        block = np.searchsorted(starts, slots[remote], side="right") - 1
        position = runs.source.copy()
        position[remote] = self.rows + before[block] + slots[remote] - starts[block]
        kv_rows = expand_ranges(position, runs.length)
        received = np.bincount(expand_ranges(starts, stops - starts) // self.rows, minlength=self.world_size)
        ptr, members = group_rows(kv_rows, self.rows + int(received.sum()))
        send_rows, sent = self._sent_rows(rank)
        return_ptr, return_rows = group_rows(np.concatenate([np.arange(self.rows), send_rows]), self.rows)
        return {
            "send_rows": _index(send_rows),
            "splits": np.stack([sent, received]),
            "kv_rows": _index(kv_rows),
            "sum_ptr": _index(ptr),
            "sum_rows": _index(members),
            "return_ptr": _index(return_ptr),
            "return_rows": _index(return_rows),
        }

    def _sent_rows(self, rank: int) -> tuple[Int, Int]:
        runs = self.runs.take((self.runs.owner == rank) & (self.runs.reader != rank))
        slots = runs.reader * self.rows + runs.source
        starts, stops = union(slots, slots + runs.length)
        rows = expand_ranges(starts, stops - starts)
        return rows % self.rows, np.bincount(rows // self.rows, minlength=self.world_size)

    def _pull_route(self, rank: int) -> dict[str, NDArray[np.integer]]:
        runs = self.runs.take(self.runs.owner == rank)
        rows = expand_ranges(runs.source, runs.length)
        contributions = expand_ranges((runs.reader << 32) + runs.row, runs.length)
        ptr, members = group_rows(rows, self.rows)
        return {
            "kv_rows": _index(self._gathered_rows(rank)),
            "pull_ptr": _index(ptr),
            "pull_rows": _at_least(contributions[members], 2, 0),
        }

    @cached_property
    def received(self) -> Int:
        """(P, P) rows that rank [0] receives from rank [1], each row once; the diagonal is 0."""
        remote = self.runs.take(self.runs.reader != self.runs.owner)
        pair = remote.reader * self.world_size + remote.owner
        slots = pair * self.rows + remote.source
        starts, stops = union(slots, slots + remote.length)
        # Ranges of two pairs may touch and be merged: cut them again where the pair changes.
        bounds = np.arange(1, self.world_size**2 + 1) * self.rows
        covered = np.concatenate([[0], np.cumsum(stops - starts)])
        block = np.searchsorted(starts, bounds, side="left")
        inside = covered[block]
        overshoot = np.where(block > 0, stops[block - 1] - bounds, 0) if len(starts) else 0
        total = inside - np.maximum(overshoot, 0)
        return np.diff(total, prepend=0).reshape(self.world_size, self.world_size)


def build(rows: Sequence[Documents], orders: Sequence[TokenOrder], mask: PackedMask) -> Schedule:
    """The schedule of one batch.

    Args:
        rows: documents of each batch row; all rows have the same total.
        orders: token order of each batch row, for the same number of ranks.
        mask: what each query sees.
    """
    segments = _segments(orders)
    pieces = _pieces(segments, *_flat_documents(rows, mask.packed), mask)
    order, launch = _rank_launches(pieces)
    world_size = orders[0].world_size
    return Schedule(world_size, len(rows) * common_local_size(orders), pieces.take(order), launch, segments)


def _segments(orders: Sequence[TokenOrder]) -> tuple[Int, Int, Int, Int]:
    local_size, total = common_local_size(orders), orders[0].total
    parts: list[tuple[Int, Int, Int, Int]] = []
    for b, order in enumerate(orders):
        starts, stops, owners = order.segments
        by_owner = np.argsort(owners, kind="stable")
        lengths = (stops - starts)[by_owner]
        before = np.concatenate([[0], np.cumsum(order.sizes)])
        sources = np.empty_like(starts)
        sources[by_owner] = np.cumsum(lengths) - lengths - before[owners[by_owner]]
        parts.append((starts + b * total, stops + b * total, owners, sources + b * local_size))
    starts, stops, owners, sources = (np.concatenate(column) for column in zip(*parts, strict=True))
    return starts, stops, owners, sources


def _flat_documents(rows: Sequence[Documents], packed: bool) -> tuple[Int, Int]:
    """Starts and ends of all non-empty documents, as flat global rows."""
    total = rows[0].total
    if not packed:
        starts = np.arange(len(rows), dtype=np.int64) * total
        return starts, starts + total
    starts = np.concatenate([docs.starts + b * total for b, docs in enumerate(rows)])
    lengths = np.concatenate([docs.lengths for docs in rows])
    return starts[lengths > 0], (starts + lengths)[lengths > 0]


def _pieces(segments: tuple[Int, Int, Int, Int], doc_starts: Int, doc_ends: Int, mask: PackedMask) -> Pieces:
    """All pieces, with their keys and kernel windows."""
    starts, stops, owners, sources = segments
    segment, doc = overlaps(starts, stops, doc_starts, doc_ends)
    a = np.maximum(starts[segment], doc_starts[doc])
    b = np.minimum(stops[segment], doc_ends[doc])
    first, end = doc_starts[doc], doc_ends[doc]
    if mask.right is not None and mask.right > 0:
        # Queries whose window the document's end clips need other kernel windows than the ones before them,
        # except in a piece that ends with its document: there (left, right) itself is right for all of it.
        cut = np.clip(end - mask.right, a, b)
        whole = (b == end) | (cut == a) | (cut == b)
        cut = np.where(whole, b, cut)
        twice = np.repeat(np.arange(len(a)), np.where(whole, 1, 2))
        second = np.diff(twice, prepend=-1) == 0
        a, b = np.where(second, cut[twice], a[twice]), np.where(second, b[twice], cut[twice])
        segment, first, end = segment[twice], first[twice], end[twice]
    q0 = sources[segment] + a - starts[segment]
    key0 = first if mask.left is None else np.maximum(first, a - mask.left)
    key1 = end if mask.right is None else np.minimum(end, b + mask.right)
    left, right = _kernel_window(a, b, first, end, mask)
    return Pieces(owners[segment], q0, q0 + b - a, key0, key1, left, right)


def _kernel_window(a: Int, b: Int, first: Int, end: Int, mask: PackedMask) -> tuple[Int, Int]:
    """The window of a kernel that aligns the last query b - 1 with the last key min(end, b + right) - 1.

    Seen from there the query's own position lies `ahead` = (keys after it) back, so both sides shift by it. A side
    that hides no key of the piece is written as "no limit" where that lets more pieces share a launch.
    """
    no_limit = np.full(len(a), -1, dtype=np.int64)
    if mask.right is None:
        ahead, right, clipped = end - b, no_limit, np.ones(len(a), dtype=np.bool_)
    else:
        ahead = np.minimum(end - b, mask.right)
        clipped = (mask.right > 0) & (b < end) & (a >= end - mask.right)
        right = np.where(clipped, -1, mask.right - ahead)
    if mask.left is None:
        return no_limit, right
    hides = b - 1 - mask.left > first
    return np.where(clipped & ~hides, -1, mask.left + ahead), right


def _rank_launches(pieces: Pieces) -> tuple[Int, Int]:
    """(order, launch): pieces by rank, launch and local row; launches of a rank are numbered by falling work."""
    if len(pieces) == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    keys = np.stack([pieces.rank, pieces.left, pieces.right], axis=1)
    kinds, kind = np.unique(keys, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    work = np.bincount(kind, weights=(pieces.q1 - pieces.q0) * (pieces.key1 - pieces.key0).astype(np.float64))
    by_work = np.lexsort((-work, kinds[:, 0]))
    first = np.searchsorted(kinds[by_work, 0], kinds[by_work, 0])
    number = np.empty(len(kinds), dtype=np.int64)
    number[by_work] = np.arange(len(kinds)) - first
    launch = number[kind]
    order = np.lexsort((pieces.q0, launch, pieces.rank))
    return order, launch[order]


def _launches(table: Int) -> Int:
    """(G, 4) left, right, max_q, max_k of the launches in a rank's piece table."""
    count = int(table[:, 6].max(initial=-1)) + 1
    launches = np.zeros((max(count, 2), 4), dtype=np.int64)
    launches[table[:, 6], :2] = table[:, 4:6]
    np.maximum.at(launches[:, 2], table[:, 6], table[:, 1] - table[:, 0])
    np.maximum.at(launches[:, 3], table[:, 6], table[:, 3] - table[:, 2])
    return launches


def _cover_rows(pieces: Pieces, rows: int) -> tuple[Int, Int]:
    """cu_seqlens over all local rows: the pieces, and entries with no key for the rows between them."""
    zero = np.zeros(len(pieces), dtype=np.int64)
    keys = np.stack([zero, pieces.key1 - pieces.key0], axis=1).reshape(-1)
    bounds = np.append(np.stack([pieces.q0, pieces.q1], axis=1).reshape(-1), rows)
    lengths = np.diff(bounds, prepend=0)
    keep = lengths > 0
    cu_k = np.concatenate([[0], np.cumsum(np.append(keys, 0)[keep])])
    return np.concatenate([[0], bounds[keep]]), cu_k


def _at_least(array: NDArray[D], size: int, fill: int | None = None) -> NDArray[D]:
    """`array` with its leading dim filled up to `size` with `fill`, or with its last entry."""
    missing = size - len(array)
    if missing <= 0:
        return array
    tail = np.full((missing, *array.shape[1:]), array[-1] if fill is None else fill, dtype=array.dtype)
    return np.concatenate([array, tail])


def _index(rows: Int) -> Int32:
    return _at_least(rows.astype(np.int32), 2, 0)
