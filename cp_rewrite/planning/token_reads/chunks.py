"""Chunks of the pieces of a rank, in the order in which states pass through them.

A piece is a run of local rows. It is cut into chunks of `CHUNK` rows from its start; the last may have fewer. Chunks of
one piece run one after another, those of different pieces at once: they are sorted by level, their number in the piece,
and then by piece, long pieces first, so that the pieces that still run are always the first ones:

    chunks of 3 pieces   a0 a1 a2, b0 b1, c0        level-major  a0 b0 c0 | a1 b1 | a2        levels  3 2 1
"""

from __future__ import annotations

import numpy as np

from cp_rewrite.planning.intervals import Int

CHUNK = 64


def level_major(counts: Int) -> tuple[Int, Int, Int]:
    """Steps of chains of so many steps, descending: (steps of each level, chain of each step, level of each step)."""
    chain = np.repeat(np.arange(len(counts)), counts)
    level = np.arange(len(chain)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((chain, level))
    return np.bincount(level), chain[order], level[order]


def chunk_rows(starts: Int, lengths: Int) -> tuple[Int, Int]:
    """Chunks of pieces [start, start + length), none empty, sorted by their number of chunks, descending.

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
