"""The route of an all-gather: every rank gets all rows, and expands those that its pieces read.

    2 ranks with 2 rows each      gathered rows   0 1 | 2 3
    rank 1's pieces read          1 2 3 and 3     kv_rows 1 2 3 3      sums: row 1 of 0, row 2 of 1, row 3 of 2 and 3

The same tables serve one rank alone, which gathers nothing.
"""

from __future__ import annotations

import numpy as np

from cp_rewrite.capacity import Capacity
from cp_rewrite.planning.cost.constants import ALL_GATHER_PASSES
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load, copy_seconds, kernel_seconds, transfer_seconds
from cp_rewrite.planning.intervals import expand_ranges, sum_lists
from cp_rewrite.planning.plan_input import PlanTensor
from cp_rewrite.planning.schedule import Schedule

from .route import Arrays, Cost, Route, filled, row_index


def gathered_route(schedule: Schedule, rank: int) -> Arrays:
    """The tables of one rank. P ranks, R local rows, E expanded rows.

    Returns:
        kv_rows: (E,) int32 into the P R gathered rows: owner R + local row.
        sum_ptr (P R + 1,), sum_rows: int32, the expanded rows that contribute to each gathered row, see
            `intervals.sum_lists`.
    """
    runs = schedule.runs.take(schedule.runs.reader == rank)
    kv_rows = expand_ranges(runs.owner * schedule.local_rows + runs.source, runs.length)
    ptr, members = sum_lists(kv_rows, schedule.world_size * schedule.local_rows)
    return {"kv_rows": row_index(kv_rows), "sum_ptr": row_index(ptr), "sum_rows": row_index(members)}


def local_route(schedule: Schedule, rank: int) -> Arrays:
    """The same for one rank.

    Raises:
        ValueError: there are more ranks.
    """
    if schedule.world_size > 1:
        raise ValueError(f"the local route is for one rank, this schedule has {schedule.world_size}")
    return gathered_route(schedule, rank)


def fixed_gathered_route(schedule: Schedule, rank: int, capacity: Capacity) -> Arrays:
    """The same in the sizes of a capacity. Rows after the rank's expanded ones repeat its first."""
    route, used = gathered_route(schedule, rank), int(schedule.expanded[rank])
    kv_rows = route["kv_rows"][:used]
    return {
        "kv_rows": filled(kv_rows, capacity.rows, kv_rows[0] if used else 0),
        "sum_ptr": route["sum_ptr"],
        "sum_rows": filled(route["sum_rows"], 2 * (len(route["sum_ptr"]) - 1) + capacity.rows, 0),
    }


def all_gather_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`all_gather`: all rows go everywhere; each row enters another node once, over all of the node's adapters."""
    g = min(ranks_per_node, load.world_size)
    inside = np.array([(load.world_size - 1) * load.local_rows])
    across = np.array([(load.world_size - g) * load.local_rows // g])
    moved = transfer_seconds(inside, across, 4 * model.kv_bytes, device) + 2 * device.latency
    return moved + copy_seconds(load, device, model) + kernel_seconds(load.tiles.max(), load.launches, device, model)


_TENSORS = (PlanTensor("kv_rows"), PlanTensor("sum_ptr"), PlanTensor("sum_rows"))
LOCAL = Route(_TENSORS, local_route, fixed_gathered_route)
ALL_GATHER = Route(
    _TENSORS, gathered_route, fixed_gathered_route, cost=Cost(all_gather_seconds, copies=ALL_GATHER_PASSES)
)
