"""Slices of several groups, one line behind another, cut anywhere: positions and work of many cuts at once.

slices      size 5, work 10    size 2, work 1
bounds      0                  5                7
before      0                  10               11        work before each bound; `work(x)` between them
"""

from __future__ import annotations

import numpy as np

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.cost.tiles import Float
from cp_rewrite.planning.intervals import Int

from .slices import Slices, slice_tiles


def tenths(table: Int, real: Float, mask: PackedMask) -> Float:
    """(N,) float64 whole numbers: what each slice of a table costs, in tenths of tiles; nothing where `real` is 0."""
    return np.rint(10 * slice_tiles(Slices(table, real), mask))


def parts(slices: Slices, start: Int, stop: Int, mask: PackedMask) -> Slices:
    """Tokens [start, stop) of slices, each as a slice of its own; work in tenths."""
    table = slices.table.copy()
    table[0] += start
    table[3] += start
    table[1] = stop - start
    return Slices(table, tenths(table, slices.work, mask))


def part_work(slices: Slices, i: Int, x: Int, seen: SeenKeys) -> Float:
    """Work of the first x tokens of the slices at `i`: a slice's work, shared out by the keys that its queries see."""
    length, first, size = slices.document_length.take(i), slices.first.take(i), slices.size.take(i)
    base = seen.of(length, first)
    share = (seen.of(length, first + x) - base) / (seen.of(length, first + size) - base)
    if seen.mask.spans:
        share = np.where(slices.full.take(i) > 0, x / size, share)
    return slices.work.take(i) * share


class SliceLines:
    """Slices one behind another. Args: seen: what attention sees."""

    def __init__(self, slices: Slices, seen: SeenKeys) -> None:
        self.slices, self._seen = slices, seen
        self.bounds = np.append(0, np.cumsum(slices.size))
        self.before = np.append(0.0, np.cumsum(slices.work))

    def index(self, x: Int) -> Int:
        """The slice that holds each position; the last one for the end of all lines."""
        return np.minimum(self.bounds.searchsorted(x, side="right") - 1, len(self.slices) - 1)

    def work(self, x: Int) -> Float:
        """Work before each position."""
        i = self.index(x)
        return self.before[i] + part_work(self.slices, i, x - self.bounds[i], self._seen)

    def run_work(self, x: Int, y: Int) -> tuple[Float, Float]:
        """(work of the runs [x, y), cut to pieces; what both cuts add to the work of all), in tiles as kernels see."""
        i, j = self.index(x), self.index(y)
        a, b = x - self.bounds[i], y - self.bounds[j]
        one, none = i == j, np.zeros_like(a)
        size_i, size_j = self.slices.size[i], self.slices.size[j]
        starts, stops = [a, none, none, b], [np.where(one, b, size_i), b, a, size_j]
        ends = self.slices.take(np.stack([i, j, i, j]).reshape(-1))
        costs = parts(ends, np.stack(starts).reshape(-1), np.stack(stops).reshape(-1), self._seen.mask).work
        first, last, left, right = costs.reshape(4, *x.shape)
        last, right = np.where(one, 0, last), np.where(b > 0, right, 0)
        inside = np.where(one, first, self.before[j] - self.before[i + 1] + first + last)
        whole = self.before[np.where(b > 0, j + 1, j)] - self.before[i]
        return inside, inside + left + right - whole

    def before_cut(self, x: Int) -> Int:
        """Keys of a document before each position that cuts it, else 0."""
        i = self.index(x)
        inside = x - self.bounds[i]
        return np.where((inside > 0) & (inside < self.slices.size[i]), self.slices.first[i] + inside, 0)

    def cut(self, x: Int) -> tuple[Slices, Int]:
        """(the slices, cut at all of these positions; the position of each)."""
        x = np.sort(x)
        i = self.index(x)
        inside = (x > self.bounds[i]) & (x < self.bounds[-1]) & (np.diff(x, prepend=-1) > 0)
        x, i, count = x[inside], i[inside], len(self.slices)
        part_of = np.repeat(np.arange(count), np.bincount(i, minlength=count) + 1)
        at = self.bounds[:-1][part_of]
        at[i + np.arange(1, len(i) + 1)] = x
        made = self.slices.take(part_of)
        inside = at - self.bounds[part_of]
        made.table[0] += inside
        made.table[3] += inside
        size = np.diff(at, append=self.bounds[-1])
        changed = np.flatnonzero(size != made.size)
        made.table[1] = size
        made.work[changed] = tenths(made.table[:, changed], made.work[changed], self._seen.mask)
        return made, at
