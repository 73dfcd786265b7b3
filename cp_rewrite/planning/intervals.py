"""Arithmetic on many ranges [start, stop) at once, so that no plan ever loops over tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


def expand_ranges(starts: Int, lengths: Int) -> Int:
    """All members of [start, start + length), range after range.

    starts [5, 0], lengths [3, 2]  ->  [5, 6, 7, 0, 1]
    """
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def overlaps(starts: Int, stops: Int, part_starts: Int, part_stops: Int) -> tuple[Int, Int]:
    """Index pairs (i, j) of every range i that shares a member with part j, by range, then by part.

    Args:
        starts, stops: (N,) non-empty ranges, in any order.
        part_starts, part_stops: (M,) non-empty, disjoint, ascending.
    """
    first = np.searchsorted(part_stops, starts, side="right")
    last = np.searchsorted(part_starts, stops, side="left")
    counts = np.maximum(last - first, 0)
    return np.repeat(np.arange(len(starts)), counts), expand_ranges(first, counts)


def union(starts: Int, stops: Int) -> tuple[Int, Int]:
    """The union of non-empty ranges as disjoint ranges that don't touch, ascending: (starts, stops)."""
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    new = np.ones(len(starts), dtype=np.bool_)
    new[1:] = starts[1:] > reach[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    return starts[first], reach[last]


def group_rows(rows: Int, size: int) -> tuple[Int, Int]:
    """A CSR index of `rows` (values in [0, size)): (ptr (size + 1,), members), members of each group ascending."""
    ptr = np.zeros(size + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=size), out=ptr[1:])
    return ptr, np.argsort(rows, kind="stable")


def sum_lists(rows: Int, size: int) -> tuple[Int, Int]:
    """Which members each row in [0, size) sums, in the form of `ops.sum_rows`: (ptr (size + 1,), lists).

    Members i with `rows[i]` = r, ascending: the first two are lists[2 r] and lists[2 r + 1], -1 where there is none;
    the others lists[ptr[r]:ptr[r + 1]], after all those pairs.
    """
    start, members = group_rows(rows, size)
    counts = np.diff(start)
    row = np.repeat(np.arange(size), counts)
    number = np.arange(len(rows)) - start[row]
    pairs = np.full(2 * size, -1, dtype=np.int64)
    paired = number < 2
    pairs[(2 * row + number)[paired]] = members[paired]
    ptr = np.full(size + 1, 2 * size, dtype=np.int64)
    ptr[1:] += np.cumsum(np.maximum(counts - 2, 0))
    return ptr, np.concatenate([pairs, members[~paired]])
