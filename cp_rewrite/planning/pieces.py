"""Pieces: the units of attention on a rank.

A piece is a maximal run of consecutive tokens of one document (of one of its `sections`) on one rank. It attends to
keys [key0, key1) of its document through one window of a plain kernel, which is aligned at the bottom right, as flash
kernels do where lengths differ: query i of n sees key j of m when  -left <= j - (i + m - n) <= right.

    document of 8 tokens, causal; rank 0 owns [3, 6)

    keys          0 1 2 3 4 5
    query 3       x x x x . .      piece: 3 queries, 6 keys, left -1 (no limit), right 0
    query 4       x x x x x .
    query 5       x x x x x x      the last query is aligned with the last key

A piece of a tree has its ancestors' keys before those of its own node, one behind another: the same window fits.

Tokens of a batch of rows of T tokens are numbered through: token t of row b is b T + t. So are a rank's local rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.masks import PackedMask

from .intervals import Int, overlaps
from .sections import Paths, Sections, path_runs

Segments = tuple[Int, Int, Int, Int]
"""(starts, stops, owners, sources), each (n,) int64: tokens [start, stop) of the batch are the owner's local rows
source, source + 1, …"""


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of all ranks, by rank, then by local row: one entry per piece in each (N,) int64 array.

    Args:
        rank: the owner.
        q0, q1: queries: local rows [q0, q1) of the owner.
        key0, key1: keys: tokens [key0, key1) of the batch, behind those of its path.
        left, right: the kernel's window for this piece; -1: no limit.
        section: (N,) int64: whose path it has, of `paths`.
        away: (N,) bool: not all of its keys lie in the segment that its queries are in.
        paths: of trees; None: pieces have none.
    """

    rank: Int
    q0: Int
    q1: Int
    key0: Int
    key1: Int
    left: Int
    right: Int
    section: Int
    away: NDArray[np.bool_]
    paths: Paths | None = None

    def take(self, index: Int | slice) -> Pieces:
        """The pieces at `index`."""
        columns = (self.rank, self.q0, self.q1, self.key0, self.key1, self.left, self.right, self.section)
        return Pieces(*(column[index] for column in columns), away=self.away[index], paths=self.paths)

    @cached_property
    def keys(self) -> Int:
        """(N,) int64: how many keys each piece has."""
        own = self.key1 - self.key0
        return own if self.paths is None else own + self.paths.tokens[self.section]

    @cached_property
    def key_runs(self) -> tuple[Int, Int, Int]:
        """(piece, starts, stops), each (M,) int64: runs of tokens whose keys a piece has, by piece, in its order."""
        own = np.arange(len(self))
        if self.paths is None:
            return own, self.key0, self.key1
        piece, starts, stops = path_runs(self.paths, self.section)
        piece = np.append(piece, own)
        order = np.argsort(piece, kind="stable")
        return piece[order], np.append(starts, self.key0)[order], np.append(stops, self.key1)[order]

    def __len__(self) -> int:
        return len(self.rank)


def cut_pieces(segments: Segments, sections: Sections, mask: PackedMask) -> Pieces:
    """All pieces, with their keys and kernel windows.

    Args:
        segments: who owns what.
        sections: of all rows, as tokens of the batch.
        mask: what each query sees.
    """
    starts, stops, owners, sources = segments
    # A piece for each pair of a segment and a section that overlap: tokens [a, b) of the section, keys from first on.
    segment, section = overlaps(starts, stops, sections.starts, sections.ends)
    a = np.maximum(starts[segment], sections.starts[section])
    b = np.minimum(stops[segment], sections.ends[section])
    first, end = sections.first[section], sections.ends[section]
    if mask.right is not None and mask.right > 0:
        # Queries from end - right on see fewer keys to the right: the document's end clips their window. They need
        # another kernel window than the queries before them, so the piece is cut there. Not one that ends with its
        # document: aligned at the document's last key, (left, right) itself is right for all of it.
        cut = np.clip(end - mask.right, a, b)
        whole = (b == end) | (cut == a) | (cut == b)
        cut = np.where(whole, b, cut)
        twice = np.repeat(np.arange(len(a)), np.where(whole, 1, 2))
        second = np.diff(twice, prepend=-1) == 0
        a, b = np.where(second, cut[twice], a[twice]), np.where(second, b[twice], cut[twice])
        segment, section, first, end = segment[twice], section[twice], first[twice], end[twice]
    q0 = sources[segment] + a - starts[segment]
    key0 = first if mask.left is None else np.maximum(first, a - mask.left)
    key1 = end if mask.right is None else np.minimum(end, b + mask.right)
    left, right = _kernel_window(a, b, first, end, mask)
    if sections.full.any():
        full = sections.full[section]
        key1, right = np.where(full, end, key1), np.where(full, -1, right)
        if mask.left is not None:  # aligned at the section's end, which no window of it cuts
            sees_all = b - 1 - mask.left <= first
            left = np.where(full, np.where(sees_all, -1, mask.left + end - b), left)
    away = (key0 < starts[segment]) | (key1 > stops[segment])
    if sections.paths is not None:
        away |= sections.paths.tokens[section] > 0
    return Pieces(owners[segment], q0, q0 + b - a, key0, key1, left, right, section, away, sections.paths)


