"""Sharing slices out: every bin (a rank, or a node of ranks) gets its quota of tokens and the same work per token.

Bins are filled one after another. Each leaves the rest with the same work per token as before, so the next one can be
filled too:

1. Where one slice has too much work for the bin, the bin takes its end, where the work is. Else the bin takes whole
   slices, those with most work first, as long as the sparsest tokens there are (those with the least work) could still
   fill it up without too much work.
2. The tokens that are then missing are one run of the line of all other slices, which are ordered from the sparsest to
   the densest. Where the run starts decides how much work it does. Only its two ends cut slices, and these are short
   documents while there are any:

       line       sparse . . . . [ run ) . . . . . . . . . . . . . dense
       the bin                   [ run ) + [ whole slices, or the end of a long one )

A single causal document is shared out in the zigzag of `dual_chunk`.

Sharing out documents whole, where none is too long for a rank: balance then needs no cut.

Ranks swap documents until each has nearly its tokens and its work. A rank with tokens too many gives the head of one
document away, which does little work, and receives no more than that head's keys:

    rank 0    A A A A A A A A  B B B B          two tokens too many
    rank 1    C C C C C C  D D D   + B B        receives nothing; rank 0 receives the keys of these two

Slices of documents: what is cut and shared out while a layout is searched for.

    documents        A A A A A A A A B B B
    two slices       . . A A A A A . . . .      start 2, size 5, first 2 of a document of 8
                     . . . . . . . . . B B      start 9, size 2, first 1 of a document of 3

Slices of one document that touch on one rank are one piece of its schedule in the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import TILE
from cp_rewrite.planning.cost.tiles import Float, SeenKeys, causal_tiles, window_tiles
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


_ROUNDS, _SHAKEN = 16, 3
"""Searches, at most; each but the first begins at the best one's end, with as many pairs swapped at random."""
_PAIRS = 1 << 17
"""Pairs of slices that are compared, at most: some milliseconds. Each swap is the best of all pairs."""
_LEAST = 8
"""Swaps, at least, that must be allowed."""
_NEAR_TOKENS, _NEAR_WORK = 32, 0.004
"""Tokens, and share of a rank's work, that count alike, and are near enough."""


def share_out_whole(slices: Slices, quotas: Sequence[int]) -> list[Slices] | None:
    """The share of each rank: whole slices, but for heads that are given away; work is as equal as it was found.

    Args:
        slices: what there is to share.
        quotas: (P,) tokens of each rank; their sum is that of the slices.
    Returns:
        None where a slice is longer than a quota, or has more work than a rank's share, where they are too many, or
        none that is long enough is left to give its head away.
    """
    ranks, share = len(quotas), float(slices.work.sum()) / len(quotas)
    if (len(slices) + ranks) ** 2 * _LEAST > _PAIRS:
        return None
    if not share or slices.size.max() > min(quotas) or slices.work.max() > share:
        return None
    sizes, work = slices.size / _NEAR_TOKENS, slices.work / (_NEAR_WORK * share)
    wanted = np.stack([np.array(quotas) / _NEAR_TOKENS, np.full(ranks, 1 / _NEAR_WORK)])
    owner = _swapped(np.stack([sizes, work]), wanted)
    held = [slices.take(np.flatnonzero(owner == rank)) for rank in range(ranks)]
    return _even_tokens(held, np.array(quotas))


def _swapped(sizes: Float, wanted: Float) -> Int:
    """(N,) the owner of each slice, so that the sums of its two `sizes` (2, N) come near to what ranks want, (2, P)."""
    ranks = wanted.shape[1]
    # What is swapped for nothing moves: each rank holds one slice of no size, too.
    sizes = np.concatenate([sizes, np.zeros((2, ranks))], axis=1)
    apart = sizes[:, :, None] - sizes[:, None, :]
    owner, random = _dealt(sizes, ranks), np.random.default_rng(0)
    best, least, swaps = owner, np.inf, _PAIRS // sizes.shape[1] ** 2
    for _ in range(_ROUNDS):
        owner, error, swaps = _improved(owner.copy(), sizes, apart, wanted, swaps)
        if (error**2).sum() < least:
            best, least = owner, float((error**2).sum())
        if np.abs(error).max() <= 1 or not swaps:
            break
        owner = best.copy()
        for one, other in random.integers(0, len(owner), (_SHAKEN, 2)):
            owner[[one, other]] = owner[[other, one]]
    return best[:-ranks]


def _dealt(sizes: Float, ranks: int) -> NDArray[np.int64]:
    """A first guess: those with most work first, each to the rank with least work so far."""
    owner, done = np.zeros(sizes.shape[1], dtype=np.int64), np.zeros(ranks)
    for i in np.argsort(-sizes[1], kind="stable"):
        owner[i] = done.argmin()
        done[owner[i]] += sizes[1, i]
    owner[-ranks:] = np.arange(ranks)
    return owner


