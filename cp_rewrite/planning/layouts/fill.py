"""Sharing documents out: every bin (a rank, or a node of ranks) gets its quota of tokens and the same work.

Bins are filled one after another. Each leaves the rest with the same work per token, so the next one can be filled too:

1. A document with too much work for the bin is cut near its end, where the work is. Else the bin takes whole documents,
   the biggest first, as long as the sparsest tokens there are could still fill it up within its share of work.
2. The tokens that are then missing are one run of the line of all other documents, ordered from the sparsest (least
   work per token) to the densest; where the run starts decides how much work it does. Only its ends cut documents, and
   these are short ones as long as there are any:

       sparse ....[ run )........................ dense [ whole documents, or the end of a long one )

On a single causal document this is the zigzag of `dual_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.intervals import Int

from .line import Line, Parts, SeenKeys, part_tiles

MOST_GAPS = 24
"""Times that a bin skips documents that don't fit; what is then missing a run can fill."""


@dataclass(frozen=True)
class Style:
    """How to fill bins.

    Args:
        slack: share of a bin's work that is not worth a cut.
        whole: take whole documents first. False: only the ends of the line, which balances best.
        tries: fillings of each bin, to hit its share.
        rounds: sharings of the whole row, each with what cuts cost in the last.
        unit: cuts fall on multiples of it, of which quotas and all parts' sizes are multiples too.
    """

    slack: float = 0.006
    whole: bool = True
    tries: int = 2
    rounds: int = 4
    unit: int = 1


def share_out(
    parts: Parts, quotas: Sequence[int], extra: Sequence[float], mask: PackedMask, style: Style
) -> list[Parts]:
    """Give every bin its quota of tokens and the same work per token.

    Args:
        parts: what there is to share.
        quotas: tokens per bin; their sum is the parts'.
        extra: per bin, tiles that it spends on top of its parts' work, as cuts cost them.
        mask: what attention sees.
        style: how to fill each bin.
    """
    bins: list[Parts] = []
    total = sum(quotas)
    for b, quota in enumerate(quotas):
        if b == len(quotas) - 1 or quota == total:
            bins.append(parts)
            bins += [parts.cut(0, 0)] * (len(quotas) - 1 - b)
            break
        share = (float(parts.work.sum()) + sum(extra[b:])) * quota / total
        taken, parts = _fill_exactly(parts, quota, share, share - extra[b], mask, style)
        bins.append(taken)
        total -= quota
    return bins


def _fill_exactly(
    parts: Parts, tokens: int, share: float, aim: float, mask: PackedMask, style: Style
) -> tuple[Parts, Parts]:
    """`_fill`, aiming higher or lower until what the bin really costs, cuts included, is its share."""
    line = _line_up(parts, mask, style)
    best, least = (parts, parts), np.inf
    for _ in range(style.tries):
        got = _fill(line, tokens, aim, style)
        error = float(part_tiles(got[0], mask).sum()) - share
        if abs(error) < least:
            best, least = got, abs(error)
        if abs(error) <= style.slack * share:
            break
        aim -= error
    return best


def _line_up(parts: Parts, mask: PackedMask, style: Style) -> Line:
    """From the sparsest to the densest. A part with most of the work comes last, though its start be sparse."""
    density = parts.work / parts.size
    biggest = int(parts.work.argmax())
    if style.whole and density[biggest] >= parts.work.sum() / parts.size.sum():
        density[biggest] = np.inf
    return Line(parts.take(np.lexsort((parts.start, parts.first, density))), SeenKeys(mask))


def _fill(line: Line, tokens: int, work: float, style: Style) -> tuple[Parts, Parts]:
    """(what one bin takes, what is left): `tokens` tokens that do `work`."""
    slack = style.slack * work
    biggest = int(line.parts.size[-1])
    whole_fits = biggest <= tokens and float(line.parts.work[-1]) + line.work(tokens - biggest) <= work + slack
    if style.whole and whole_fits:
        taken, rest = _take_whole(line, tokens, work, slack)
    else:
        dense = _dense_run(line, tokens, work, slack, style.unit)
        dense = line.size - line.aligned(line.size - dense, style.unit) if style.whole else dense
        taken, rest = line.run(line.size - dense, line.size), Line(line.run(0, line.size - dense), line.seen)
    left = tokens - int(taken.size.sum())
    if not left:
        return taken, rest.parts
    at = _run_position(rest, left, work - float(taken.work.sum()), slack, style.unit)
    run, others = rest.split(at, at + left)
    return Parts.join([taken, run]), others


def _take_whole(line: Line, tokens: int, work: float, slack: float) -> tuple[Parts, Line]:
    """Whole parts, and the others, of which a run can fill what is missing.

    Too many short documents may leave few tokens and much work missing: then some are given back.
    """
    chosen = _choose_whole(line, tokens, work + slack)
    for back in (0, 1, 2, 4, 8, 16, 32):
        whole, others = line.parts.split(chosen[: max(0, len(chosen) - back)])
        left, missing = tokens - int(whole.size.sum()), work - float(whole.work.sum())
        rest = Line(others, line.seen)
        if not left or back >= len(chosen) or missing - slack <= rest.work(rest.size) - rest.work(rest.size - left):
            break
    return whole, rest


def _dense_run(line: Line, tokens: int, work: float, slack: float, unit: int) -> int:
    """How many of `tokens` come from the dense end, the others from the sparse end, so that `work` is met."""

    def taken(dense: int) -> float:
        return line.work(line.size) - line.work(line.size - dense * unit) + line.work(tokens - dense * unit)

    return _first_reaching(taken, tokens // unit, work, slack / 16) * unit


def _choose_whole(line: Line, tokens: int, work: float) -> Int:
    """Whole parts, the biggest first, that leave room for the sparsest tokens as a filling."""
    parts = line.parts
    order = np.argsort(-parts.work, kind="stable")
    size, cost = parts.size[order], parts.work[order]
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


def _run_position(line: Line, tokens: int, work: float, slack: float, unit: int) -> int:
    """Where a run of `tokens` starts that does `work`: work grows along the line.

    A start that cuts fewer documents, or cuts between tiles, is taken instead if its work is as good as the same.
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
    """Where in [0, most] a growing `taken` first reaches `work`, or is as near as is `enough`; `most` if it never is.

    By regula falsi with the Illinois rule: an end that stays counts half from then on.
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
