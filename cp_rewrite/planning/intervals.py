"""Arithmetic on many ranges [start, stop) at once, so that no plan ever loops over tokens; and chunks of many ranges,
in the order in which states pass through them (`level_major`, `chunk_rows`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


def expand_ranges(starts: Int, lengths: Int) -> Int:
    """All members of the N ranges [start, start + length), range after range.

    starts [5, 0], lengths [3, 2]  ->  [5, 6, 7, 0, 1]
    """
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def overlaps(starts: Int, stops: Int, part_starts: Int, part_stops: Int) -> tuple[Int, Int]:
    """All pairs of a range i and a part j that share a member: (every i, every j), by range, then by part.

        ranges [0, 5) [4, 6)     parts [0, 3) [3, 4) [4, 9)     ->  [0, 0, 0, 1], [0, 1, 2, 2]

    Args:
        starts, stops: (N,) non-empty ranges, in any order.
        part_starts, part_stops: (M,) non-empty, disjoint, ascending.
    """
    # Of the ascending parts, those that overlap a range are neighbours: from the first that ends after the range starts
    # to the last that starts before it ends.
    first = np.searchsorted(part_stops, starts, side="right")
    last = np.searchsorted(part_starts, stops, side="left")
    counts = np.maximum(last - first, 0)
    return np.repeat(np.arange(len(starts)), counts), expand_ranges(first, counts)


def union(starts: Int, stops: Int) -> tuple[Int, Int]:
    """The union of non-empty ranges, as ascending ranges that neither overlap nor touch: (starts, stops).

    [4, 6) [0, 2) [1, 4) [8, 9)  ->  [0, 6) [8, 9)
    """
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])  # how far the ranges up to each one reach
    new = np.ones(len(starts), dtype=np.bool_)
    new[1:] = starts[1:] > reach[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    return starts[first], reach[last]


def group_rows(rows: Int, size: int) -> tuple[Int, Int]:
    """Where each value stands in `rows`, whose values are in [0, size): (ptr (size + 1,), members (len(rows),)).

    Value v stands at members[ptr[v]:ptr[v + 1]], ascending.

        rows [2, 0, 2], size 3  ->  ptr [0, 1, 1, 3], members [1, 0, 2]
    """
    ptr = np.zeros(size + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=size), out=ptr[1:])
    return ptr, np.argsort(rows, kind="stable")


def sum_lists(rows: Int, size: int) -> tuple[Int, Int]:
    """`group_rows` in the form that `ops.sum_rows` reads: (ptr (size + 1,), lists).

    Most rows have one or two members, so these stand where they are found without `ptr`: the members of row r are
    lists[2 r] and lists[2 r + 1], -1 where there is none, and, if there are more, lists[ptr[r]:ptr[r + 1]].

        rows [1, 0, 1, 1], size 2  ->  lists [1, -1 | 0, 2 | 3], ptr [4, 4, 5]
    """
    start, members = group_rows(rows, size)
    counts = np.diff(start)
    row = np.repeat(np.arange(size), counts)
    number = np.arange(len(rows)) - start[row]  # of each member in its row: 0, 1, 2, …
    pairs = np.full(2 * size, -1, dtype=np.int64)
    paired = number < 2
    pairs[(2 * row + number)[paired]] = members[paired]
    ptr = np.full(size + 1, 2 * size, dtype=np.int64)
    ptr[1:] += np.cumsum(np.maximum(counts - 2, 0))
    return ptr, np.concatenate([pairs, members[~paired]])


CHUNK = 64


def level_major(counts: Int) -> tuple[Int, Int, Int]:
    """Steps of chains of so many steps, descending: (steps of each level, chain of each step, level of each step)."""
    chain = np.repeat(np.arange(len(counts)), counts)
    level = np.arange(len(chain)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((chain, level))
    return np.bincount(level), chain[order], level[order]


def chunk_rows(starts: Int, lengths: Int) -> tuple[Int, Int]:
    """Chunks of pieces [start, start + length), none empty, sorted by their number of chunks, descending.

    A piece is a run of local rows. It is cut into chunks of `CHUNK` rows from its start; the last may have fewer.
    Chunks of one piece run one after another, those of different pieces at once: they are sorted by level, their number
    in the piece, and then by piece, long pieces first, so that the pieces that still run are always the first ones:

        chunks of 3 pieces   a0 a1 a2, b0 b1, c0        level-major  a0 b0 c0 | a1 b1 | a2        levels  3 2 1

    Returns:
        (C, CHUNK) row of each place of each chunk, -1: none; (L,) chunks of each level.
    """
    levels, chain, level = level_major(chunk_counts(lengths))
    begin = starts[chain] + level * CHUNK
    rows = begin[:, None] + np.arange(CHUNK)
    return np.where(rows < (starts + lengths)[chain][:, None], rows, -1), levels


def chunk_counts(lengths: Int) -> Int:
    """Chunks of pieces of these lengths."""
    return -(-lengths // CHUNK)
