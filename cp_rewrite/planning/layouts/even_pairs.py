"""Pairs of ranks, one with much and one with little work, that swap ends of slices, as many tokens each.

    rank with 1.08 of the mean      A A A A A A A A|a a     its dense end, two rows of tiles of a long document
    rank with 0.94                  b b|B B B B B B B B     for a sparse head, two rows of another one
    afterwards                      A A A A A A A A b b     and     a a B B B B B B B B

Ranks that were halved again and again are left with what the last cut could not do: a row of tiles of a long document
is some percent of a rank's work. Another rank mostly has rows with a little less.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import numpy as np

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import TILE
from cp_rewrite.planning.cost.tiles import Float
from cp_rewrite.planning.intervals import Int

from .halves import owners_work
from .slice_lines import parts, tenths
from .slices import Slices

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

    Args: as of `share_out_by_halves`, and what it returns; work in tenths of tiles.
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
