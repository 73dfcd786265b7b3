"""Pairs of ranks, one with much and one with little work, that share out again what both have.

    work        1.08   0.99   1.01   0.92         mean 1.00
    pairs       1.08 and 0.92  ->  1.00 and 1.00;   0.99 and 1.01 stay as they are

Ranks that were halved again and again are left with what the last cut could not do: a row of tiles of a long document
is some percent of a rank's work. What two such ranks have is another mix of slices, which mostly can be cut evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.cost.tiles import Float
from cp_rewrite.planning.intervals import Int

from .halves import Groups, halve, owners_work
from .slice_lines import tenths
from .slices import Slices

ENOUGH = 1.018
"""Imbalance that is not worth another round."""
ROUNDS = 24
"""At most: in each one every rank has another partner."""
FIRST_BLOCK, TURNS = 8, 2
"""Partners are of so many ranks first, for so many turns; then of twice as many, and so on."""


def even_pairs(
    slices: Slices, owner: Int, quotas: Sequence[int], node_size: int, mask: PackedMask, unit: int
) -> tuple[Slices, Int]:
    """(slices, owner) with less work for the rank that has most, where that can be had; partners share a node.

    Args: as of `share_out_by_halves`, and what it returns; work in tenths of tiles.
    """
    tokens, ranks = np.asarray(quotas, dtype=np.int64), len(quotas)
    for turn in range(ROUNDS):
        work = owners_work(owner, slices, ranks)
        limit = work.mean() * ENOUGH
        if work.max() <= limit:
            break
        more, less = _partners(work, node_size, turn)
        chosen = (work[more] > limit) & (more != less)
        if not chosen.any():
            continue
        more, less = more[chosen], less[chosen]
        pair = np.full(ranks, -1)
        pair[more] = pair[less] = np.arange(len(more))
        mine = np.flatnonzero(pair[owner] >= 0)
        both, group = joined(slices.take(mine), pair[owner[mine]], mask)
        groups = Groups(
            np.stack([tokens[less], tokens[more]]), np.ones((2, len(more)), np.int64), mask, SeenKeys(mask), unit
        )
        made, half = halve(both, group, groups)
        done = owners_work(half, made, 2 * len(more)).reshape(-1, 2).max(1)
        better = done < work[more]
        if better.any():
            kept = np.flatnonzero((pair[owner] < 0) | ~np.append(better, False)[pair[owner]])
            new = np.flatnonzero(better[half // 2])
            to = np.stack([less, more], 1).reshape(-1)[half[new]]
            slices = Slices.join([slices.take(kept), made.take(new)])
            owner = np.append(owner[kept], to)
    return slices, owner


def _partners(work: Float, node_size: int, turn: int) -> tuple[Int, Int]:
    """(ranks with much work, a partner with little of each), in blocks of ranks that were halved last and so share
    documents: the first of a block by work with its last, the second with the last but one. Each turn moves partners on
    by one, later turns have larger blocks, up to a node."""
    size = min(node_size, FIRST_BLOCK << turn // TURNS)
    first = np.flatnonzero((ranks := np.arange(len(work))) % node_size % size == 0)
    block = np.searchsorted(first, ranks, side="right") - 1
    order = np.lexsort((work, block))
    half = np.bincount(block)[block] // 2
    end = np.append(first[1:], len(work))[block]
    back = end - 1 - ranks  # 0: the most work of its block
    more = np.flatnonzero(back < half)
    less = (first[block] + (back + turn) % np.maximum(1, half))[more]
    return order[more], order[less]


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
