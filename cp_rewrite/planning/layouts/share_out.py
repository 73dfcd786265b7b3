"""Slices of documents (`Slices`), which are cut and shared out while a layout is searched for, and the simplest way to
do so: whole, where none is too long for a rank (`share_out_whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.tiles import Float, causal_tiles, window_tiles
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.sections import sections_of


@dataclass(frozen=True, eq=False)
class Slices:
    """N slices: slice i is tokens [start, start + size) of the row, from token `first` of its document on.

        documents        A A A A A A A A B B B
        two slices       . . A A A A A . . . .      start 2, size 5, first 2 of a document of 8
                         . . . . . . . . . B B      start 9, size 2, first 1 of a document of 3

    Slices of one document that touch on one rank are one piece of its schedule in the end.

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

    @classmethod
    def join(cls, groups: Sequence[Slices]) -> Slices:
        """The slices of all groups, group after group."""
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
    Balance then needs no cut.

    Ranks swap documents until each has nearly its tokens and its work. A rank with tokens too many gives the head of
    one document away, which does little work, and receives no more than that head's keys:

        rank 0    A A A A A A A A  B B B B          two tokens too many
        rank 1    C C C C C C  D D D   + B B        receives nothing; rank 0 receives the keys of these two

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
        head, table = mine.table[:, cut : cut + 1].copy(), mine.table.copy()
        head[1] = tokens
        table[[0, 3], cut] += tokens
        table[1, cut] -= tokens
        held[giver] = Slices(table, mine.work)
        held[taker] = Slices.join([held[taker], Slices(head, mine.work[cut : cut + 1])])
        over[[giver, taker]] += (-tokens, tokens)
    return held
