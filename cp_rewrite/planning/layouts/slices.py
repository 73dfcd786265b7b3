"""Slices of documents: what is cut and shared out while a layout is searched for.

    documents        A A A A A A A A B B B
    two slices       . . A A A A A . . . .      start 2, size 5, first 2 of a document of 8
                     . . . . . . . . . B B      start 9, size 2, first 1 of a document of 3

Slices of one document that touch on one rank are one piece of its schedule in the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import TILE
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.cost.tiles import Float, causal_tiles, window_tiles
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.sections import sections_of


@dataclass(frozen=True, eq=False)
class Slices:
    """N slices: slice i is tokens [start, start + size) of the row, from token `first` of its document on.

    Args:
        table: (5, N) int64: start, size, length of the document, first, and 1 where all queries see its last key (a
            span), or 0. One array, since slices are taken often.
        work: (N,) float64, in tiles. Padding is held as slices without work.
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
    def document_length(self) -> Int:
        return self.table[2]

    @property
    def first(self) -> Int:
        return self.table[3]

    @property
    def full(self) -> Int:
        return self.table[4]

    def take(self, index: Int) -> Slices:
        """The slices at `index`."""
        return Slices(self.table.take(index, 1), self.work.take(index))

    def split(self, chosen: Int) -> tuple[Slices, Slices]:
        """(the slices at `chosen`, all others)."""
        keep = np.ones(len(self), dtype=np.bool_)
        keep[chosen] = False
        return self.take(chosen), self.take(np.flatnonzero(keep))

    def cut(self, lo: int, hi: int, left: int = 0, right: int = 0) -> Slices:
        """Slices [lo, hi) without `left` tokens of the first and `right` of the last; `work` stays as it was."""
        table = self.table[:, lo:hi]
        if left or right:
            table = table.copy()
            table[0, 0] += left
            table[3, 0] += left
            table[1, 0] -= left
            table[1, -1] -= right
        return Slices(table, self.work[lo:hi])

    @classmethod
    def join(cls, groups: Sequence[Slices]) -> Slices:
        """All of them, group after group."""
        if len(groups) == 1:
            return groups[0]
        return cls(np.concatenate([g.table for g in groups], axis=1), np.concatenate([g.work for g in groups]))

    @classmethod
    def of_row(cls, documents: Documents, mask: PackedMask, unit: int = 1) -> Slices:
        """The row's documents, each as one slice (a slice per section, see `sections`), then its padding as slices
        without work.

        Sizes are rounded up to multiples of `unit`; documents start at multiples of it.
        """
        # Chunks of a mask, spans and nodes need not begin at multiples of `unit`: the search then goes by documents.
        plain = mask if unit == 1 else replace(mask, chunk=None, spans=False, tree=False)
        sections = sections_of(documents, plain)
        starts, lengths = sections.starts, -(-(sections.ends - sections.starts) // unit) * unit
        total = -(-documents.total // unit) * unit
        # Padding: from the row's start or a section's end to the next section or the row's end.
        pad_starts = np.append(0, starts + lengths)
        pad_lengths = np.append(starts, total) - pad_starts
        start, size = np.append(starts, pad_starts), np.append(lengths, pad_lengths)
        none = np.zeros(len(pad_lengths), dtype=np.int64)
        first, full = np.append(sections.before, none), np.append(sections.full.astype(np.int64), none)
        works = np.append(np.ones(len(lengths)), np.zeros(len(pad_lengths)))
        slices = cls(np.stack([start, size, first + size, first, full]), works).take(np.flatnonzero(size > 0))
        return replace(slices, work=slice_tiles(slices, mask))


def slice_tiles(slices: Slices, mask: PackedMask) -> Float:
    """(N,) float64: what each slice costs as a piece of its own, in tiles; nothing where its `work` is 0.

    The keys of a slice [first, end) of its document, with a window (left, right), are [first - left, end + right),
    clipped at the document; those of a full one end with its document. A kernel aligns its window at the last key; so
    both sides shift by the keys after `end`.
    """
    if mask.left is None and mask.right == 0 and not mask.spans:
        return np.where(slices.work > 0, causal_tiles(slices.size, slices.first), 0.0)
    end = slices.first + slices.size
    no_limit = np.full_like(end, -1)
    after = slices.document_length - end
    full = slices.full > 0
    after = after if mask.right is None else np.where(full, after, np.minimum(after, mask.right))
    key0 = np.zeros_like(end) if mask.left is None else np.maximum(0, slices.first - mask.left)
    left = no_limit if mask.left is None else mask.left + after
    right = no_limit if mask.right is None else np.where(full, -1, mask.right - after)
    tiles = window_tiles(slices.size, end + after - key0, left, right)
    return np.where(slices.work > 0, tiles, 0.0)


class SliceLine:
    """Slices one behind another, cut anywhere: `x` is a position on this line, in tokens from its start.

    slices      size 5, work 10    size 2, work 1
    bounds      0                  5                7
    before      0.                 10.              11.        work before each bound; `work(x)` between them
    """

    def __init__(self, slices: Slices, seen: SeenKeys) -> None:
        self.slices = slices
        self.seen = seen
        self.bounds: list[int] = [0, *slices.size.cumsum().tolist()]
        self.before: list[float] = [0.0, *slices.work.cumsum().tolist()]
        self.size = self.bounds[-1]
        self._last = len(self.bounds) - 1
        self._rates: dict[int, tuple[int, int, float, float]] = {}

    def index(self, x: int) -> int:
        """The slice that holds position x; the last one for the end of the line."""
        return bisect_right(self.bounds, x, 0, self._last) - 1

    def aligned(self, x: int, unit: int) -> int:
        """The first position from x on where a cut adds no row of tiles: between two tiles, or between two slices.

        A multiple of `unit`, as x and all bounds are.
        """
        i = self.index(x)
        inside = x - self.bounds[i] + int(self.slices.first[i])
        return min(x + -inside % lcm(TILE, unit), self.bounds[i + 1])

    def work(self, x: int) -> float:
        """Work before position x."""
        i = bisect_right(self.bounds, x, 0, self._last) - 1
        inside = x - self.bounds[i]
        return self.before[i] + self._inside(i, inside) if inside else self.before[i]

    def _inside(self, i: int, x: int) -> float:
        """Work of the first x tokens of slice i: its work, shared out by the keys that its queries see."""
        if self.slices.full[i]:
            return (self.before[i + 1] - self.before[i]) * x / (self.bounds[i + 1] - self.bounds[i])
        known = self._rates.get(i)
        if known is None:
            document, first = int(self.slices.document_length[i]), int(self.slices.first[i])
            size = self.bounds[i + 1] - self.bounds[i]
            base = self.seen.of_one(document, first)
            seen = self.seen.of_one(document, first + size) - base
            known = self._rates[i] = document, first, base, (self.before[i + 1] - self.before[i]) / seen
        document, first, base, rate = known
        return rate * (self.seen.of_one(document, first + x) - base)

    def split(self, lo: int, hi: int) -> tuple[Slices, Slices]:
        """(what lies on [lo, hi), all else)."""
        return self.run(lo, hi), Slices.join([self.run(0, lo), self.run(hi, self.size)])

    def run(self, lo: int, hi: int) -> Slices:
        """The slices that lie on [lo, hi), the first and the last of them cut."""
        if lo == hi:
            return self.slices.cut(0, 0)
        i, j = self.index(lo), self.index(hi - 1)
        left, right = lo - self.bounds[i], self.bounds[j + 1] - hi
        run = self.slices.cut(i, j + 1, left, right)
        if left or right:
            work = run.work.copy()
            if right:
                work[-1] = self._inside(j, self.bounds[j + 1] - self.bounds[j] - right)
            if left:
                work[0] -= self._inside(i, left)
            run = Slices(run.table, work)
        return run
