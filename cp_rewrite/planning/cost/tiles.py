"""Attention work: as a flash kernel feels it, in tiles of 128 queries x 128 keys, counted per query head
(`window_tiles`, `causal_tiles`); and without tiles, of a part of a document, by how many keys its queries see
(`SeenKeys`).

A kernel works on whole tiles, row of tiles by row of tiles; a piece of 10 queries costs as much as one of 128. Each
row of tiles costs `TILE_ROW_OVERHEAD` tiles more, to fill and drain the pipeline.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.intervals import Int

from .constants import TILE, TILE_ROW_OVERHEAD

Float = NDArray[np.float64]


def window_tiles(queries: Int, keys: Int, left: Int, right: Int) -> Float:
    """(N,) float64: the tiles of each piece, with the overhead of its rows of tiles.

    Args:
        queries, keys: (N,) int64 number of queries and of keys of each piece.
        left, right: (N,) int64 window of the kernel, aligned at the bottom right (see `pieces`); -1: no limit.
    """
    if not (left >= 0).any() and not (right > 0).any():
        return _unlimited_tiles(queries, keys, right)
    # Query i stands at key i + shift. Row i of tiles, of queries from 128 i on, sees keys [low, high).
    rows, full, shift = -(-queries // TILE), -(-keys // TILE), keys - queries
    inner = np.maximum(rows - 1, 0)
    # high: the end of row i, in tiles, is i + 1 + after, `full` at most; of the last row that of its last query.
    after = np.where(right < 0, full, -((-shift - right) // TILE))
    below = np.clip(full - after, 0, inner)
    last = np.where(right < 0, full, np.minimum(full, -((-keys - right) // TILE)))
    high = below * after + below * (below + 1) // 2 + (inner - below) * full + np.where(rows > 0, last, 0)
    # low: the start of row i is i + before, and 0 at least.
    before = (shift - left) // TILE
    none = np.where(left < 0, rows, np.clip(-before, 0, rows))
    low = (rows - none) * before + (rows - none) * (rows - 1 + none) // 2
    return high - low + TILE_ROW_OVERHEAD * rows


def _unlimited_tiles(queries: Int, keys: Int, right: Int) -> Float:
    """`window_tiles` in closed form, where no left side is limited and each right side is 0 (causal) or not limited."""
    if (right == 0).all():
        return causal_tiles(queries, keys - queries)
    rows, full = -(-queries // TILE), -(-keys // TILE)
    return np.where(right < 0, rows * full + TILE_ROW_OVERHEAD * rows, causal_tiles(queries, keys - queries))


def causal_tiles(queries: Int, before: Int) -> Float:
    """(N,) float64: `window_tiles` of causal pieces without a limit to the left, behind `before` keys of theirs.

    Row i of a piece's tiles ends ceil((before + 128 (i + 1)) / 128) tiles in, the last one at its keys.
    """
    rows = (queries + (TILE - 1)) // TILE
    inner = rows - 1
    full = (before + queries + (TILE - 1)) // TILE
    return inner * ((before + (TILE - 1)) // TILE) + inner * rows / 2 + full + TILE_ROW_OVERHEAD * rows


def imbalance(work: Float) -> float:
    """The most work of a rank over the mean of ranks; 1.0 where there is no work. `work` is (P,), in any unit."""
    mean = float(work.mean())
    return float(work.max()) / mean if mean else 1.0


_UNLIMITED = 1 << 40
"""Stands for a side of a window without a limit: longer than any document."""


class SeenKeys:
    """Pairs of a query and a key that it sees, of the first x queries of a document, under one mask, in closed form.

    Query i sees itself, min(i, left) keys before it and min(length - 1 - i, right) keys after it.

        length 4, causal    x  0 1 2 3  4
                            of 0 1 3 6 10
    """

    def __init__(self, mask: PackedMask) -> None:
        self.mask = mask
        self._left = _UNLIMITED if mask.left is None else mask.left
        self._right = _UNLIMITED if mask.right is None else mask.right
        self._causal = self._right == 0 and self._left == _UNLIMITED

    def of(self, length: Int, x: Int) -> Float:
        """(N,) float64 for N documents: of the first x of `length` queries each, both (N,) int64."""
        if self._causal:
            return x * (x + 1.0) / 2
        after = _sums_of_min(length, self._right) - _sums_of_min(length - x, self._right)
        return x + _sums_of_min(x, self._left) + after


def _sums_of_min(y: Int, limit: int) -> Float:
    """(N,) sums of min(i, limit) for i in [0, y), of (N,) y."""
    short = np.minimum(y, limit + 1).astype(np.float64)
    return short * (short - 1) / 2 + (y - short) * limit
