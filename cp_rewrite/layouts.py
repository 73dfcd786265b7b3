"""Token orders: which rank owns which tokens of a row, as run-length intervals.

Every rank keeps its tokens sorted by their position in the row, so an order is the set of intervals per rank:

    contiguous, 2 ranks        rank 0: 0 1 2 3          rank 1: 4 5 6 7
    head_tail, 2 ranks         rank 0: 0 1 6 7          rank 1: 2 3 4 5
    dual_chunk, docs 4 and 4   rank 0: 0 3 4 7          rank 1: 1 2 5 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .documents import Documents
from .intervals import Int, expand_ranges
from .masks import PackedMask

if TYPE_CHECKING:
    from .cost import Device, Model

LAYOUTS = ("contiguous", "head_tail", "dual_chunk", "balanced")


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Who owns the tokens of one row of `total` tokens. Every token has exactly one owner.

    Ranks with fewer than `local_size` tokens have padding at the end of their local row.

    Args:
        total: tokens in the row.
        intervals: per rank, (n, 2) int64 intervals (start, stop) of the row, non-empty, ascending, not touching.
    """

    total: int
    intervals: tuple[Int, ...]

    @property
    def world_size(self) -> int:
        return len(self.intervals)

    @cached_property
    def sizes(self) -> Int:
        """(P,) tokens that each rank owns."""
        return np.array([int((part[:, 1] - part[:, 0]).sum()) for part in self.intervals], dtype=np.int64)

    @cached_property
    def local_size(self) -> int:
        """Tokens of a local row, padding included: the most tokens any rank owns."""
        return int(self.sizes.max())

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
        _, stops, owners = self.segments
        return np.repeat(owners, np.diff(stops, prepend=0))

    @cached_property
    def segments(self) -> tuple[Int, Int, Int]:
        """All intervals of all ranks in the row's order: (starts, stops, owners). They tile [0, total)."""
        parts = np.concatenate(self.intervals)
        owners = np.repeat(np.arange(self.world_size), [len(part) for part in self.intervals])
        order = np.argsort(parts[:, 0], kind="stable")
        return parts[order, 0], parts[order, 1], owners[order]

    @classmethod
    def from_cuts(cls, bounds: Int, owners: Int, world_size: int) -> TokenOrder:
        """The order in which rank owners[i] owns tokens [bounds[i], bounds[i + 1]).

        Args:
            bounds: (n + 1,) ascending from 0; bounds[-1] is the row's total. Empty ranges are dropped.
            owners: (n,) ranks.
        """
        keep = np.diff(bounds) > 0
        starts, owners = bounds[:-1][keep], owners[keep]
        new = np.diff(owners, prepend=-1) != 0  # neighbours of one rank are one interval
        starts, owners = starts[new], owners[new]
        parts = np.stack([starts, np.append(starts[1:], bounds[-1])[: len(starts)]], axis=1).astype(np.int64)
        by_rank = np.argsort(owners, kind="stable")
        splits = np.searchsorted(owners[by_rank], np.arange(1, world_size))
        return cls(int(bounds[-1]), tuple(np.split(parts[by_rank], splits)))


def order_tokens(
    documents: Documents,
    world_size: int,
    layout: str,
    mask: PackedMask,
    *,
    ranks_per_node: int | None = None,
    device: Device | None = None,
    model: Model | None = None,
) -> TokenOrder:
    """The token order of one row.

    Args:
        documents: the row's documents.
        world_size: ranks, >= 1.
        layout: one of LAYOUTS.
        mask: what attention sees. Only `balanced` depends on it and on what follows.
        ranks_per_node: ranks that share fast links; None: all.
        device, model: what the cost model plans for.
    Raises:
        ValueError: an unknown layout, or world_size < 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    if layout == "contiguous":
        return contiguous(documents.total, world_size)
    if layout == "head_tail":
        return dual_chunk(np.array([0, documents.total]), world_size)
    if layout == "dual_chunk":
        return dual_chunk(documents.spans, world_size)
    if layout == "balanced":
        from .balanced import balanced  # which itself weighs the layouts of this file

        return balanced(documents, world_size, mask, ranks_per_node=ranks_per_node, device=device, model=model)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")


def contiguous(total: int, world_size: int) -> TokenOrder:
    """Rank r owns tokens [r c, (r + 1) c), c = ceil(total / world_size)."""
    chunk = -(-total // world_size)
    bounds = np.minimum(np.arange(world_size + 1, dtype=np.int64) * chunk, total)
    return TokenOrder.from_cuts(bounds, np.arange(world_size), world_size)


def dual_chunk(spans: Int, world_size: int) -> TokenOrder:
    """Each span is cut into 2P chunks and rank r owns chunks r and 2P - 1 - r: equal causal work within a span.

    The order of TransformerEngine and Megatron when spans are the padded documents, each a multiple of 2P. A span
    of any other length has chunks of ceil(length / 2P) tokens, the later ones shorter or empty. With one span this
    is `head_tail`.

    Args:
        spans: (N + 1,) ascending bounds from 0 to the row's total.
    """
    lengths = np.diff(spans)
    chunk = np.arange(2 * world_size, dtype=np.int64)
    size = -(-lengths // (2 * world_size))
    starts = spans[:-1, None] + np.minimum(chunk * size[:, None], lengths[:, None])
    owners = np.tile(np.minimum(chunk, 2 * world_size - 1 - chunk), len(lengths))
    return TokenOrder.from_cuts(np.append(starts.reshape(-1), spans[-1]), owners, world_size)


def common_local_size(orders: Sequence[TokenOrder]) -> int:
    """Tokens of a local row of a batch whose rows are laid out by `orders`."""
    return max(order.local_size for order in orders)
