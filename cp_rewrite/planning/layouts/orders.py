"""Token orders: which rank owns which tokens of a row, as run-length intervals; and those that need no search.

An order is a list of intervals per rank. In those here every rank keeps its tokens sorted by their position in the row:

    contiguous, 2 ranks        rank 0: 0 1 2 3          rank 1: 4 5 6 7
    head_tail, 2 ranks         rank 0: 0 1 6 7          rank 1: 2 3 4 5
    dual_chunk, docs 4 and 4   rank 0: 0 3 4 7          rank 1: 1 2 5 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cp_rewrite.planning.intervals import Int, expand_ranges


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Who owns the tokens of one row of `total` tokens. Every token has exactly one owner.

    Ranks with fewer than `local_size` tokens have padding at the end of their local row.

    Args:
        total: tokens in the row.
        intervals: per rank, (n, 2) int64 intervals (start, stop) of the row, non-empty, in the order in which the rank
            keeps them; one does not begin where the one before it ends.
        pad_to_multiple: `local_size` is rounded up to a multiple of it.
    """

    total: int
    intervals: tuple[Int, ...]
    pad_to_multiple: int = 1

    @property
    def world_size(self) -> int:
        return len(self.intervals)

    @cached_property
    def sizes(self) -> Int:
        """(P,) tokens that each rank owns."""
        return np.array([int((part[:, 1] - part[:, 0]).sum()) for part in self.intervals], dtype=np.int64)

    @cached_property
    def local_size(self) -> int:
        """Tokens of a local row, padding included: the most tokens any rank owns, rounded up."""
        return -(-int(self.sizes.max()) // self.pad_to_multiple) * self.pad_to_multiple

    @property
    def padding_rows(self) -> int:
        """Local rows, over all ranks, that hold no token."""
        return self.local_size * self.world_size - self.total

    def local_indices(self, rank: int) -> Int:
        """(local_size,) position in the row of each local token, -1 where the local row is padding."""
        part = self.intervals[rank]
        indices = np.full(self.local_size, -1, dtype=np.int64)
        indices[: self.sizes[rank]] = expand_ranges(part[:, 0], part[:, 1] - part[:, 0])
        return indices

    def rank_of(self) -> Int:
        """(total,) the owner of each token."""
        _, stops, owners, _ = self.segments
        return np.repeat(owners, np.diff(stops, prepend=0))

    @cached_property
    def segments(self) -> tuple[Int, Int, Int, Int]:
        """All intervals of all ranks in the row's order: (starts, stops, owners, sources). They tile [0, total); tokens
        [start, stop) are local tokens [source, …) of their owner."""
        parts = np.concatenate(self.intervals)
        owners = np.repeat(np.arange(self.world_size), [len(part) for part in self.intervals])
        ends = np.cumsum(parts[:, 1] - parts[:, 0])
        sources = ends - (parts[:, 1] - parts[:, 0]) - (np.cumsum(self.sizes) - self.sizes)[owners]
        order = np.argsort(parts[:, 0], kind="stable")
        return parts[order, 0], parts[order, 1], owners[order], sources[order]

    @classmethod
    def from_cuts(cls, bounds: Int, owners: Int, world_size: int) -> TokenOrder:
        """The order in which rank owners[i] owns tokens [bounds[i], bounds[i + 1]).

        Args:
            bounds: (n + 1,) ascending from 0; bounds[-1] is the row's total. Empty ranges are dropped.
            owners: (n,) ranks.
        """
        keep = bounds[1:] > bounds[:-1]
        starts, owners = bounds[:-1][keep], owners[keep]
        new = np.ones(len(owners), dtype=np.bool_)  # neighbours of one rank are one interval
        np.not_equal(owners[1:], owners[:-1], out=new[1:])
        starts, owners = starts[new], owners[new]
        parts = np.empty((len(starts), 2), dtype=np.int64)
        parts[:, 0] = starts
        parts[:-1, 1] = starts[1:]
        parts[-1:, 1] = bounds[-1]
        by_rank = owners.argsort(kind="stable")
        splits = owners[by_rank].searchsorted(np.arange(world_size + 1)).tolist()
        parts = parts[by_rank]
        return cls(int(bounds[-1]), tuple(parts[lo:hi] for lo, hi in pairwise(splits)))


def contiguous(total: int, world_size: int, unit: int = 1) -> TokenOrder:
    """Rank r owns tokens [r c, (r + 1) c), c = ceil(total / world_size), rounded up to a multiple of `unit`."""
    chunk = -(-total // (world_size * unit)) * unit
    bounds = np.minimum(np.arange(world_size + 1, dtype=np.int64) * chunk, total)
    return TokenOrder.from_cuts(bounds, np.arange(world_size), world_size)


def dual_chunk(spans: Int, world_size: int, unit: int = 1) -> TokenOrder:
    """Each span is cut into 2P chunks and rank r owns chunks r and 2P - 1 - r: equal causal work within a span.

    The order of TransformerEngine and Megatron when spans are the padded documents, each a multiple of 2P. A span
    of any other length has chunks of ceil(length / 2P) tokens, the later ones shorter or empty. With one span this
    is `head_tail`.

    Args:
        spans: (N + 1,) ascending bounds from 0 to the row's total.
        unit: chunks are a multiple of it.
    """
    lengths = np.diff(spans)
    chunk = np.arange(2 * world_size, dtype=np.int64)
    size = -(-lengths // (2 * world_size * unit)) * unit
    starts = spans[:-1, None] + np.minimum(chunk * size[:, None], lengths[:, None])
    owners = np.tile(np.minimum(chunk, 2 * world_size - 1 - chunk), len(lengths))
    return TokenOrder.from_cuts(np.append(starts.reshape(-1), spans[-1]), owners, world_size)


def even_dual_chunk(spans: Int, world_size: int, unit: int = 1) -> TokenOrder:
    """`dual_chunk` with equal tokens per rank, whatever the lengths.

    All 2P chunks of a span have floor(length / 2P) tokens; the tokens left over of all spans are dealt to ranks
    0, 1, …, P − 1, 0, … in turn, and a rank adds its own to its first chunk of the span, a second one to the other.

        spans 7 and 5, 2 ranks     0 0 1 1 1 0 0 | 0 1 1 1 0     left over: 3 and 1

    Args:
        spans: (N + 1,) ascending bounds from 0 to the row's total.
        unit: cuts fall on multiples of it; inner bounds of spans must be multiples too.
    """
    units = np.diff(-(-spans // unit))
    over = units % (2 * world_size)
    chunk = np.arange(2 * world_size, dtype=np.int64)
    owner = np.minimum(chunk, 2 * world_size - 1 - chunk)
    turn = (owner - (np.cumsum(over) - over)[:, None]) % world_size + np.where(chunk < world_size, 0, world_size)
    sizes = (units // (2 * world_size))[:, None] + (turn < over[:, None])
    bounds = np.minimum(np.append(0, np.cumsum(sizes)) * unit, spans[-1])
    return TokenOrder.from_cuts(bounds, np.tile(owner, len(units)), world_size)


def even_contiguous(total: int, world_size: int, unit: int = 1) -> TokenOrder:
    """`contiguous` with equal tokens per rank; those left over go to ranks evenly spaced, not to the first ones."""
    units = -(-total // unit)
    bounds = np.minimum(np.arange(world_size + 1) * units // world_size * unit, total)
    return TokenOrder.from_cuts(bounds, np.arange(world_size), world_size)


def even_head_tail(spans: Int, world_size: int, unit: int = 1, *, near: bool = False) -> TokenOrder:
    """`head_tail` with equal tokens per rank: the same heads, and tails of the tokens that then are missing.

    With `near` the two cuts of a rank move together to where one meets a bound of spans, by a quarter of its tokens at
    most:

        spans 5 and 9, 2 ranks     0 0 0 0 1 | 1 1 1 1 1 1 0 0 0
                     near          0 0 0 0 0 | 1 1 1 1 1 1 1 0 0

    Args:
        spans: (N + 1,) ascending bounds from 0 to the row's total.
        unit: cuts fall on multiples of it; inner bounds of spans must be multiples too.
        near: move cuts.
    """
    inner = spans[1:-1] // unit
    low, high = 0, -(-int(spans[-1]) // unit)
    chunk = -(-high // (2 * world_size))
    heads, tails = [low], [high]
    for rank in range(world_size):
        size = -(-(high - low) // (world_size - rank))
        head = low + min(chunk, size)
        tail = high - (low + size - head)
        shifts = np.concatenate([inner - head, inner - tail]) if near else inner[:0]
        shifts = shifts[np.abs(shifts) <= size // 4]
        shift = int(shifts[np.argmin(np.abs(shifts))]) if shifts.size else 0
        low, high = head + shift, tail + shift
        heads.append(low)
        tails.append(high)
    bounds = np.minimum(np.array(heads[:-1] + tails[::-1]) * unit, spans[-1])
    ranks = np.arange(world_size)
    return TokenOrder.from_cuts(bounds, np.concatenate([ranks, ranks[::-1]]), world_size)


def joined(intervals: Int) -> Int:
    """(n, 2) intervals, those that begin where the one before them ends joined to it."""
    new = np.ones(len(intervals), dtype=np.bool_)
    new[1:] = intervals[1:, 0] != intervals[:-1, 1]
    ends = np.append(new[1:], True)[: len(intervals)]
    return np.stack([intervals[new, 0], intervals[ends, 1]], axis=1)


def common_local_size(orders: Sequence[TokenOrder]) -> int:
    """Tokens of a local row of a batch whose rows are laid out by `orders`."""
    return max(order.local_size for order in orders)
