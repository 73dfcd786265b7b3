"""Kernel tables in the sizes of a `Capacity`, for steps that replay as one CUDA graph. `Route.fixed` makes routes."""

from __future__ import annotations

import numpy as np

from cp_rewrite.capacity import Capacity
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.columns import SIZES_ARE_BOUNDS, LaunchRow
from cp_rewrite.planning.schedule import Schedule

from .route import Arrays, filled


def fits(mask: PackedMask) -> bool:
    """Does one window serve all pieces of all batches? Not where documents' ends clip windows on the right, nor where
    spans have one of their own."""
    return not mask.looks_ahead or mask.left is mask.right is None


def fixed_tables(schedule: Schedule, rank: int, mask: PackedMask, capacity: Capacity) -> Arrays:
    """`Schedule.attention` in the sizes of `capacity`. Its second launch says so.

    Raises:
        ValueError: on all ranks alike, when the batch needs more on some rank.
    """
    everyone = [schedule.attention(each) for each in range(schedule.world_size)]
    _check(max(len(tables["cu_seqlens_q"]) - 1 for tables in everyone), schedule, capacity)
    tables = everyone[rank]
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    launches = LaunchRow(left, right, schedule.local_rows, capacity.rows), LaunchRow(0, 0, SIZES_ARE_BOUNDS, 0)
    return {
        "cu_seqlens_q": filled(tables["cu_seqlens_q"], capacity.pieces + 1, tables["cu_seqlens_q"][-1]),
        "cu_seqlens_k": filled(tables["cu_seqlens_k"], capacity.pieces + 1, tables["cu_seqlens_k"][-1]),
        "pieces": filled(tables["pieces"], capacity.pieces, 0),
        "launches": np.array(launches, dtype=np.int64),
    }


def _check(entries: int, schedule: Schedule, capacity: Capacity) -> None:
    """The same on all ranks: `entries` of kernel tables are those of the rank that has most, as are expanded rows."""
    expanded = int(schedule.expanded.max(initial=0))
    for name, needed in (("rows", expanded), ("pieces", entries)):
        if needed > getattr(capacity, name):
            raise ValueError(
                f"capacity.{name} is {getattr(capacity, name)}, but this batch needs {needed} on some rank: raise it"
            )
