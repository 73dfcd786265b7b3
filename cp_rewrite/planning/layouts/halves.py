"""Slices shared out over ranks: ranks are halved again and again, all groups of one depth in one go; then pairs of
ranks swap what the last cuts could not do.

    SliceLines                    slices of several groups, one line behind another, cut anywhere
    share_out_by_halves, halve    the halving
    even_pairs                    the swaps

Work is counted in whole tenths of tiles here: sums are exact, and so the same on every machine. No step loops over
documents; each depth takes some hundred calls of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import ROW_ACROSS, TILE
from cp_rewrite.planning.cost.tiles import Float, SeenKeys
from cp_rewrite.planning.intervals import Int

from .share_out import Slices, slice_tiles


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
    """Slices one behind another, of several groups line behind line: positions and work of many cuts at once.

        slices      size 5, work 10    size 2, work 1
        bounds      0                  5                7
        before      0                  10               11        work before each bound; `work(x)` between them

    Args: seen: what attention sees.
    """

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


@dataclass(frozen=True)
class Whole:
    """Which slices of a group go whole to a half.

    Args:
        most: so many at most; the next number where the halves then differ too much.
        least: share of a rank's work that such a slice has at least.
    """

    most: tuple[int, int, int] = (24, 4, 0)
    least: float = 0.1


SLACK = 0.004
"""Share of a rank's work that is not worth a cut."""
_ENDLESS = 1 << 40
"""Tokens that fit nowhere."""
_PARTS, _ZOOMS = np.linspace(0, 1, 24)[:, None], 3
"""A search looks at so many points of a range, then at as many between two of them, and so on."""


@dataclass(frozen=True)
class Groups:
    """G groups of ranks that are halved.

    Args:
        tokens: (2, G) int64 that each half gets.
        ranks: (2, G) int64 of each half.
        mask, seen, unit: what attention sees; cuts fall on multiples of `unit`.
        across: (G,) whether the halves are in different nodes.
        most, least: (3, G) and (G,) of `Whole`.
    """

    tokens: Int
    ranks: Int
    mask: PackedMask
    seen: SeenKeys
    unit: int
    across: NDArray[np.bool_]
    most: Int
    least: Float

    def take(self, chosen: NDArray[np.bool_]) -> Groups:
        columns = self.tokens[:, chosen], self.ranks[:, chosen]
        whole = self.most[:, chosen], self.least[chosen]
        return Groups(*columns, self.mask, self.seen, self.unit, self.across[chosen], *whole)

    @property
    def step(self) -> int:
        """Cuts at multiples of it, from a slice's end, add no row of tiles."""
        return lcm(TILE, self.unit)

    def slack(self, work: Float) -> Float:
        """(G,) work that is not worth a cut, of groups that do `work`."""
        return SLACK * work / np.sqrt(self.ranks.sum(0))

    def share(self, work: Float) -> Float:
        """(2, G) of each half of `work` (G,)."""
        return work * self.tokens / np.maximum(1, self.tokens.sum(0))  # ranks may get none


