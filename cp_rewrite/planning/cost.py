"""What attention under a schedule costs on a device: kernel tiles, bytes on links, rows copied, launches.

    forward   = slowest rank's exchange + slowest rank's kernel    (a phase ends when its last rank is done)
    backward  = the keys again, 2.5 x the FLOPs, and dK/dV back in fp32: 3 x the forward's bytes

    fill      = the rest of the layer on the local rows that a rank has beyond an even share of the tokens

Every rank computes all its local rows in every part of a layer, whether a token is in them or not; so rows that a
layout adds are paid for outside attention. Nothing is taken to overlap, except a ring's transfers with its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .devices import Device, Model
from .intervals import Int
from .schedule import Schedule
from .tiles import TILE, TILE_ROW_OVERHEAD, Float, window_tiles


@dataclass(frozen=True, eq=False)
class Load:
    """What a schedule puts on ranks, device and link.

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


def exchange_seconds(load: Load, device: Device, model: Model, ranks_per_node: int | None = None) -> dict[str, float]:
    """Predicted seconds of one layer's attention and fill, forward and backward, by each exchange that can serve it.

    `ranks_per_node`: ranks that share fast links; None: all.
    """
    per_node = ranks_per_node or load.world_size
    seconds = {
        "all_gather": all_gather_seconds(load, device, model, per_node),
        "needed": needed_seconds(load, device, model, per_node),
        "p2p": ring_seconds(load, device, model, per_node),
    }
    if model.heads[0] % load.world_size == 0:
        seconds["a2a"] = all_to_all_seconds(load, device, model, per_node)
    fill = fill_seconds(load, device, model)
    return {name: attention + fill for name, attention in seconds.items()}


def fill_seconds(load: Load, device: Device, model: Model) -> float:
    """The rest of the layer on `load.fill` rows, at the attention kernel's speed.

    Its matrix products are faster than that, its norms and activations slower.
    """
    flops = load.fill * model.row_flops
    return flops / device.forward + 2 * flops / device.backward


def needed_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`needed`: only rows that some piece reads move; one gather makes the expanded rows, one sum takes them apart."""
    near = same_node(load.world_size, ranks_per_node)
    inside, across = np.where(near, load.received, 0), np.where(near, 0, load.received)
    there = _transfer(inside.sum(1), across.sum(1), model.kv_bytes, device)
    back = _transfer(inside.sum(0), across.sum(0), 2 * model.kv_bytes, device)
    kernel = kernel_seconds(load.tiles.max(), load.launches, device, model)
    return 2 * there + back + _copies(load, device, model) + kernel


def all_gather_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`all_gather`: all rows go everywhere; each row enters another node once, over all of the node's adapters."""
    g = min(ranks_per_node, load.world_size)
    inside = np.array([(load.world_size - 1) * load.local_rows])
    across = np.array([(load.world_size - g) * load.local_rows // g])
    moved = _transfer(inside, across, 4 * model.kv_bytes, device) + 2 * device.latency
    return moved + _copies(load, device, model) + kernel_seconds(load.tiles.max(), load.launches, device, model)


def ring_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`p2p`: P steps, each a kernel over one rank's keys beside a transfer, then a merge of out and log-sum-exp."""
    steps = load.world_size - 1
    across = np.array([load.local_rows if ranks_per_node < load.world_size else 0])
    step = _transfer(np.array([load.local_rows]) - across, across, 4 * model.kv_bytes, device)
    more_rows = steps * TILE_ROW_OVERHEAD * load.local_rows / TILE
    kernel = kernel_seconds(load.tiles.max() + more_rows, load.launches * (steps + 1), device, model)
    out_bytes = load.local_rows * model.heads[0] * model.head_dim * 4
    return max(kernel, 2 * steps * step) + steps * 4 * out_bytes / device.memory


def all_to_all_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`a2a`: queries, keys, values, outputs change from shards of tokens to shards of heads; documents stay whole."""
    heads = 2 * model.heads[0] + 2 * max(model.heads[1], load.world_size)
    row_bytes = heads * model.head_dim * model.item_bytes
    g = min(ranks_per_node, load.world_size)
    inside = np.array([load.local_rows * (g - 1) // load.world_size])
    across = np.array([load.local_rows * (load.world_size - g) // load.world_size])
    moved = 2 * _transfer(inside, across, row_bytes, device) + 6 * device.latency
    reorder = 8 * load.local_rows * row_bytes / device.memory
    return moved + reorder + kernel_seconds(load.whole_tiles / load.world_size, 1, device, model)


def same_node(world_size: int, ranks_per_node: int) -> NDArray[np.bool_]:
    """(P, P) bool: True where two ranks share a node."""
    node = np.arange(world_size) // ranks_per_node
    return node[:, None] == node[None, :]


def _transfer(inside: Int, across: Int, row_bytes: int, device: Device) -> float:
    """Seconds until every rank has its rows: (P,) `inside` come from its own node, (P,) `across` from other nodes."""
    slowest = float((inside / device.link + across / device.node_link).max()) * row_bytes
    return slowest + (device.node_latency if across.any() else device.latency)


def _copies(load: Load, device: Device, model: Model) -> float:
    """Gathered in the forward and the backward, dK/dV summed once: five reads or writes of the expanded rows."""
    return 5 * float(load.expanded.max()) * model.kv_bytes / device.memory + 3 * device.launch


def kernel_seconds(tiles: float, launches: int, device: Device, model: Model) -> float:
    """One rank's attention kernels, forward and backward."""
    flops = float(tiles) * model.tile_flops
    return flops / device.forward + 2.5 * flops / device.backward + 4 * launches * device.launch
