"""Parts of documents on a line: where to cut them, and what work the pieces do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.tiles import TILE, Float, window_tiles


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of documents: part i is tokens [start, start + size) of the row, from token `first` of its document on.

    Args:
        table: (4, N) int64: start, size, document (the length of the document that the part is of), first.
        work: (N,) float64, in tiles.
    """

    table: Int
    work: Float

    def __len__(self) -> int:
        return len(self.work)

    @property
    def start(self) -> Int:
        return self.table[0]

    @property
    def size(self) -> Int:
        return self.table[1]

    @property
    def document(self) -> Int:
        return self.table[2]

    @property
    def first(self) -> Int:
        return self.table[3]

    def take(self, index: Int) -> Parts:
        """The parts at `index`."""
        return Parts(self.table.take(index, 1), self.work.take(index))

    def split(self, chosen: Int) -> tuple[Parts, Parts]:
        """(chosen parts, others)."""
        keep = np.ones(len(self), dtype=np.bool_)
        keep[chosen] = False
        return self.take(chosen), self.take(np.flatnonzero(keep))

    def cut(self, lo: int, hi: int, left: int = 0, right: int = 0) -> Parts:
        """Parts [lo, hi), less `left` tokens of the first and `right` of the last; their work is as it was."""
        table = self.table[:, lo:hi]
        if left or right:
            table = table.copy()
            table[0, 0] += left
            table[3, 0] += left
            table[1, 0] -= left
            table[1, -1] -= right
        return Parts(table, self.work[lo:hi])

    @classmethod
    def join(cls, parts: Sequence[Parts]) -> Parts:
        """All of them, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([p.table for p in parts], axis=1), np.concatenate([p.work for p in parts]))

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
        parts = cls(np.stack([start, size, size, np.zeros_like(size)]), real).take(np.flatnonzero(size > 0))
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

    def __init__(self, parts: Parts, seen: SeenKeys) -> None:
        self.parts = parts
        self.seen = seen
        self.bounds: list[int] = [0, *parts.size.cumsum().tolist()]
        self.before: list[float] = [0.0, *parts.work.cumsum().tolist()]
        self.size = self.bounds[-1]
        self._last = len(self.bounds) - 1
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
            base = self.seen.of_one(document, first)
            seen = self.seen.of_one(document, first + size) - base
            known = self._rates[i] = document, first, base, (self.before[i + 1] - self.before[i]) / seen
        document, first, base, rate = known
        return rate * (self.seen.of_one(document, first + x) - base)

    def split(self, lo: int, hi: int) -> tuple[Parts, Parts]:
        """(the parts of tokens [lo, hi), all other parts)."""
        return self.run(lo, hi), Parts.join([self.run(0, lo), self.run(hi, self.size)])

    def run(self, lo: int, hi: int) -> Parts:
        """The parts of tokens [lo, hi), the outer two cut."""
        if lo == hi:
            return self.parts.cut(0, 0)
        i, j = self.index(lo), self.index(hi - 1)
        left, right = lo - self.bounds[i], self.bounds[j + 1] - hi
        run = self.parts.cut(i, j + 1, left, right)
        if left or right:
            work = run.work.copy()
            if right:
                work[-1] = self._inside(j, self.bounds[j + 1] - self.bounds[j] - right)
            if left:
                work[0] -= self._inside(i, left)
            run = Parts(run.table, work)
        return run


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
