"""Attention work as a flash kernel feels it: tiles of 128 queries x 128 keys.

A piece of 10 rows costs whole tiles, and every tile row costs about 2.7 tiles more to fill and drain the pipeline: with
that, one document of 32K tokens, 24 documents of mixed lengths and 64 documents of 512 fit one kernel speed (measured
on an H200). Work is counted per head.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intervals import Int, expand_ranges

TILE = 128
TILE_ROW_OVERHEAD = 2.7

Float = NDArray[np.float64]


def window_tiles(queries: Int, keys: Int, left: Int, right: Int) -> Float:
    """(N,) work of pieces in tiles, tile-row overhead included.

    Args:
        queries, keys: (N,) rows of each piece.
        left, right: (N,) kernel window, aligned at the bottom right; -1: no limit.
    """
    if not (left >= 0).any() and not (right > 0).any():
        return _unlimited_tiles(queries, keys, right)
    tile_rows = -(-queries // TILE)
    first = expand_ranges(np.zeros_like(queries), tile_rows) * TILE
    piece = np.repeat(np.arange(len(queries)), tile_rows)
    ahead = (keys - queries)[piece]
    last = np.minimum(first + TILE, queries[piece]) - 1
    high = np.where(right[piece] < 0, keys[piece], np.minimum(keys[piece], last + ahead + right[piece] + 1))
    low = np.where(left[piece] < 0, 0, np.maximum(0, first + ahead - left[piece]))
    tiles = -(-high // TILE) - low // TILE
    return np.bincount(piece, tiles + TILE_ROW_OVERHEAD, len(queries)).astype(np.float64)


def _unlimited_tiles(queries: Int, keys: Int, right: Int) -> Float:
    """The same in closed form where no left side limits, and the right side is 0 (causal) or has no limit.

    Tile row i of a causal piece ends ceil((keys - queries + 128 (i + 1)) / 128) tiles in, the last one at its keys.
    """
    rows = -(-queries // TILE)
    full = -(-keys // TILE)
    base = -(-(keys - queries) // TILE)
    causal = np.where(rows > 0, (rows - 1) * base + rows * (rows - 1) / 2 + full, 0)
    return np.where(right < 0, rows * full, causal).astype(np.float64) + TILE_ROW_OVERHEAD * rows


def imbalance(work: Float) -> float:
    """Work of the slowest rank over the mean; 1.0 when there is no work."""
    mean = float(work.mean())
    return float(work.max()) / mean if mean else 1.0
