"""Kernel tables and routes in the fixed sizes of a `Capacity`, for steps that replay as one CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.schedule import Schedule

from .push import push_route

Array = NDArray[np.integer[Any]]
EXCHANGES = ("local", "all_gather", "push")
"""Ways of moving rows whose sizes the host need not know."""
_TILE = 256
"""Rows past the last expanded one that a kernel may load with it: they must hold numbers."""


def fits(mask: PackedMask) -> bool:
    """Does one window serve all pieces of all batches? Not where documents' ends clip windows on the right."""
    return mask.right == 0 or mask.left is mask.right is None


def fixed_tables(schedule: Schedule, rank: int, mask: PackedMask, capacity: Capacity) -> dict[str, Array]:
    """`Schedule.attention` in the sizes of `capacity`. Its second launch says so: max_q is -1.

    Raises:
        ValueError: on all ranks alike, when the batch needs more on some rank.
    """
    everyone = [schedule.attention(each) for each in range(schedule.world_size)]
    _check(max(len(tables["cu_seqlens_q"]) - 1 for tables in everyone), schedule, capacity)
    tables = everyone[rank]
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return {
        "cu_seqlens_q": _filled(tables["cu_seqlens_q"], capacity.pieces + 1, tables["cu_seqlens_q"][-1]),
        "cu_seqlens_k": _filled(tables["cu_seqlens_k"], capacity.pieces + 1, tables["cu_seqlens_k"][-1]),
        "pieces": _filled(tables["pieces"], capacity.pieces, 0),
        "launches": np.array([[left, right, schedule.rows, capacity.rows], [0, 0, -1, 0]], dtype=np.int64),
    }


def fixed_route(schedule: Schedule, rank: int, exchange: str, capacity: Capacity) -> dict[str, Array]:
    """A route of `EXCHANGES` in the sizes of `capacity`. Rows after the rank's expanded ones repeat some."""
    if exchange == "push":
        return _fixed_push(schedule, rank, capacity)
    route, used = schedule.route(exchange, rank), int(schedule.expanded[rank])
    kv_rows = route["kv_rows"][:used]
    return {
        "kv_rows": _filled(kv_rows, capacity.rows, kv_rows[0] if used else 0),
        "sum_ptr": route["sum_ptr"],
        "sum_rows": _filled(route["sum_rows"], 2 * (len(route["sum_ptr"]) - 1) + capacity.rows, 0),
    }


def _fixed_push(schedule: Schedule, rank: int, capacity: Capacity) -> dict[str, Array]:
    rows = capacity.rows
    # The host can't tell a captured step where to cut.
    filling = min(_TILE, rows - int(schedule.expanded[rank]))
    route = push_route(schedule, rank, cut=False, filling=filling)
    most = schedule.world_size * rows
    return {
        **route,
        "sends": _filled(route["sends"], most, 0),
        "targets": _filled(route["targets"], most, 0),
        "expanded": np.zeros(rows, dtype=np.int8),
        "copied": np.zeros(rows, dtype=np.int8),
        "capacity": np.array([rows], dtype=np.int64),
        "holders": _filled(route["holders"], most, 0),
        "rest_cu_seqlens_q": np.zeros(2, dtype=np.int32),
        "rest_cu_seqlens_k": np.zeros(2, dtype=np.int32),
    }


def _check(entries: int, schedule: Schedule, capacity: Capacity) -> None:
    """The same on all ranks: `entries` of kernel tables are those of the rank that has most, as are expanded rows."""
    expanded = int(schedule.expanded.max(initial=0))
    for name, needed in (("rows", expanded), ("pieces", entries)):
        if needed > getattr(capacity, name):
            raise ValueError(
                f"capacity.{name} is {getattr(capacity, name)}, but this batch needs {needed} on some rank: raise it"
            )


def _filled(array: Array, size: int, value: Any) -> Array:
    tail = np.full((size - len(array), *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate([array, tail])