def _improved(owner: Int, sizes: Float, apart: Float, wanted: Float, swaps: int) -> tuple[Int, Float, int]:
    """The owners after swaps, each the one that lowers the sum of squared errors most; the errors, (2, P); how many of
    the `swaps` allowed are left."""
    while True:
        error = np.stack([np.bincount(owner, row, wanted.shape[1]) for row in sizes]) - wanted
        # Where i of rank a is swapped for j of rank b, a's error falls by apart[i, j], and b's rises by it.
        here = error[:, owner]
        change = (apart * (apart - here[:, :, None] + here[:, None, :])).sum(0)
        change[owner[:, None] == owner[None, :]] = 0
        i, j = np.unravel_index(change.argmin(), change.shape)
        if change[i, j] > -1e-9 or not swaps:
            return owner, error, swaps
        owner[[i, j]], swaps = owner[[j, i]], swaps - 1


def _even_tokens(held: list[Slices], quotas: Int) -> list[Slices] | None:
    """The slices with heads moved to the ranks that miss tokens."""
    over = np.array([int(slices.size.sum()) for slices in held]) - quotas
    whole = [np.argsort(slices.size, kind="stable").tolist() for slices in held]
    held = list(held)
    while over.any():
        giver, taker = int(over.argmax()), int(over.argmin())
        tokens = int(min(over[giver], -over[taker]))
        mine = held[giver]
        # The shortest slice that keeps most of its tokens.
        cut = next((i for i in whole[giver] if mine.size[i] > 2 * tokens), None)
        if cut is None:
            return None
        whole[giver].remove(cut)
        head = mine.cut(cut, cut + 1, right=int(mine.size[cut]) - tokens)
        table = mine.table.copy()
        table[[0, 3], cut] += tokens
        table[1, cut] -= tokens
        held[giver], held[taker] = Slices(table, mine.work), Slices.join([held[taker], head])
        over[[giver, taker]] += (-tokens, tokens)
    return held


MOST_GAPS = 24
"""Times that a bin skips slices that don't fit; a run fills what is missing then."""


@dataclass(frozen=True)
class Variant:
    """How to fill bins.

    Args:
        slack: share of a bin's work that is not worth a cut.
        whole: take whole slices first. False: only the dense end of the line, and its sparse end: that balances best.
        tries: times that each bin is filled, to come closer to its share.
        rounds: times that the whole row is shared out, each with what cuts cost in the round before.
        unit: cuts fall on multiples of it; quotas and sizes of slices are multiples of it too.
    """

    slack: float = 0.006
    whole: bool = True
    tries: int = 2
    rounds: int = 4
    unit: int = 1


def share_out(
    slices: Slices, quotas: Sequence[int], extra: Sequence[float], mask: PackedMask, variant: Variant
) -> list[Slices]:
    """The share of each bin: its quota of tokens, and the same work per token as all others.

    Args:
        slices: what there is to share.
        quotas: tokens of each bin; their sum is that of the slices.
        extra: tiles that each bin spends on top of its slices' `work`, because cuts cost rows of tiles.
        mask: what attention sees.
        variant: how to fill each bin.
    """
    bins: list[Slices] = []
    total = sum(quotas)
    for b, quota in enumerate(quotas):
        if b == len(quotas) - 1 or quota == total:
            bins.append(slices)
            bins += [slices.cut(0, 0)] * (len(quotas) - 1 - b)
            break
        share = (float(slices.work.sum()) + sum(extra[b:])) * quota / total
        taken, slices = _fill_exactly(slices, quota, share, share - extra[b], mask, variant)
        bins.append(taken)
        total -= quota
    return bins


def _fill_exactly(
    slices: Slices, tokens: int, share: float, aim: float, mask: PackedMask, variant: Variant
) -> tuple[Slices, Slices]:
    """`_fill` with `aim` as its work, then higher or lower until what the bin costs with its cuts is its share."""
    line = _line_up(slices, mask, variant)
    best, least = (slices, slices), np.inf
    for _ in range(variant.tries):
        got = _fill(line, tokens, aim, variant)
        error = float(slice_tiles(got[0], mask).sum()) - share
        if abs(error) < least:
            best, least = got, abs(error)
        if abs(error) <= variant.slack * share:
            break
        aim -= error
    return best


def _line_up(slices: Slices, mask: PackedMask, variant: Variant) -> SliceLine:
    """The slices from the sparsest to the densest.

    The slice with most work comes last where it is denser than the mean, whatever is denser still: its end has the most
    work per token.
    """
    density = slices.work / slices.size
    biggest = int(slices.work.argmax())
    if variant.whole and density[biggest] >= slices.work.sum() / slices.size.sum():
        density[biggest] = np.inf
    return SliceLine(slices.take(np.lexsort((slices.start, slices.first, density))), SeenKeys(mask))


