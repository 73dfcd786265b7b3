"""What attention under a schedule costs on a device: kernel tiles, bytes on links, rows copied, launches.

    forward   = slowest rank's exchange + slowest rank's kernel    (a phase ends when its last rank is done)
    backward  = the keys again, 2.5 x the FLOPs, and dK/dV back in fp32: 3 x the forward's bytes

    fill      = the rest of the layer on the local rows that a rank has beyond an even share of the tokens

Every rank computes all its local rows in every part of a layer, whether a token is in them or not; so rows that a
layout adds are paid for outside attention. Nothing is taken to overlap, except transfers of a push and of a ring with
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.routes.by_exchange import over_part
from cp_rewrite.planning.routes.head_deal import HeadDeal
from cp_rewrite.planning.routes.push_stages import (
    Shape,
    StageLoad,
    backward_seconds,
    backward_stages,
    forward_seconds,
    forward_stages,
)
from cp_rewrite.planning.schedule import Schedule

from .devices import Device, Model
from .tiles import TILE, TILE_ROW_OVERHEAD, Float, window_tiles

_SCATTERED = 8
"""How often what scatters heads reads or writes queries, keys and values, forward and backward."""


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


def exchange_seconds(
    load: Load,
    device: Device,
    model: Model,
    ranks_per_node: int | None = None,
    grids: Mapping[int, Load] | None = None,
) -> dict[str, float]:
    """Predicted seconds of one layer's attention and fill, forward and backward, by each exchange that can serve it.

    Args:
        ranks_per_node: ranks that share fast links; None: all.
        grids: number of inner ranks, between which heads are scattered -> the load of the outer places. Of fewer
            than the most the names have the number (`over_part`).
    """
    per_node = ranks_per_node or load.world_size
    seconds, most = _by_keys(load, device, model, per_node), max(grids or [0])
    for inner, outer in ({load.world_size: None} | dict(grids or {})).items():
        if model.heads[0] % inner == 0:
            found = _by_heads(load, device, model, per_node, inner, outer)
            seconds |= {over_part(name, inner) if inner < most else name: time for name, time in found.items()}
    fill = fill_seconds(load, device, model)
    return {name: attention + fill for name, attention in seconds.items()}


def _by_keys(load: Load, device: Device, model: Model, per_node: int) -> dict[str, float]:
    """Of exchanges of keys and values. Beyond what tells layouts apart, copies of the local rows count: keys and values
    are packed, rows to be sent are put behind each other, and gradients are rounded."""
    packed = load.local_rows * model.kv_bytes / device.memory
    seconds = {
        "all_gather": all_gather_seconds(load, device, model, per_node) + 7 * packed,
        "needed": needed_seconds(load, device, model, per_node) + 21 * packed,
        "p2p": ring_seconds(load, device, model, per_node),
    }
    if per_node >= load.world_size:
        seconds["push"] = push_seconds(load, device, model)
    return seconds


def _by_heads(
    load: Load, device: Device, model: Model, per_node: int, inner: int, outer: Load | None
) -> dict[str, float]:
    """Of exchanges that scatter heads over `inner` ranks, and move keys between the `outer` places, if there are."""
    scattered = all_to_all_seconds(load, device, model, per_node, inner)
    if outer is None:
        # Keys are copied as if there was an exchange behind it.
        local, rows = _local(model, inner), inner * load.local_rows
        copied = 14 * rows * local.kv_bytes / device.memory
        return {"a2a": scattered + copied + kernel_seconds(load.whole_tiles, 1, device, local)}
    places = _by_keys(outer, device, _local(model, inner), max(1, per_node // inner))
    return {f"a2a+{name}": scattered + seconds for name, seconds in places.items()}


def _dealt(model: Model, inner: int) -> HeadDeal:
    return HeadDeal.best(*model.heads, inner)


def _local(model: Model, inner: int) -> Model:
    """The attention of a rank that has its share of heads."""
    deal = _dealt(model, inner)
    return replace(model, heads=(deal.local, deal.local_kv))


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


def push_seconds(load: Load, device: Device, model: Model) -> float:
    """`push`: rows travel beside the kernel, which waits for all of them or runs in stages of heads."""
    shape = Shape(*model.heads, model.head_dim, model.head_dim, model.item_bytes)
    coming = load.received.sum(1)
    columns = zip(load.tiles.tolist(), coming.tolist(), (load.expanded - coming).tolist(), strict=True)
    loads = tuple(StageLoad(0, round(tiles), 0, rows, own, 0) for tiles, rows, own in columns)
    there, back = forward_stages(loads, shape), backward_stages(loads, shape, kept=False)
    forward = max(forward_seconds(each, shape, there, device) for each in loads)
    return forward + max(backward_seconds(each, shape, back, False, device) for each in loads)


def ring_seconds(load: Load, device: Device, model: Model, ranks_per_node: int) -> float:
    """`p2p`: P steps, each a kernel over one rank's keys beside a transfer, then a merge of out and log-sum-exp.

    In the backward keys travel beside a step's kernel, fp32 gradients beside the next one; the last go home alone.
    """
    ranks, rows = load.world_size, load.local_rows
    across = np.array([rows if ranks_per_node < ranks else 0])
    step = _transfer(np.array([rows]) - across, across, model.kv_bytes, replace(device, link=device.ring))
    more_rows = (ranks - 1) * TILE_ROW_OVERHEAD * rows / TILE
    there, back = _directions(load.tiles.max() + more_rows, load.launches * ranks, device, model)
    # Read and written in fp32: out is merged in every step, dq and the gradients of keys are added up.
    merged = rows * model.q_bytes / device.memory
    summed = rows * model.kv_bytes / device.memory
    there += (10 + 17 * (ranks - 1)) * merged + 2 * summed
    back += (5 + 5 * ranks) * merged + (7 + 16 * ranks) * summed
    copied = 5 * float(load.expanded.max()) * model.kv_bytes / device.memory
    first, last = (ranks - 1) / ranks, 1 / ranks
    forward = max(there * first, (ranks - 1) * step) + there * last
    backward = max(back, 3 * (ranks - 1) * step) + 2 * step
    return forward + backward + copied


def all_to_all_seconds(load: Load, device: Device, model: Model, ranks_per_node: int, inner: int) -> float:
    """Queries, keys, values and outputs change from shards of tokens to shards of heads among `inner` ranks, and back,
    in the forward and in the backward."""
    deal = _dealt(model, inner)
    width = model.head_dim * model.item_bytes * inner
    inputs, outputs = (deal.local + 2 * deal.local_kv) * width, deal.local * width
    g = min(ranks_per_node, inner)
    inside = np.array([load.local_rows * (g - 1) // inner])
    across = np.array([load.local_rows * (inner - g) // inner])
    moved = 2 * _transfer(inside, across, inputs + outputs, replace(device, link=device.all_to_all))
    # Heads put together, sorted by rank, rows sorted by token, each read and written; then the same backward.
    reorder = load.local_rows * (_SCATTERED * inputs + 8 * outputs) / device.memory
    return moved + 2 * device.latency + reorder


def needed_bytes(load: Load, model: Model, ranks_per_node: int) -> tuple[Float, Float]:
    """(P,) bytes that each rank receives in a forward under `needed`: (from its own node, from other nodes)."""
    near = same_node(load.world_size, ranks_per_node)
    inside, across = (np.where(at, load.received, 0).sum(1) * float(model.kv_bytes) for at in (near, ~near))
    return inside, across


def scattered_bytes(load: Load, places: Load, model: Model, ranks_per_node: int) -> tuple[Float, Float]:
    """The same under `a2a+needed`, heads scattered inside of each of the outer `places`: those of one place's ranks are
    equal."""
    inner = load.world_size // places.world_size
    deal, width = _dealt(model, inner), model.head_dim * model.item_bytes
    scattered = 2 * (deal.local + deal.local_kv) * width * (inner - 1) * load.local_rows
    inside, across = needed_bytes(places, _local(model, inner), max(1, ranks_per_node // inner))
    return np.repeat(inside + scattered, inner), np.repeat(across, inner)


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
    return sum(_directions(tiles, launches, device, model))


def _directions(tiles: float, launches: int, device: Device, model: Model) -> tuple[float, float]:
    """The same, of the forward and of the backward."""
    flops, start = float(tiles) * model.tile_flops, 2 * launches * device.launch
    return flops / device.forward + start, 2.5 * flops / device.backward + start