def _kernel_window(a: Int, b: Int, first: Int, end: Int, mask: PackedMask) -> tuple[Int, Int]:
    """(left, right) of the kernel for pieces [a, b) of documents [first, end).

    The kernel aligns the last query, b - 1, with the last key, min(end, b + right) - 1. The query's own key stands
    `ahead` keys before that one, so both sides of the window shift by `ahead`:

        keys       . . . . . . . .
        b - 1              q - - k      ahead 2: left grows by 2, right shrinks by 2

    A piece whose queries see all its keys takes the window of whole documents, if that hides none of them either, or
    else "no limit": fewer different windows are fewer launches.
    """
    no_limit = np.full(len(a), -1, dtype=np.int64)
    if mask.right is None:
        ahead, right, clipped = end - b, no_limit, np.ones(len(a), dtype=np.bool_)
    else:
        ahead = np.minimum(end - b, mask.right)
        clipped = (mask.right > 0) & (b < end) & (a >= end - mask.right)  # every query sees up to the document's end
        right = np.where(clipped, -1, mask.right - ahead)
    sees_all, fits = clipped, clipped
    if mask.left is not None:
        sees_all = clipped & (b - 1 - mask.left <= first)
        fits = sees_all & (end - first <= mask.left + 1)
    # A clipped piece has at most `right` queries, so a limit of `right` keys after each hides none.
    right = right if mask.right is None else np.where(fits, mask.right, right)
    if mask.left is None:
        return no_limit, right
    return np.where(fits, mask.left, np.where(sees_all, -1, mask.left + ahead)), right


def order_by_launch(pieces: Pieces) -> tuple[Int, Int]:
    """(order, launch), each (N,) int64: pieces by rank, launch and local row, and the launch of each in this order.

    A launch is all pieces of a rank with one window. Launches of a rank are numbered from 0, the one with most pairs of
    queries and keys first.
    """
    if len(pieces) == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if (pieces.left == pieces.left[0]).all() and (pieces.right == pieces.right[0]).all():
        row = pieces.rank * (int(pieces.q0.max()) + 1) + pieces.q0
        return np.argsort(row, kind="stable"), np.zeros(len(pieces), dtype=np.int64)
    # Kinds: pieces of one rank and window, numbered over all ranks.
    by_kind = np.lexsort((pieces.right, pieces.left, pieces.rank))
    rank, left, right = (column[by_kind] for column in (pieces.rank, pieces.left, pieces.right))
    new = np.ones(len(pieces), dtype=np.bool_)
    new[1:] = (rank[1:] != rank[:-1]) | (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    kind = np.empty(len(pieces), dtype=np.int64)
    kind[by_kind] = np.cumsum(new) - 1
    rank = rank[new]  # of each kind, as what follows
    work = np.bincount(kind, weights=(pieces.q1 - pieces.q0) * pieces.keys.astype(np.float64))
    by_work = np.lexsort((-work, rank))
    number = np.empty(len(rank), dtype=np.int64)
    number[by_work] = np.arange(len(rank)) - np.searchsorted(rank, rank)
    launch = number[kind]
    order = np.lexsort((pieces.q0, launch, pieces.rank))
    return order, launch[order]
