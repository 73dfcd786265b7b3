"""How many keys the first queries of a document see: work of a part of a document, without tiles, in closed form."""

from __future__ import annotations

import numpy as np

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.tiles import Float
from cp_rewrite.planning.intervals import Int

_UNLIMITED = 1 << 40
"""Stands for a side of a window without a limit: longer than any document."""


class SeenKeys:
    """Pairs of a query and a key that it sees, of the first x queries of a document, under one mask.

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

    def of_one(self, length: int, x: int) -> float:
        """`of` for one document, in plain numbers: the search asks for one at a time, where arrays are slow."""
        if self._causal:
            return x * (x + 1) / 2
        after = _sum_of_min(length, self._right) - _sum_of_min(length - x, self._right)
        return x + _sum_of_min(x, self._left) + after


def _sum_of_min(y: int, limit: int) -> float:
    """Sum of min(i, limit) for i in [0, y)."""
    short = min(y, limit + 1)
    return short * (short - 1) / 2 + (y - short) * limit


def _sums_of_min(y: Int, limit: int) -> Float:
    """`_sum_of_min` of each of (N,) int64."""
    short = np.minimum(y, limit + 1).astype(np.float64)
    return short * (short - 1) / 2 + (y - short) * limit