def share_out_by_halves(
    slices: Slices,
    quotas: Sequence[int],
    node_size: int,
    mask: PackedMask,
    unit: int = 1,
    ways: Sequence[Whole] = (Whole(),),
) -> tuple[Slices, Int]:
    """(slices, owner): what all ranks get, (N,) int64 the rank of each slice; every rank gets its quota of tokens.

    Nodes come before the ranks of a node, so documents stay in one half, and in one node, while their work allows. The
    slices of a group are shared out so that both halves have their tokens, and the same work per token:

    1. Slices with most work go whole to the half that misses most work, while both halves can still be filled up.
       Of one with too much work for both, one half gets the end, as much as it can do, and the other the rest.
    2. All others stand in a line, from those with least work per token to those with most. One half gets a run of
       it, the other one all else:

           line       sparse . . . . [ run ) . . . . . . . . . . . . . dense

       Where the run starts decides how much work it does. Only its two ends cut slices.

    A single causal document is cut into a zigzag. Several ways are gone at once, in little more time than one: rank r
    of way w owns as rank P w + r.

    Args:
        slices: what there is to share.
        quotas: (P,) tokens of each rank; their sum is that of the slices.
        node_size: ranks that share a node; divides P.
        mask: what attention sees.
        unit: cuts fall on multiples of it; quotas and sizes of slices are multiples of it too.
        ways: which slices are not cut.
    """
    before = np.append(0, np.cumsum(np.tile(np.asarray(quotas, dtype=np.int64), len(ways))))
    slices = Slices(slices.table, tenths(slices.table, slices.work, mask))
    by_density = np.lexsort((slices.start, slices.first, slices.work / slices.size))
    slices, group = slices.take(np.tile(by_density, len(ways))), np.repeat(np.arange(len(ways)), len(slices))
    most, least = np.array([way.most for way in ways]).T, np.array([way.least for way in ways])
    start = np.arange(len(ways)) * len(quotas)
    stop = start + len(quotas)
    seen = SeenKeys(mask)
    done: list[Slices] = []
    owners: list[Int] = []
    while True:
        alone = stop - start == 1
        if alone.all():
            return Slices.join([*done, slices]), np.concatenate([*owners, start[group]])
        if alone.any():
            ready = alone[group]
            done.append(slices.take(np.flatnonzero(ready)))
            owners.append(start[group[ready]])
            slices, group = slices.take(np.flatnonzero(~ready)), (np.cumsum(~alone) - 1)[group[~ready]]
            start, stop = start[~alone], stop[~alone]
        ranks = stop - start
        middle = start + np.where(ranks > node_size, ranks // node_size // 2 * node_size, ranks // 2)
        tokens = np.stack([before[middle] - before[start], before[stop] - before[middle]])
        halves = np.stack([middle - start, stop - middle])
        way = start // len(quotas)
        groups = Groups(tokens, halves, mask, seen, unit, ranks > node_size, most[:, way], least[way])
        slices, group = halve(slices, group, groups)
        start, stop = np.stack([start, middle], 1).reshape(-1), np.stack([middle, stop], 1).reshape(-1)


def halve(slices: Slices, group: Int, groups: Groups, turn: int = 0) -> tuple[Slices, Int]:
    """(slices, half): half h of group g has number 2 g + h. Groups whose halves differ too much are halved once more,
    with fewer slices left whole. Slices are by group, or by half, and then from the sparsest to the densest."""
    made, half, far = _halve_once(slices, group, groups, groups.most[turn])
    fewer = groups.most[min(turn + 1, len(groups.most) - 1)]
    far &= fewer < groups.most[turn]
    if not far.any():
        return made, half
    again = np.flatnonzero(far[group])
    number = np.flatnonzero(far)
    other, its_half = halve(slices.take(again), (np.cumsum(far) - 1)[group[again]], groups.take(far), turn + 1)
    kept = ~far[half // 2]
    made = Slices.join([made.take(np.flatnonzero(kept)), other])
    half = np.append(half[kept], number[its_half // 2] * 2 + its_half % 2)
    order = _by_number(half)
    return made.take(order), half[order]


def owners_work(owner: Int, slices: Slices, count: int) -> Float:
    """(count,) the work of each owner's slices."""
    return np.bincount(owner, slices.work, count).astype(np.float64)


def _by_number(number: Int) -> Int:
    """The order by small numbers, and as they are: numpy sorts two bytes in no time."""
    return np.argsort(number.astype(np.uint16) if number.max(initial=0) < 1 << 16 else number, kind="stable")


def _by_density(slices: Slices, number: Int) -> tuple[Slices, Int]:
    """Slices by number, then from the sparsest to the densest: most of them are so already, which sorts fast."""
    density = slices.work / slices.size
    order = _by_number(number)
    key = number[order] * (density.max(initial=0) + 1) + density[order]
    order = order[np.argsort(key, kind="stable")]
    return slices.take(order), number[order]


def _halve_once(slices: Slices, group: Int, groups: Groups, most: Int) -> tuple[Slices, Int, NDArray[np.bool_]]:
    """(slices, half, whether the work of each group's halves is too far from their shares)."""
    count = groups.tokens.shape[1]
    work = owners_work(group, slices, count)
    placing = _Placing(slices, group, groups, groups.share(work), groups.slack(work))
    placing.run(most)
    slices, group, side = placing.slices, placing.group, placing.side
    placed, number, enough = np.flatnonzero(side >= 0), 2 * group, 2 * groups.slack(work)
    if len(placed) == len(slices):
        return *_by_density(slices, number + side), np.abs(placing.work[1]) > enough
    whole, its_number = slices.take(placed), number[placed] + side[placed]
    if len(placed):
        rest = np.flatnonzero(side < 0)
        slices, group = slices.take(rest), group[rest]
    line, of_group = _line_up(slices, group, count, groups)
    ends = line.bounds[np.searchsorted(of_group, np.arange(count + 1))]
    run, error = _run_start(line, ends, placing, groups)
    stop = run + placing.tokens[1]
    cut, at = line.cut(np.concatenate([run, stop]))
    bounds = np.append(np.stack([ends[:-1], run, stop], 1).reshape(-1), ends[-1])
    halves = 2 * np.arange(count)[:, None] + [0, 1, 0]
    number = np.repeat(halves.reshape(-1), np.diff(np.searchsorted(at, bounds)))
    made = Slices.join([whole, cut]) if len(placed) else cut
    return *_by_density(made, np.append(its_number, number)), error > enough


def _line_up(slices: Slices, group: Int, count: int, groups: Groups) -> tuple[SliceLines, Int]:
    """The slices of each group, from the sparsest to the densest.

    The one with most work comes last where it is denser than the mean: its end has the most work per token.
    """
    work, size = slices.work, slices.size
    most, begin = np.zeros(count), np.searchsorted(group, np.arange(count + 1))
    some = np.flatnonzero(np.diff(begin))
    most[some] = np.maximum.reduceat(work, begin[some])
    first = np.flatnonzero(work == most[group])
    first = first[np.diff(group[first], prepend=-1) > 0]
    mean = np.bincount(group, work, count) / np.maximum(1, np.bincount(group, size, count))
    first = first[work[first] / size[first] >= mean[group[first]]]
    if len(first):
        last = 2 * group
        last[first] += 1
        order = _by_number(last)
        slices, group = slices.take(order), group[order]
    return SliceLines(slices, groups.seen), group


def _run_start(line: SliceLines, bounds: Int, placing: _Placing, groups: Groups) -> tuple[Int, Float]:
    """(where the second half's run starts in each group, how far the halves then are from their shares).

    Starts near the one that does the right work are weighed too: those that cut fewer slices, or between tiles.

    Args: bounds: (G + 1,) of the groups on the line.
    """
    count = groups.tokens.shape[1]
    tokens, work = placing.tokens[1], placing.work[1]
    low, high = bounds[:-1], bounds[1:] - tokens

    def run_work(x: Int) -> Float:
        before, behind = line.work(np.stack([x, x + tokens]))
        return behind - before

    aimed = _first_reaching(run_work, low, high, work, groups.unit)
    i, j = line.index(aimed), line.index(aimed + tokens)
    near = np.arange(-1, 3)[:, None]
    tiles = near * groups.step
    starts = np.concatenate(
        [
            np.stack([aimed, low]),
            line.bounds[np.clip(i + near, 0, len(line.slices))],
            line.bounds[np.clip(j + near, 0, len(line.slices))] - tokens,
            aimed - (aimed - line.bounds[i]) % groups.step + tiles,
            aimed - (aimed + tokens - line.bounds[j]) % groups.step + tiles,
        ]
    )
    starts = np.where((starts >= low) & (starts <= high), starts, aimed)
    done, added = line.run_work(starts, starts + tokens)
    error = np.abs(done - work - groups.share(np.ones(count))[1] * added)
    score = np.maximum(error, placing.slack) + added / 2
    if groups.across.any():
        # A rank is sent the keys before a cut; of a document longer than a rank's share, ranks are in any case.
        share = groups.tokens.sum(0) // groups.ranks.sum(0)
        cuts = np.minimum(line.before_cut(starts), share) + np.minimum(line.before_cut(starts + tokens), share)
        score += np.where(groups.across, ROW_ACROSS * cuts, 0)
    best = score.argmin(0), np.arange(count)
    return starts[best], error[best]


def _first_reaching(done: Callable[[Int], Float], low: Int, high: Int, work: Float, unit: int = 1) -> Int:
    """(G,) the first x of low, low + unit, … high where the growing `done(x)`, of (n, G), reaches `work`; high where
    none does. Nearly the first, where the range is long."""
    steps = (high - low) // unit
    first, last = np.zeros_like(low), steps
    for _ in range(_ZOOMS):
        points = first + np.rint(_PARTS * (last - first)).astype(np.int64)
        below = done(low + unit * points) < work
        below[-1] = False
        k = below.argmin(0)  # the first point that reaches it
        columns = np.arange(len(low))
        first, last = points[np.maximum(k - 1, 0), columns], points[k, columns]
        if (last - first <= 1).all():
            break
    return low + unit * last


class _Placing:
    """Slices that go whole to a half.

    Args:
        slices, group: by group, from the sparsest to the densest.
        work: (2, G) that each half should do; what is still missing, later. tokens: the same.
        side: (N,) the half of each slice, 0 or 1; -1: it is not placed.
        cut, heads: (G,) the slice of each group of which one half gets the end, or -1, and tokens of its head.
    """

    def __init__(self, slices: Slices, group: Int, groups: Groups, work: Float, slack: Float) -> None:
        self.slices, self.group, self.groups, self.slack = slices, group, groups, slack
        self.work, self.tokens = work, groups.tokens.copy()
        self.side = np.full(len(slices), -1)
        count = len(slack)
        self.cut, self.heads = np.full(count, -1), np.zeros(count, dtype=np.int64)

    def run(self, most: Int) -> None:
        """Place up to `most` (G,) slices of each group."""
        tops = self._tops(most)
        if not len(tops):
            return
        first = np.searchsorted(self.group, np.arange(len(self.slack) + 1))
        # All slices of a group from the sparsest to the densest, whole: what fills a half up does at least, or at most.
        self._at = np.append(0, np.cumsum(self.slices.size)).astype(np.float64)
        self._done = np.append(0.0, np.cumsum(self.slices.work))
        self._begin, self._end = ((self._at[at], self._done[at]) for at in (first[:-1], first[1:]))
        self._least, self._most = self._begin[1] + self.slack, self._end[1] + self.slack
        self._points = np.empty((4, len(self.slack)))
        none = tops < 0
        sizes, works = np.where(none, _ENDLESS, self.slices.size[tops]), np.where(none, 0, self.slices.work[tops])
        sides = np.stack([self._place(*top) for top in zip(tops, sizes, works, strict=True)])
        placed = sides >= 0
        self.side[tops[placed]] = sides[placed]
        chosen = np.flatnonzero(self.cut >= 0)
        if len(chosen):
            self._split(chosen, self.cut[chosen], self.heads[chosen])

    def _tops(self, most: Int) -> Int:
        """(n, G) up to `most` slices with much work of each group, those with most first; -1: it has no more."""
        least = self.groups.least * self.work.sum(0) / self.groups.ranks.sum(0)
        work, group = self.slices.work, self.group
        tops = np.flatnonzero(work > least[group])
        tops = tops[np.argsort(group[tops] * (work.max(initial=0) + 1) - work[tops], kind="stable")]
        its_group = group[tops]
        place = np.arange(len(tops)) - np.searchsorted(its_group, its_group)
        kept = place < most[its_group]
        found = np.full((int(place[kept].max(initial=-1)) + 1, len(least)), -1)
        found[place[kept], its_group[kept]] = tops[kept]
        return found

    def _place(self, i: Int, size: Int, work: Float) -> Int:
        """(G,) the half that slice i[g] goes to as a whole, -1: none. Of one with too much work for both, one half gets
        the end.

        A slice can go to a half whose other tokens can then do what is missing, and no more.
        """
        tokens, missing = self.tokens - size, self.work - work
        left = np.maximum(tokens, 0)
        np.add(self._begin[0], left, out=self._points[:2])
        np.subtract(self._end[0], left, out=self._points[2:])
        done = np.interp(self._points, self._at, self._done)
        fits = (tokens >= 0) & (done[:2] <= self._least + missing) & (done[2:] <= self._most - missing)
        second, either = self.work[1] > self.work[0], fits[0] | fits[1]
        big = work > np.maximum(self.work[0], self.work[1])
        if big.any():
            big = np.flatnonzero(big & ~either & (self.cut < 0) & (i >= 0))
            self._cut_big(big, i[big], second[big].astype(np.int64))
        second = fits[1] & (second | ~fits[0])
        goes = np.stack([either ^ second, second])
        self.tokens -= goes * size
        self.work -= goes * work
        return np.where(either, second, -1)

    def _cut_big(self, groups: Int, i: Int, side: Int) -> None:
        """Give the end of slice i of each group to `side`, its head to the other half, where that can be done.

        The end is as long as its half allows, in rows of tiles that its ranks can share evenly, where they can be.
        """
        if not len(i):
            return
        size, work, count = self.slices.size[i], self.slices.work[i], len(i)
        end_tokens, head_tokens = self.tokens[side, groups], self.tokens[1 - side, groups]
        end_work, head_work = self.work[side, groups], self.work[1 - side, groups]
        low, high = np.maximum(0, size - end_tokens), np.minimum(size, head_tokens)
        wide = high - low >= 2 * self.groups.step
        high = np.maximum(high, low)
        # Two columns of each slice: how much more its end's half could do, how much its head's half would do too much.
        sign, twice, (begin, done) = np.repeat([-1, 1], count), np.tile(i, 2), self._begin
        begin, done = np.tile(begin[groups], 2), np.tile(done[groups], 2)
        tokens, base = np.append(end_tokens - size, head_tokens), np.append(end_work - work, -head_work)

        def over(head: Int) -> Float:
            least = np.interp(begin + tokens - sign * head, self._at, self._done) - done
            return base + part_work(self.slices, twice, head, self.groups.seen) + sign * least

        found = _first_reaching(over, np.tile(low, 2), np.tile(high, 2), np.zeros(2 * count))
        shortest, longest = found[:count], found[count:]
        head = size - self._even_rows(size - shortest, size - longest, self.groups.ranks[side, groups])
        room, excess = over(np.tile(head, 2)).reshape(2, count)
        near = 1e-4 * work
        fits = wide & (head >= low) & (head <= high) & (head > 0) & (head < size) & (room >= -near) & (excess <= near)
        if not fits.any():
            return
        groups, i, side, head = groups[fits], i[fits], side[fits], head[fits]
        behead = part_work(self.slices, i, head, self.groups.seen)
        self.cut[groups], self.heads[groups], self.side[i] = i, head, side
        self.tokens[side, groups] -= self.slices.size[i] - head
        self.tokens[1 - side, groups] -= head
        self.work[side, groups] -= self.slices.work[i] - behead
        self.work[1 - side, groups] -= behead

    def _even_rows(self, most: Int, least: Int, ranks: Int) -> Int:
        """The longest end up to `most` tokens in rows of tiles; in as many as `ranks` share evenly, or half of them, …,
        where that is not below `least`."""
        step = self.groups.step
        end, shared = most // step * step, 2
        while shared <= ranks.max(initial=0):
            even = most // (shared * step) * shared * step
            end = np.where((shared <= ranks) & (even >= least), even, end)
            shared *= 2
        return end

    def _split(self, groups: Int, i: Int, head: Int) -> None:
        """Cut slice i of each group behind its first `head` tokens; both halves bear what the cut costs."""
        slices, mask = self.slices, self.groups.mask
        table, ends = slices.table[:, i], slices.table[:, i]
        table[1] = head
        ends[[0, 3]] += head
        ends[1] -= head
        before = slices.work[i]
        both = tenths(np.concatenate([table, ends], axis=1), np.tile(before, 2), mask)
        head_work, end_work = both[: len(i)], both[len(i) :]
        side, done = self.side[i], part_work(slices, i, head, self.groups.seen)
        added = self.groups.share(np.ones(len(self.slack)))[:, groups] * (head_work + end_work - before)
        self.work[:, groups] += added
        self.work[side, groups] -= end_work - (before - done)
        self.work[1 - side, groups] -= head_work - done
        whole, work = slices.table.copy(), slices.work.copy()
        whole[:, i], work[i] = ends, end_work
        self.slices = Slices(np.concatenate([whole, table], axis=1), np.append(work, head_work))
        self.group, self.side = np.append(self.group, groups), np.append(self.side, 1 - side)


ENOUGH = 1.018
"""Imbalance that is not worth another round."""
ROUNDS = 24
"""At most: in each one every rank has other partners."""
IDLE = 4
"""Rounds without a swap, one after another, behind which there is none to be found."""
FIRST_BLOCK, TURNS = 8, 2
"""Partners are of so many ranks first, for so many turns; then of twice as many, and so on."""
PAIRS = 32
"""Each rank has several partners, the best of which counts, where there are not as many pairs."""
SPREAD = 5
"""Slices of a rank that are tried, from its sparsest to its densest; in every other turn more of the dense ones."""


def even_pairs(
    slices: Slices, owner: Int, quotas: Sequence[int], node_size: int, mask: PackedMask, unit: int, inner: int = 1
) -> tuple[Slices, Int]:
    """(slices, owner) with less work for the place that has most, where that can be had; partners share a node. Each
    rank keeps its number of tokens.

    Ranks that were halved again and again are left with what the last cut could not do: a row of tiles of a long
    document is some percent of a rank's work. Another rank mostly has rows with a little less. So pairs of ranks, one
    with much and one with little work, swap ends of slices, as many tokens each:

        rank with 1.08 of the mean      A A A A A A A A|a a     its dense end, two rows of tiles of a long document
        rank with 0.94                  b b|B B B B B B B B     for a sparse head, two rows of another one
        afterwards                      A A A A A A A A b b     and     a a B B B B B B B B

    Args: as of `share_out_by_halves`, and what it returns, with the quotas of all its ways; work in tenths of tiles.
        inner: ranks of a place, between which work need not be even; it divides `node_size`.
    """
    held, idle = np.asarray(quotas).reshape(-1, inner).sum(1) > 0, 0
    for turn in range(ROUNDS):
        place = owner // inner
        work = owners_work(place, slices, len(held))
        limit = ENOUGH * float(work.mean())
        if work.max() <= limit or idle == IDLE:
            break
        more, less = _partners(work, limit, node_size // inner, turn)
        more, less = more[held[less]], less[held[less]]
        if len(more):
            tried = _tried(slices, place, more, less, turn)
            swaps = _best_swaps(slices, tried, more, work[more], work[less], limit, mask, lcm(TILE, unit))
            idle = 0 if len(swaps[0]) else idle + 1
            slices, owner = _after(slices, owner, *swaps, mask) if len(swaps[0]) else (slices, owner)
    return slices, owner


def _partners(work: Float, limit: float, node_size: int, turn: int) -> tuple[Int, Int]:
    """(ranks above the limit, each as often as it has partners; its partners): no two ranks share a partner.

    Partners are in one block of ranks, which were halved last and so share documents, and have least work there. Each
    turn moves partners on by one, later turns have larger blocks, up to a node.
    """
    size, ranks = min(node_size, FIRST_BLOCK << turn // TURNS), np.arange(len(work))
    node = ranks // node_size * node_size
    first = node + (ranks - node) // size * size  # of each rank's block
    end = np.minimum(first + size, node + node_size)
    half = (end - first) // 2
    order = np.lexsort((work, first))  # ranks first …, of a block, are order[first] …, by work
    above = work[order] > limit
    rivals = np.minimum(half, np.bincount(first, above, len(work)).astype(np.int64)[first])
    at = np.flatnonzero(above & (end - 1 - ranks < half))
    place = (end - 1 - ranks)[at] + rivals[at] * np.arange(max(1, PAIRS // max(1, len(at))))[:, None]
    mine = np.broadcast_to(at, place.shape)[inside := place < half[at]]
    return order[mine], order[first[mine] + (place[inside] + turn) % half[mine]]


def _tried(slices: Slices, owner: Int, more: Int, less: Int, turn: int) -> tuple[Int, Int]:
    """(i, j), each (pairs, SPREAD²): slices of both ranks of each pair, in all combinations."""
    here = np.flatnonzero(np.isin(owner, np.append(more, less)))
    here = here[np.lexsort((slices.work[here] / slices.size[here], owner[here]))]
    first, last = np.searchsorted(owner[here], [more, less]), np.searchsorted(owner[here], [more, less], "right") - 1
    shares = np.linspace(0, 1, SPREAD)
    shares = np.sqrt(shares) if turn % 2 else shares
    each = here[first[..., None] + np.rint(shares * (last - first)[..., None]).astype(np.int64)]
    return np.repeat(each[0], SPREAD, 1), np.tile(each[1], SPREAD)


def _best_swaps(
    slices: Slices,
    tried: tuple[Int, Int],
    more: Int,
    mine: Float,
    other: Float,
    limit: float,
    mask: PackedMask,
    step: int,
) -> tuple[Int, Int, Int]:
    """(i, j, x): the swaps that help, x tokens of the end of slice i for the head of slice j; the best of each rank.

    Args:
        tried: (i, j), each (pairs, n).
        more, mine, other: (pairs,) the rank with much work, its work, and its partner's. limit: low enough.
    """
    i, j = tried
    sizes = slices.size[i], slices.size[j]
    some = _tokens(slices, i, j, (mine - other)[:, None] / 2, mask, step)
    most = np.minimum(*sizes)
    x = np.concatenate([np.minimum(some, most), np.minimum(some + step, most), most], 1)
    i, j = np.tile(i, 3), np.tile(j, 3)
    kept, end, head, rest = _work(slices, *_ranges(slices, i, j, x), mask=mask)
    left = np.maximum(
        mine[:, None] - slices.work[i] + kept + head,
        other[:, None] - slices.work[j] + rest + end,
    )
    best = np.arange(len(more)), np.maximum(left, limit).argmin(1)
    i, j, x, left = i[best], j[best], x[best], left[best]
    by_rank = np.lexsort((left, more))
    first = by_rank[np.diff(more[by_rank], prepend=-1) > 0]
    first = first[left[first] < mine[first]]
    return i[first], j[first], x[first]


def _tokens(slices: Slices, i: Int, j: Int, work: Float, mask: PackedMask, step: int) -> Int:
    """Tokens, in whole steps, of which the end of slice i has nearly `work` more than the head of slice j.

    A token further back in i sees one key less, one further on in j one more: x tokens differ by a x - b x².
    """
    sizes = slices.size[i], slices.size[j]
    row_i, row_j = np.minimum(step, sizes[0]), np.minimum(step, sizes[1])
    none = np.zeros_like(row_j)
    last, first = _work(slices, (i, sizes[0] - row_i, sizes[0]), (j, none, row_j), mask=mask)
    a, b = np.maximum(last / row_i - first / row_j, 1e-9), 10 / TILE**2
    root = np.sqrt(np.maximum(0, a**2 - 4 * b * work))
    x = np.minimum(2 * work / (a + root), a / (2 * b))
    return np.minimum(x, np.minimum(*sizes)).astype(np.int64) // step * step


def _ranges(slices: Slices, i: Int, j: Int, x: Int) -> tuple[tuple[Int, Int, Int], ...]:
    """(slice, start, stop) of what is left of slices i, their ends, heads of slices j, and what is left of these; some
    may be empty."""
    size_i, size_j, none = slices.size[i], slices.size[j], np.zeros_like(x)
    return (i, none, size_i - x), (i, size_i - x, size_i), (j, none, x), (j, x, size_j)


def _parts(slices: Slices, *ranges: tuple[Int, Int, Int], mask: PackedMask) -> Slices:
    """The ranges of slices, each as a slice of its own, of flattened arrays."""
    i, start, stop = (np.stack(column).reshape(-1) for column in zip(*ranges, strict=True))
    return parts(slices.take(i), start, stop, mask)


def _work(slices: Slices, *ranges: tuple[Int, Int, Int], mask: PackedMask) -> Float:
    """The work of each, in the shape of the ranges."""
    return _parts(slices, *ranges, mask=mask).work.reshape(len(ranges), *ranges[0][0].shape)


def _after(slices: Slices, owner: Int, i: Int, j: Int, x: Int, mask: PackedMask) -> tuple[Slices, Int]:
    """(slices, owner) after swaps of x tokens of the ends of slices i for heads of slices j."""
    new, more, less = _parts(slices, *_ranges(slices, i, j, x), mask=mask), owner[i], owner[j]
    other = np.ones(len(slices), dtype=np.bool_)
    other[i] = other[j] = False
    slices = Slices.join([slices.take(np.flatnonzero(other)), new])
    owner = np.concatenate([owner[other], more, less, more, less])
    changed = np.isin(owner, np.append(more, less))
    mine, others = np.flatnonzero(changed & (slices.size > 0)), np.flatnonzero(~changed)
    joint, its_owner = joined(slices.take(mine), owner[mine], mask)
    return Slices.join([slices.take(others), joint]), np.append(owner[others], its_owner)


def joined(slices: Slices, group: Int, mask: PackedMask) -> tuple[Slices, Int]:
    """The slices of each group, those of one document that touch as one."""
    order = np.lexsort((slices.start, group))
    slices, group = slices.take(order), group[order]
    follows = (slices.start[1:] == (slices.start + slices.size)[:-1]) & (group[1:] == group[:-1])
    same = (slices.start - slices.first)[1:] == (slices.start - slices.first)[:-1]
    same &= (slices.document_length[1:] == slices.document_length[:-1]) & (slices.full[1:] == slices.full[:-1])
    same &= (slices.work[1:] > 0) & (slices.work[:-1] > 0) | ((slices.work[1:] == 0) & (slices.work[:-1] == 0))
    first = np.flatnonzero(np.append(True, ~(follows & same)))
    table = slices.table[:, first]
    table[1] = np.add.reduceat(slices.size, first)
    work = np.add.reduceat(slices.work, first)
    return Slices(table, tenths(table, work, mask)), group[first]
