"""The `balanced` layout: equal tokens and equal attention work on every rank."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from .documents import Documents
from .intervals import Int
from .layouts import TokenOrder
from .masks import PackedMask


def visible(length: float, x: float, mask: PackedMask) -> float:
    """Keys that the first x queries of a document of `length` tokens see, all together."""
    left = length if mask.left is None else mask.left
    right = length if mask.right is None else mask.right

    def ramp(y: float, limit: float) -> float:
        """Sum of min(i, limit) for i in [0, y)."""
        if y <= limit + 1:
            return y * (y - 1) / 2
        return limit * (limit + 1) / 2 + (y - limit - 1) * limit

    return x + ramp(x, left) + ramp(length, right) - ramp(length - x, right)


def balanced(documents: Documents, world_size: int, mask: PackedMask) -> TokenOrder:
    """Each rank takes one run from the sparse and one from the dense end of the documents sorted by length."""
    total = documents.total
    starts, lengths = _parts(documents, mask.packed)
    order = np.lexsort((starts, lengths))
    starts, sizes = starts[order].tolist(), np.abs(lengths[order]).tolist()
    padding = (lengths[order] < 0).tolist()
    line = np.concatenate([[0], np.cumsum(np.abs(lengths[order]))]).tolist()
    work = [0.0]
    for size, empty in zip(sizes, padding, strict=True):
        work.append(work[-1] + (0.0 if empty else visible(size, size, mask)))

    def area(x: int) -> float:
        i = min(bisect_right(line, x), len(sizes)) - 1
        return work[i] + (0.0 if padding[i] else visible(sizes[i], x - line[i], mask))

    low, high = 0, total
    cuts: list[tuple[int, int, int]] = []
    capacity = -(-total // world_size)
    for rank in range(world_size):
        tokens = min(capacity, high - low)
        share = (area(high) - area(low)) / (world_size - rank)
        few, many = 0, tokens
        while few < many:
            top = (few + many) // 2
            taken = area(high) - area(high - top) + area(low + tokens - top) - area(low)
            few, many = (few, top) if taken >= share else (top + 1, many)
        cuts += [(low, low + tokens - few, rank), (high - few, high, rank)]
        low, high = low + tokens - few, high - few
    return _to_row(cuts, line, starts, sizes, world_size, total)


def _parts(documents: Documents, packed: bool) -> tuple[Int, Int]:
    """Starts and lengths of all parts of the row, those of padding negated."""
    if not packed:
        return np.zeros(1, dtype=np.int64), np.array([documents.total])
    gaps = np.concatenate([documents.starts, [documents.total]]) - np.concatenate([[0], documents.ends])
    starts = np.concatenate([documents.starts, [0], documents.ends])
    lengths = np.concatenate([documents.lengths, -gaps])
    return starts[lengths != 0], lengths[lengths != 0]


def _to_row(
    cuts: list[tuple[int, int, int]], line: list[int], starts: list[int], sizes: list[int], world_size: int, total: int
) -> TokenOrder:
    pieces: list[tuple[int, int]] = []
    for lo, hi, rank in cuts:
        i = min(bisect_right(line, lo), len(sizes)) - 1
        while lo < hi:
            pieces.append((starts[i] + lo - line[i], rank))
            lo = min(hi, line[i + 1])
            i += 1
    pieces.sort()
    bounds = np.array([start for start, _ in pieces] + [total], dtype=np.int64)
    return TokenOrder.from_cuts(bounds, np.array([rank for _, rank in pieces], dtype=np.int64), world_size)
