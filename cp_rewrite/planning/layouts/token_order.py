"""A token order: which rank owns which tokens of a row, and in which order it keeps them.

It is held as intervals, not token by token:

    token of the row     0 1 2 3 4 5 6 7
    owner                0 0 1 1 1 1 0 0

    intervals            rank 0: [0, 2) [6, 8)         rank 1: [2, 6)
    in local rows 0…3    rank 0: 0 1 6 7               rank 1: 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cp_rewrite.planning.intervals import Int, expand_ranges


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Who owns the tokens of one row of `total` tokens. Every token has exactly one owner.

    Every rank has `local_size` local rows for them; where it owns fewer tokens, its last local rows are fill.

    Args:
        total: tokens of the row.
        intervals: per rank, (n, 2) int64 intervals (start, stop) of the row, none empty, in the order in which the rank
            keeps them; one does not begin where the one before it ends.
        pad_to_multiple: `local_size` is rounded up to a multiple of it.
    """

    total: int
    intervals: tuple[Int, ...]
    pad_to_multiple: int = 1

    @property
    def world_size(self) -> int:
        return len(self.intervals)

    @cached_property
    def sizes(self) -> Int:
        """(P,) int64 tokens that each rank owns."""
        intervals, owners = self.parts
        lengths = intervals[:, 1] - intervals[:, 0]
        return np.bincount(owners, lengths, self.world_size).astype(np.int64)

    @cached_property
    def parts(self) -> tuple[Int, Int]:
        """((n, 2) intervals of all ranks, rank after rank; (n,) int64 the owner of each)."""
        owners = np.repeat(np.arange(self.world_size), [len(part) for part in self.intervals])
        return np.concatenate(self.intervals), owners

    @cached_property
    def local_size(self) -> int:
        """Local rows of each rank: the most tokens that any rank owns, rounded up."""
        return -(-int(self.sizes.max()) // self.pad_to_multiple) * self.pad_to_multiple

    @property
    def fill_rows(self) -> int:
        """Local rows, over all ranks, that hold no token."""
        return self.local_size * self.world_size - self.total

    def local_indices(self, rank: int) -> Int:
        """(local_size,) int64: the token in each of the rank's local rows, -1 for fill."""
        part = self.intervals[rank]
        indices = np.full(self.local_size, -1, dtype=np.int64)
        indices[: self.sizes[rank]] = expand_ranges(part[:, 0], part[:, 1] - part[:, 0])
        return indices

    def rank_of(self) -> Int:
        """(total,) int64: the owner of each token."""
        _, stops, owners, _ = self.segments
        return np.repeat(owners, np.diff(stops, prepend=0))

    @cached_property
    def segments(self) -> tuple[Int, Int, Int, Int]:
        """The intervals of all ranks by their place in the row: (starts, stops, owners, sources), each (n,) int64.

        They tile [0, total). Tokens [start, stop) are in the owner's local rows source, source + 1, …

            the drawing above     starts 0 2 6     stops 2 6 8     owners 0 1 0     sources 0 0 2
        """
        intervals, owners = self.parts
        lengths = intervals[:, 1] - intervals[:, 0]
        # Tokens of all ranks, rank after rank: those before an interval, less those of the ranks before its owner.
        sources = np.cumsum(lengths) - lengths - (np.cumsum(self.sizes) - self.sizes)[owners]
        order = np.argsort(intervals[:, 0], kind="stable")
        return intervals[order, 0], intervals[order, 1], owners[order], sources[order]

    @classmethod
    def from_cuts(cls, bounds: Int, owners: Int, world_size: int) -> TokenOrder:
        """The order in which rank owners[i] owns tokens [bounds[i], bounds[i + 1]), kept by position in the row.

        Args:
            bounds: (n + 1,) int64, ascending from 0; bounds[-1] is the row's total. Empty ranges are dropped.
            owners: (n,) int64 ranks.
        """
        keep = bounds[1:] > bounds[:-1]
        parts, owners = np.stack([bounds[:-1], bounds[1:]], 1)[keep], owners[keep]
        by_rank = owners.argsort(kind="stable")
        return cls.of_parts(int(bounds[-1]), parts[by_rank], owners[by_rank], world_size)

    @classmethod
    def of_parts(cls, total: int, parts: Int, owners: Int, world_size: int) -> TokenOrder:
        """The order in which rank owners[i], ascending, owns tokens [parts[i, 0], parts[i, 1]), kept as they come.

        Parts of a rank that touch become one interval: [0, 2) [2, 5) [7, 9)  ->  [0, 5) [7, 9)
        """
        first = np.ones(len(owners), dtype=np.bool_)
        first[1:] = (parts[1:, 0] != parts[:-1, 1]) | (owners[1:] != owners[:-1])
        last = np.append(first[1:], True)[: len(owners)]
        intervals = np.stack([parts[first, 0], parts[last, 1]], axis=1)
        splits = owners[first].searchsorted(np.arange(world_size + 1)).tolist()
        return cls(total, tuple(intervals[lo:hi] for lo, hi in pairwise(splits)))


def common_local_size(orders: Sequence[TokenOrder]) -> int:
    """Local rows of each rank for every row of a batch, whose rows have these orders."""
    return max(order.local_size for order in orders)


def outer_order(order: TokenOrder, inner: int) -> TokenOrder:
    """Who owns which tokens where each `inner` ranks are one owner, of all their tokens by position."""
    parts, owners = order.parts
    places = owners // inner
    by_place = np.lexsort((parts[:, 0], places))
    return TokenOrder.of_parts(order.total, parts[by_place], places[by_place], -(-order.world_size // inner))
