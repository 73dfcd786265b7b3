"""The plan of a batch: who owns which tokens of each of its rows, and what each mask's attention then does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.load import load_of
from cp_rewrite.planning.cost.tiles import imbalance
from cp_rewrite.planning.layouts.by_name import lay_out
from cp_rewrite.planning.layouts.options import LayoutOptions
from cp_rewrite.planning.layouts.token_order import TokenOrder, common_local_size

from .intervals import Int
from .schedule import Schedule, build


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The token orders of one batch, and its schedules: one per mask, made when first asked for. Pickles.

    Args:
        rows: documents of each row of the batch, all with the same total.
        orders: token order of each row.
        world_size: ranks.
        seams: tokens at which the rows begin that were joined to the batch's one, but for the first.
    """

    rows: tuple[Documents, ...]
    orders: tuple[TokenOrder, ...]
    world_size: int
    seams: tuple[int, ...] = ()
    _schedules: dict[PackedMask, Schedule] = field(default_factory=dict[PackedMask, Schedule], repr=False)
    _indices: dict[int, Int] = field(default_factory=dict[int, Int], repr=False)

    @cached_property
    def local_size(self) -> int:
        """T_l: local rows of each rank for every row of the batch, fill included."""
        return common_local_size(self.orders)

    @property
    def fill(self) -> int:
        """Local rows without a token of all ranks, of one row of the batch."""
        return self.local_size * self.world_size - self.rows[0].total

    @property
    def row_bounds(self) -> Int:
        """Starts of the rows that were joined to one, and the end of the last."""
        return np.array([0, *self.seams, self.rows[0].total], dtype=np.int64)

    @property
    def padding(self) -> int:
        """Tokens of no document, of all rows."""
        return sum(row.total - int(row.lengths.sum()) for row in self.rows)

    def local_indices(self, rank: int) -> Int:
        """(B, T_l) int64: the token of the global row in each local row, -1 for fill. Made once; not to be written."""
        if rank not in self._indices:
            indices = np.full((len(self.rows), self.local_size), -1, dtype=np.int64)
            for row, order in zip(indices, self.orders, strict=True):
                row[: order.local_size] = order.local_indices(rank)
            indices.flags.writeable = False
            self._indices[rank] = indices
        return self._indices[rank]

    def local_rows(self, rank: int) -> Int:
        """(B, T) int64: the local row of each token of the global row, -1 of another rank's; undoes `local_indices`."""
        indices = self.local_indices(rank)
        rows = np.full((len(self.rows), self.rows[0].total), -1, dtype=np.int64)
        row, place = np.nonzero(indices >= 0)
        rows[row, indices[row, place]] = place
        return rows

    def filled_indices(self, rank: int) -> Int:
        """(B, T_l) int64: as `local_indices`, but fill has a token too: what is computed of it is as valid as of that.

        It is the last token of a document before it on this rank; where there is none, the first of the row.

            local_indices     4 5 -1 -1     7, padding: -1 -1
            filled_indices    4 5  5  5     7           0  0
        """
        indices = self.local_indices(rank).copy()
        for row, documents in zip(indices, self.rows, strict=True):
            if (row < 0).any():
                ids = documents.document_ids()
                given = (row >= 0) & (ids[row] >= 0)
                # places of the rows that can be copied, -1 before the first
                place = np.maximum.accumulate(np.where(given, np.arange(row.size), -1))
                first = int(np.argmax(ids >= 0))
                row[row < 0] = np.where(place >= 0, row[place], first)[row < 0]
        return indices

    def copied_rows(self, rank: int) -> Int:
        """(B, T_l) int64: the local row that each is a copy of, fill of others; T_l: of one that this rank has not."""
        held = np.take_along_axis(self.local_rows(rank), self.filled_indices(rank), axis=1)
        return np.where(held >= 0, held, self.local_size)

    def schedule(self, mask: PackedMask) -> Schedule:
        """The schedule of attention under `mask`, for all ranks."""
        if mask not in self._schedules:
            self._schedules[mask] = build(self.rows, self.orders, mask)
        return self._schedules[mask]

    def imbalance(self, mask: PackedMask | None = None) -> float:
        """Work of the rank that has most over the mean of ranks, in kernel tiles of attention under `mask`, by default
        causal inside of documents."""
        return imbalance(load_of(self.schedule(mask or PackedMask())).tiles)


def plan_batch(
    rows: Sequence[Documents],
    world_size: int,
    layout: str = "balanced",
    mask: PackedMask | None = None,
    options: LayoutOptions | None = None,
    seams: tuple[int, ...] = (),
) -> BatchPlan:
    """Lay out a batch.

    Args:
        rows: documents of each row of the batch, at least one row, all with the same total.
        world_size: ranks.
        layout: one of `layouts.by_name.LAYOUTS`.
        mask: what `balanced` balances; by default causal attention within documents.
        options: where documents may be cut, and what is planned for.
        seams: as of `BatchPlan`.
    Raises:
        ValueError: no rows, rows of different totals, and what `lay_out` raises.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    totals = {documents.total for documents in rows}
    if len(totals) > 1:
        raise ValueError(f"all rows of a batch have one length, got {sorted(totals)} tokens")
    orders = tuple(lay_out(row, world_size, layout, mask or PackedMask(), options) for row in rows)
    return BatchPlan(tuple(rows), orders, world_size, seams)
