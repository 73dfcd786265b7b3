"""Parts of documents on a line: where to cut them, and what work the pieces do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

import numpy as np

from .documents import Documents
from .intervals import Int
from .masks import PackedMask
from .tiles import TILE, Float, window_tiles


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of documents: part i is tokens [start, start + size) of the row, from token `first` of its document on.

    Args:
        start, size, document, first: (N,) int64; `document` is the length of the document that the part is of.
        work: (N,) float64, in tiles.
    """

    start: Int
    size: Int
    document: Int
    first: Int
    work: Float

    def take(self, index: Int | slice) -> Parts:
        """The parts at `index`."""
        return Parts(self.start[index], self.size[index], self.document[index], self.first[index], self.work[index])

    def cut(self, lo: int, hi: int, left: int, right: int, work: Float) -> Parts:
        """Parts [lo, hi), less `left` tokens of the first and `right` of the last; `work` is what they then do."""
        start, size, first = self.start[lo:hi].copy(), self.size[lo:hi].copy(), self.first[lo:hi].copy()
        start[0] += left
        first[0] += left
        size[0] -= left
        size[-1] -= right
        return Parts(start, size, self.document[lo:hi], first, work)

    @classmethod
    def join(cls, parts: Sequence[Parts]) -> Parts:
        """All of them, one after another."""
        columns = zip(*((p.start, p.size, p.document, p.first, p.work) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    @classmethod
    def of_row(cls, documents: Documents, mask: PackedMask, unit: int = 1) -> Parts:
        """The row's documents, and its padding as parts without work.

        Sizes are rounded up to multiples of `unit`, of which documents' starts are multiples too.
        """
        real = documents.lengths > 0
        starts, lengths = documents.starts[real], -(-documents.lengths[real] // unit) * unit
        total = -(-documents.total // unit) * unit
        if not mask.packed:
            starts, lengths = np.zeros(1, dtype=np.int64), np.array([total])
        ends = starts + lengths
        gap_starts = np.append(0, ends)
        gaps = np.append(starts, total) - gap_starts
        start, size = np.append(starts, gap_starts), np.append(lengths, gaps)
        real = np.append(np.ones(len(lengths)), np.zeros(len(gaps)))
        parts = cls(start, size, size, np.zeros_like(size), real).take(np.flatnonzero(size > 0))
        return replace(parts, work=part_tiles(parts, mask))


def part_tiles(parts: Parts, mask: PackedMask) -> Float:
    """(N,) what each part really costs as a piece of its own, in tiles; parts of no work cost nothing."""
    end = parts.first + parts.size
    no_limit = np.full_like(end, -1)
    ahead = parts.document - end if mask.right is None else np.minimum(parts.document - end, mask.right)
    key0 = np.zeros_like(end) if mask.left is None else np.maximum(0, parts.first - mask.left)
    left = no_limit if mask.left is None else mask.left + ahead
    right = no_limit if mask.right is None else mask.right - ahead
    tiles = window_tiles(parts.size, end + ahead - key0, left, right)
    return np.where(parts.work > 0, tiles, 0.0)


class Line:
    """Parts in a row, addressed by token: position x lies in part bisect(bounds, x)."""

    def __init__(self, parts: Parts, mask: PackedMask) -> None:
        self.parts = parts
        self.bounds: list[int] = [0, *np.cumsum(parts.size).tolist()]
        self.before: list[float] = [0.0, *np.cumsum(parts.work).tolist()]
        self.size = self.bounds[-1]
        self._last = len(self.bounds) - 1
        self._seen = SeenKeys(mask)
        self._rates: dict[int, tuple[int, int, float, float]] = {}

    def index(self, x: int) -> int:
        """The part that holds token x; the last one for the end of the line."""
        return bisect_right(self.bounds, x, 0, self._last) - 1

    def aligned(self, x: int, unit: int) -> int:
        """The first position from x on where a cut does not add a tile row: between tiles, or between parts.

        Of x and the bounds of parts, which are multiples of `unit`, it is one too.
        """
        i = self.index(x)
        inside = x - self.bounds[i] + int(self.parts.first[i])
        return min(x + -inside % lcm(TILE, unit), self.bounds[i + 1])

    def work(self, x: int) -> float:
        """Work of tokens [0, x)."""
        i = bisect_right(self.bounds, x, 0, self._last) - 1
        inside = x - self.bounds[i]
        return self.before[i] + self._inside(i, inside) if inside else self.before[i]

    def _inside(self, i: int, x: int) -> float:
        """Work of the first x tokens of part i: it goes by the keys that their queries see."""
        known = self._rates.get(i)
        if known is None:
            document, first = int(self.parts.document[i]), int(self.parts.first[i])
            size = self.bounds[i + 1] - self.bounds[i]
            base = self._seen.of_one(document, first)
            seen = self._seen.of_one(document, first + size) - base
            known = self._rates[i] = document, first, base, (self.before[i + 1] - self.before[i]) / seen
        document, first, base, rate = known
        return rate * (self._seen.of_one(document, first + x) - base)

    def split(self, runs: Sequence[tuple[int, int]]) -> tuple[Parts, Parts]:
        """(parts of the runs, all other parts). Runs ascend."""
        edges = [0, *(edge for run in runs for edge in run), self.size]
        pieces = [self.run(lo, hi) if lo < hi else None for lo, hi in pairwise(edges)]
        inside = [piece for piece in pieces[1::2] if piece is not None]
        outside = [piece for piece in pieces[0::2] if piece is not None]
        return Parts.join(inside or [self.none]), Parts.join(outside or [self.none])

    def pick(self, chosen: list[int]) -> tuple[Parts, Parts]:
        """(chosen parts, others)."""
        keep = np.ones(len(self.parts.size), dtype=np.bool_)
        keep[chosen] = False
        return self.parts.take(np.array(chosen, dtype=np.int64)), self.parts.take(np.flatnonzero(keep))

    @property
    def none(self) -> Parts:
        return self.parts.take(slice(0, 0))

    def run(self, lo: int, hi: int) -> Parts:
        """The parts of tokens [lo, hi), the outer two cut."""
        i, j = self.index(lo), self.index(hi - 1)
        work = self.parts.work[i : j + 1].copy()
        left, right = lo - self.bounds[i], self.bounds[j + 1] - hi
        if right:
            work[-1] = self._inside(j, self.bounds[j + 1] - self.bounds[j] - right)
        if left:
            work[0] -= self._inside(i, left)
        return self.parts.cut(i, j + 1, left, right, work)


class SeenKeys:
    """Keys that the first x queries of a document see, all together."""

    def __init__(self, mask: PackedMask) -> None:
        self._left = UNLIMITED if mask.left is None else mask.left
        self._right = UNLIMITED if mask.right is None else mask.right
        self._causal = self._right == 0 and self._left == UNLIMITED

    def of(self, length: Int, x: Int) -> Float:
        """(N,) for the first x of `length` queries each."""
        if self._causal:
            return x * (x + 1.0) / 2
        after = _ramps(length, self._right) - _ramps(length - x, self._right)
        return x + _ramps(x, self._left) + after

    def of_one(self, length: int, x: int) -> float:
        """The same for one document."""
        if self._causal:
            return x * (x + 1) / 2
        after = _ramp(length, self._right) - _ramp(length - x, self._right)
        return x + _ramp(x, self._left) + after


UNLIMITED = 1 << 40


def _ramp(y: int, limit: int) -> float:
    """Sum of min(i, limit) for i in [0, y)."""
    short = min(y, limit + 1)
    return short * (short - 1) / 2 + (y - short) * limit


def _ramps(y: Int, limit: int) -> Float:
    short = np.minimum(y, limit + 1).astype(np.float64)
    return short * (short - 1) / 2 + (y - short) * limit
