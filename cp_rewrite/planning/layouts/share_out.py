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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.intervals import Int

from .slices import SliceLine, Slices, slice_tiles

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
