"""Routes by collectives: of an all-gather, which serves one rank alone too, and of an all-to-all of the rows that are
needed.

    ALL_GATHER, LOCAL    every rank gets all rows, and expands those that its pieces read
    NEEDED               only rows that some piece of another rank reads travel, each once to each rank
"""

from __future__ import annotations

import numpy as np

from cp_rewrite.capacity import Capacity
from cp_rewrite.planning.cost.constants import ALL_GATHER_PASSES, NEEDED_PASSES
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load, copy_seconds, from_nodes, kernel_seconds, transfer_seconds
from cp_rewrite.planning.intervals import Int, expand_ranges, sum_lists, union
from cp_rewrite.planning.plan_input import SENT_ROWS, PlanTensor
from cp_rewrite.planning.schedule import Schedule

from .route import Arrays, Cost, Route, filled, row_index


def gathered_route(schedule: Schedule, rank: int) -> Arrays:
    """The tables of one rank. P ranks, R local rows, E expanded rows.

    2 ranks with 2 rows each      gathered rows   0 1 | 2 3
    rank 1's pieces read          1 2 3 and 3     kv_rows 1 2 3 3      sums: row 1 of 0, row 2 of 1, row 3 of 2 and 3

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
    """The same for one rank, which gathers nothing.

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


def needed_route(schedule: Schedule, rank: int) -> Arrays:
    """The tables of one rank. P ranks, R local rows, E expanded rows, S rows sent, V rows received.

        rank 0 has rows 0 1 2 3, rank 1 reads 1 2, and 2 once more

        rank 0      send_rows 1 2      splits 0 2 sent, 0 0 received
        rank 1      received 1 2       behind its own 4 rows: positions 4 5      kv_rows 4 5 5
        back        rank 1 sums expanded rows 1 and 2 into position 5, and sends the sums of 4 and 5 home

    Returns:
        kv_rows: (E,) int32 into cat(R local rows, V received rows by source).
        send_rows: (S,) int32 local rows, by destination.
        splits: (2, P) int64 rows sent to, and received from, each rank.
        sum_ptr (R + V + 1,), sum_rows: int32, the expanded rows that contribute to each of these, see
            `intervals.sum_lists`.
        return_ptr (R + 1,), return_rows: int32, the same of each local row, into cat(own sums (R), sums that come back
            for the rows sent (S)).
    """
    size = schedule.local_rows
    runs = schedule.runs.take(schedule.runs.reader == rank)
    remote = runs.owner != rank
    slots = runs.owner * size + runs.source  # rows of all ranks, owner after owner
    starts, stops = union(slots[remote], (slots + runs.length)[remote])
    before = np.cumsum(stops - starts) - (stops - starts)
    block = np.searchsorted(starts, slots[remote], side="right") - 1
    position = runs.source.copy()
    position[remote] = size + before[block] + slots[remote] - starts[block]
    kv_rows = expand_ranges(position, runs.length)
    received = np.bincount(expand_ranges(starts, stops - starts) // size, minlength=schedule.world_size)
    ptr, members = sum_lists(kv_rows, size + int(received.sum()))
    send_rows, sent = _sent_rows(schedule, rank)
    return_ptr, return_rows = sum_lists(np.concatenate([np.arange(size), send_rows]), size)
    return {
        "kv_rows": row_index(kv_rows),
        "send_rows": row_index(send_rows),
        "splits": np.stack([sent, received]),
        "sum_ptr": row_index(ptr),
        "sum_rows": row_index(members),
        "return_ptr": row_index(return_ptr),
        "return_rows": row_index(return_rows),
    }


def _sent_rows(schedule: Schedule, rank: int) -> tuple[Int, Int]:
    """(local rows by destination, how many go to each rank)."""
    runs = schedule.runs.take((schedule.runs.owner == rank) & (schedule.runs.reader != rank))
    slots = runs.reader * schedule.local_rows + runs.source
    starts, stops = union(slots, slots + runs.length)
    rows = expand_ranges(starts, stops - starts)
    return rows % schedule.local_rows, np.bincount(rows // schedule.local_rows, minlength=schedule.world_size)


def needed_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`needed`: only rows that some piece reads move; one gather makes the expanded rows, one sum takes them apart."""
    inside, across = from_nodes(load.received, ranks_per_node)
    there = transfer_seconds(inside, across, model.kv_bytes, device)
    inside, across = from_nodes(load.received.T, ranks_per_node)
    back = transfer_seconds(inside, across, 2 * model.kv_bytes, device)
    kernel = kernel_seconds(load.tiles.max(), load.launches, device, model)
    return 2 * there + back + copy_seconds(load, device, model) + kernel


NEEDED = Route(
    (PlanTensor("kv_rows"), *SENT_ROWS),
    needed_route,
    cost=Cost(needed_seconds, copies=NEEDED_PASSES),
)
