"""Plans: who owns which tokens of a batch, and what each mask's attention then does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .documents import Documents
from .intervals import Int
from .layouts import TokenOrder, common_local_size, order_tokens
from .masks import PackedMask
from .schedule import Schedule, build


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The token orders of one batch, and its schedules: one per mask, made when first asked for. Pickles.

    Args:
        rows: documents of each batch row, all with the same total.
        orders: token order of each batch row.
        world_size: ranks.
    """

    rows: tuple[Documents, ...]
    orders: tuple[TokenOrder, ...]
    world_size: int
    _schedules: dict[PackedMask, Schedule] = field(default_factory=dict[PackedMask, Schedule], repr=False)

    @property
    def local_size(self) -> int:
        """Tokens of each rank in every batch row, padding included."""
        return common_local_size(self.orders)

    def local_indices(self, rank: int) -> Int:
        """(B, local_size) int64: index in the global row of each local token, -1 where there is none."""
        indices = np.full((len(self.rows), self.local_size), -1, dtype=np.int64)
        for row, order in zip(indices, self.orders, strict=True):
            row[: order.local_size] = order.local_indices(rank)
        return indices

    def schedule(self, mask: PackedMask) -> Schedule:
        """The schedule of attention under `mask`, for all ranks."""
        if mask not in self._schedules:
            self._schedules[mask] = build(self.rows, self.orders, mask)
        return self._schedules[mask]


def plan_batch(
    rows: Sequence[Documents], world_size: int, layout: str = "balanced", mask: PackedMask | None = None
) -> BatchPlan:
    """Lay out a batch.

    Args:
        rows: documents of each batch row, at least one row, all with the same total.
        world_size: ranks.
        layout: one of `layouts.LAYOUTS`.
        mask: what `balanced` balances; by default causal attention within documents.
    Raises:
        ValueError: no rows, rows of different totals, an unknown layout, world_size < 1.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    totals = {documents.total for documents in rows}
    if len(totals) > 1:
        raise ValueError(f"all rows of a batch have one length, got {sorted(totals)} tokens")
    mask = PackedMask() if mask is None else mask
    orders = tuple(order_tokens(documents, world_size, layout, mask) for documents in rows)
    return BatchPlan(tuple(rows), orders, world_size)