def _fill(line: SliceLine, tokens: int, work: float, variant: Variant) -> tuple[Slices, Slices]:
    """(what one bin takes, what is left): `tokens` tokens that do `work`."""
    slack = variant.slack * work
    densest = int(line.slices.size[-1])
    whole_fits = densest <= tokens and float(line.slices.work[-1]) + line.work(tokens - densest) <= work + slack
    if variant.whole and whole_fits:
        taken, rest = _take_whole(line, tokens, work, slack)
    else:
        dense = _dense_tokens(line, tokens, work, slack, variant.unit)
        dense = line.size - line.aligned(line.size - dense, variant.unit) if variant.whole else dense
        taken, rest = line.run(line.size - dense, line.size), SliceLine(line.run(0, line.size - dense), line.seen)
    missing = tokens - int(taken.size.sum())
    if not missing:
        return taken, rest.slices
    at = _run_position(rest, missing, work - float(taken.work.sum()), slack, variant.unit)
    run, others = rest.split(at, at + missing)
    return Slices.join([taken, run]), others


def _take_whole(line: SliceLine, tokens: int, work: float, slack: float) -> tuple[Slices, SliceLine]:
    """(whole slices, the line of the others, of which a run can do the missing work in the missing tokens).

    Many short documents may leave too few tokens for the work that is missing: then the last chosen are given back.
    """
    chosen = _choose_whole(line, tokens, work + slack)
    for back in (0, 1, 2, 4, 8, 16, 32):
        whole, others = line.slices.split(chosen[: max(0, len(chosen) - back)])
        left, missing = tokens - int(whole.size.sum()), work - float(whole.work.sum())
        rest = SliceLine(others, line.seen)
        if not left or back >= len(chosen) or missing - slack <= rest.work(rest.size) - rest.work(rest.size - left):
            break
    return whole, rest


def _dense_tokens(line: SliceLine, tokens: int, work: float, slack: float, unit: int) -> int:
    """How many of `tokens` to take from the dense end, the others from the sparse end, so that they do `work`."""

    def taken(dense: int) -> float:
        return line.work(line.size) - line.work(line.size - dense * unit) + line.work(tokens - dense * unit)

    return _first_reaching(taken, tokens // unit, work, slack / 16) * unit


def _choose_whole(line: SliceLine, tokens: int, work: float) -> Int:
    """Indices of whole slices, those with most work first, that leave room for the sparsest tokens as a filling.

    They are taken from the ordered list in runs; where one does not fit, all before the next that does are skipped.
    """
    slices = line.slices
    order = np.argsort(-slices.work, kind="stable")
    size, cost = slices.size[order], slices.work[order]
    sizes, costs = size.tolist(), cost.tolist()
    chosen: list[int] = []
    at = 0
    for _ in range(MOST_GAPS):
        fits = size[at:] <= tokens
        fits &= cost[at:] + np.interp(tokens - size[at:], line.bounds, line.before) <= work
        if not fits.any():
            break
        at += int(fits.argmax())
        while at < len(sizes) and sizes[at] <= tokens and costs[at] + line.work(tokens - sizes[at]) <= work:
            chosen.append(at)
            tokens -= sizes[at]
            work -= costs[at]
            at += 1
    return order[np.array(chosen, dtype=np.int64)]


def _run_position(line: SliceLine, tokens: int, work: float, slack: float, unit: int) -> int:
    """Where a run of `tokens` that does `work` starts: the further along the line, the more it does.

    A start near it that cuts fewer slices, or cuts between tiles, is taken instead where its work is within `slack`.
    """

    def taken(start: int) -> float:
        return line.work(start * unit + tokens) - line.work(start * unit)

    low = _first_reaching(taken, (line.size - tokens) // unit, work, slack / 16) * unit
    i, j = line.index(low), line.index(low + tokens)
    starts = [0, line.bounds[i], line.bounds[i + 1], line.bounds[j] - tokens, line.bounds[j + 1] - tokens]
    for at in (*starts, line.aligned(low, unit)):
        if 0 <= at <= line.size - tokens and abs(line.work(at + tokens) - line.work(at) - work) <= slack:
            return at
    return low


def _first_reaching(taken: Callable[[int], float], most: int, work: float, enough: float) -> int:
    """The first x in [0, most] where the growing `taken(x)` reaches `work`; `most` where none does.

    An x that comes as near as `enough` is returned, too. By regula falsi with the Illinois rule: an end that stays
    counts half from then on.
    """
    low, high, side = 0, most, 0
    under, over = taken(low) - work, taken(high) - work
    if under >= 0:
        return low
    while high - low > 1 and over > 0:
        guess = low + int((high - low) * under / (under - over))
        at = min(max(guess, low + 1), high - 1)
        error = taken(at) - work
        if abs(error) <= enough:
            return at
        if error < 0:
            low, under = at, error
            over, side = (over / 2, -1) if side < 0 else (over, -1)
        else:
            high, over = at, error
            under, side = (under / 2, 1) if side > 0 else (under, 1)
    return high
