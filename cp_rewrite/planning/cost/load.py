"""Load that a schedule puts on ranks, and what each part of it costs: kernels, transfers, copies of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.schedule import Schedule

from .constants import BACKWARD_FLOPS, EXPANDED_LAUNCHES, EXPANDED_PASSES
from .devices import Device, Model
from .tiles import Float, window_tiles


@dataclass(frozen=True, eq=False)
class Load:
    """Load that a schedule puts on ranks, device and link.

    Args:
        local_rows: R, of each rank.
        tiles: (P,) float64 kernel work of each rank, in tiles per query head.
        received: (P, P) int64 KV rows that rank [0] needs from rank [1], each once.
        expanded: (P,) int64 KV rows gathered for each rank's kernel, copies included.
        launches: kernel launches of the rank that has most.
        whole_tiles: kernel work of all documents, had none been cut.
        fill: local rows of each rank beyond an even share of the tokens.
    """

    local_rows: int
    tiles: Float
    received: Int
    expanded: Int
    launches: int
    whole_tiles: float
    fill: float = 0.0

    @property
    def world_size(self) -> int:
        return len(self.tiles)


def load_of(schedule: Schedule, whole_tiles: float | None = None) -> Load:
    """The load of a schedule. `whole_tiles`: work of the documents uncut; None: as if the cuts had cost nothing."""
    pieces = schedule.pieces
    tiles = window_tiles(pieces.q1 - pieces.q0, pieces.keys, pieces.left, pieces.right)
    per_rank = np.bincount(pieces.rank, tiles, schedule.world_size).astype(np.float64)
    launches = int(schedule.launch.max(initial=0)) + 1
    whole = float(per_rank.sum()) if whole_tiles is None else whole_tiles
    starts, stops = schedule.segments[:2]
    fill = schedule.local_rows - float((stops - starts).sum()) / schedule.world_size
    return Load(schedule.local_rows, per_rank, schedule.received, schedule.expanded, launches, whole, fill)


def kernel_seconds(tiles: float, launches: int, device: Device, model: Model) -> float:
    """One rank's attention kernels, forward and backward."""
    return sum(both_kernels(tiles, launches, device, model))


def both_kernels(tiles: float, launches: int, device: Device, model: Model) -> tuple[float, float]:
    """The same, of the forward and of the backward."""
    flops, start = float(tiles) * model.tile_flops, 2 * launches * device.launch
    return flops / device.forward + start, BACKWARD_FLOPS * flops / device.backward + start


def transfer_seconds(inside: Int, across: Int, row_bytes: int, device: Device) -> float:
    """Seconds until every rank has its rows: (P,) `inside` come from its own node, (P,) `across` from other nodes."""
    slowest = float((inside / device.link + across / device.node_link).max()) * row_bytes
    return slowest + (device.node_latency if across.any() else device.latency)


def copy_seconds(load: Load, device: Device, model: Model) -> float:
    """Seconds to copy the expanded rows."""
    return expanded_seconds(load, device, model) + EXPANDED_LAUNCHES * device.launch


def expanded_seconds(load: Load, device: Device, model: Model) -> float:
    """The same without launches."""
    return EXPANDED_PASSES * float(load.expanded.max()) * model.kv_bytes / device.memory


def from_nodes(received: Int, ranks_per_node: int) -> tuple[Int, Int]:
    """(rows that each rank has from its own node, from others), each (P,), of (P, P) that [0] has from [1]."""
    nodes = np.arange(len(received) // ranks_per_node)
    shape = len(nodes), ranks_per_node
    inside = received.reshape(*shape, *shape)[nodes, :, nodes].sum(2).reshape(-1)
    return inside, received.sum(1) - inside
