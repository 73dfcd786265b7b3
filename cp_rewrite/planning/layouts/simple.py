"""Token orders by a formula. Every rank keeps its tokens by their position in the row.

    contiguous, 2 ranks                  rank 0: 0 1 2 3       rank 1: 4 5 6 7
    head_tail, 2 ranks                   rank 0: 0 1 6 7       rank 1: 2 3 4 5
    dual_chunk, documents of 4 and 4     rank 0: 0 3 4 7       rank 1: 1 2 5 6

Each has an `even_…` twin, in which all ranks own equal numbers of tokens whatever the lengths; `balanced` weighs both.
Throughout, cuts fall on multiples of `unit`, and a document's inner bounds must, too.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from cp_rewrite.planning.intervals import Int

from .token_order import TokenOrder


def contiguous(total: int, world_size: int, unit: int = 1) -> TokenOrder:
    """Rank r owns tokens [r c, (r + 1) c), c = ceil(total / world_size), rounded up to a multiple of `unit`."""
    chunk = -(-total // (world_size * unit)) * unit
    bounds = np.minimum(np.arange(world_size + 1, dtype=np.int64) * chunk, total)
    return TokenOrder.from_cuts(bounds, np.arange(world_size), world_size)


def even_contiguous(total: int, world_size: int, unit: int = 1) -> TokenOrder:
    """`contiguous` with equal tokens per rank; those left over go to ranks evenly spaced, not to the first ones."""
    units = -(-total // unit)
    bounds = np.minimum(np.arange(world_size + 1) * units // world_size * unit, total)
    return TokenOrder.from_cuts(bounds, np.arange(world_size), world_size)


def dual_chunk(spans: Int, world_size: int, unit: int = 1) -> TokenOrder:
    """Each span is cut into 2P chunks and rank r owns chunks r and 2P - 1 - r: equal causal work within a span.

    The order of TransformerEngine and Megatron when spans are the padded documents, each a multiple of 2P. A span
    of any other length has chunks of ceil(length / 2P) tokens, the later ones shorter or empty. With one span this
    is `head_tail`.

    Args:
        spans: (N + 1,) int64 ascending bounds from 0 to the row's total.
        unit: chunks are a multiple of it.
    """
    lengths = np.diff(spans)
    chunk = np.arange(2 * world_size, dtype=np.int64)
    size = -(-lengths // (2 * world_size * unit)) * unit
    # (N, 2P): where each chunk of each span starts.
    starts = spans[:-1, None] + np.minimum(chunk * size[:, None], lengths[:, None])
    owners = np.tile(np.minimum(chunk, 2 * world_size - 1 - chunk), len(lengths))
    return TokenOrder.from_cuts(np.append(starts.reshape(-1), spans[-1]), owners, world_size)


def even_dual_chunk(spans: Int, world_size: int, unit: int = 1) -> TokenOrder:
    """`dual_chunk` with equal tokens per rank.

    All 2P chunks of a span have floor(length / 2P) tokens. The tokens left over of all spans are dealt to ranks
    0, 1, …, P − 1, 0, … in turn; a rank adds the first that it is dealt in a span to its first chunk there, a second
    one to the other.

        spans 7 and 5, 2 ranks     0 0 1 1 1 0 0 | 0 1 1 1 0     left over: 3 and 1

    Args:
        spans: (N + 1,) int64 ascending bounds from 0 to the row's total.
        unit: cuts fall on multiples of it; inner bounds of spans must be multiples too.
    """
    units = np.diff(-(-spans // unit))
    over = units % (2 * world_size)
    chunk = np.arange(2 * world_size, dtype=np.int64)
    owner = np.minimum(chunk, 2 * world_size - 1 - chunk)
    # (N, 2P): in which turn of the span's dealing each chunk comes; the dealing goes on where the span before ended.
    turn = (owner - (np.cumsum(over) - over)[:, None]) % world_size + np.where(chunk < world_size, 0, world_size)
    sizes = (units // (2 * world_size))[:, None] + (turn < over[:, None])
    bounds = np.minimum(np.append(0, np.cumsum(sizes)) * unit, spans[-1])
    return TokenOrder.from_cuts(bounds, np.tile(owner, len(units)), world_size)


def even_head_tail(spans: Int, world_size: int, unit: int = 1, *, near: bool = False) -> TokenOrder:
    """`head_tail` with equal tokens per rank: the same heads, and as a tail the tokens that the rank then lacks.

    With `near` both cuts of a rank move together to where one of them meets a bound of spans, by a quarter of the
    rank's tokens at most:

        spans 5 and 9, 2 ranks     0 0 0 0 1 | 1 1 1 1 1 1 0 0 0
                     near          0 0 0 0 0 | 1 1 1 1 1 1 1 0 0

    Args:
        spans: (N + 1,) int64 ascending bounds from 0 to the row's total.
        unit: cuts fall on multiples of it; inner bounds of spans must be multiples too.
        near: move cuts.
    """
    inner: list[int] = (spans[1:-1] // unit).tolist()
    low, high = 0, -(-int(spans[-1]) // unit)  # units that no rank owns yet
    chunk = -(-high // (2 * world_size))
    heads, tails = [low], [high]
    for rank in range(world_size):
        size = -(-(high - low) // (world_size - rank))
        head = low + min(chunk, size)
        tail = high - (low + size - head)
        shift = _to_bound(inner, (head, tail), size // 4) if near else 0
        low, high = head + shift, tail + shift
        heads.append(low)
        tails.append(high)
    bounds = np.minimum(np.array(heads[:-1] + tails[::-1]) * unit, spans[-1])
    ranks = np.arange(world_size)
    return TokenOrder.from_cuts(bounds, np.concatenate([ranks, ranks[::-1]]), world_size)


def _to_bound(bounds: list[int], cuts: tuple[int, int], most: int) -> int:
    """The least shift, up to `most`, that brings one of both cuts to one of the ascending bounds; 0: none does."""
    shifts: list[int] = []
    for cut in cuts:
        at = bisect_left(bounds, cut)
        shifts += [bound - cut for bound in bounds[max(0, at - 1) : at + 1]]
    return min((shift for shift in shifts if abs(shift) <= most), key=abs, default=0)
