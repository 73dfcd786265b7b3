"""Seconds that attention under a schedule takes on a device: kernel tiles, bytes on links, rows copied, launches.

    forward   = slowest rank's exchange + slowest rank's kernel    (a phase ends when its last rank is done)
    backward  = the keys again, 2.5 x the FLOPs, and dK/dV back in fp32: 3 x the forward's bytes

    fill      = the rest of the layer on the local rows that a rank has beyond an even share of the tokens

Every rank computes all its local rows in every part of a layer, whether a token is in them or not; so rows that a
layout adds are paid for outside attention. Nothing is taken to overlap, except transfers of a push and of a ring with
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cp_rewrite.planning.names import over_part
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.head_deal import HeadDeal

from .constants import A2A_COPIES, A2A_PASSES
from .devices import Device, Model
from .load import Load, from_nodes, kernel_seconds, transfer_seconds
from .tiles import Float


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
    """Exchange of keys and values -> seconds."""
    packed = load.local_rows * model.kv_bytes / device.memory
    return {
        kind: cost.seconds(load, device, model, per_node) + cost.copies * packed
        for kind, route in ROUTES.items()
        if (cost := route.cost) is not None and (per_node >= load.world_size or not cost.in_one_node)
    }


def _by_heads(
    load: Load, device: Device, model: Model, per_node: int, inner: int, outer: Load | None
) -> dict[str, float]:
    """Seconds of exchanges that scatter heads over `inner` ranks and move keys between the `outer` places, if any."""
    scattered = all_to_all_seconds(load, device, model, per_node, inner)
    if outer is None:
        # Keys are copied as if there was an exchange behind it.
        local, rows = _local(model, inner), inner * load.local_rows
        copied = A2A_COPIES * rows * local.kv_bytes / device.memory
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


def all_to_all_seconds(load: Load, device: Device, model: Model, ranks_per_node: int, inner: int) -> float:
    """Queries, keys, values and outputs change from shards of tokens to shards of heads among `inner` ranks, and back,
    in the forward and in the backward."""
    deal = _dealt(model, inner)
    width = model.head_dim * model.item_bytes * inner
    inputs, outputs = (deal.local + 2 * deal.local_kv) * width, deal.local * width
    g = min(ranks_per_node, inner)
    inside = np.array([load.local_rows * (g - 1) // inner])
    across = np.array([load.local_rows * (inner - g) // inner])
    moved = 2 * transfer_seconds(inside, across, inputs + outputs, replace(device, link=device.all_to_all))
    reorder = load.local_rows * A2A_PASSES * (inputs + outputs) / device.memory
    return moved + 2 * device.latency + reorder


def needed_bytes(load: Load, model: Model, ranks_per_node: int) -> tuple[Float, Float]:
    """(P,) bytes that each rank receives in a forward under `needed`: (from its own node, from other nodes)."""
    inside, across = from_nodes(load.received, ranks_per_node)
    row = np.float64(model.kv_bytes)
    return inside * row, across * row


def scattered_bytes(load: Load, places: Load, model: Model, ranks_per_node: int) -> tuple[Float, Float]:
    """The same under `a2a+needed`, heads scattered inside of each of the outer `places`: those of one place's ranks are
    equal."""
    inner = load.world_size // places.world_size
    deal, width = _dealt(model, inner), model.head_dim * model.item_bytes
    scattered = 2 * (deal.local + deal.local_kv) * width * (inner - 1) * load.local_rows
    inside, across = needed_bytes(places, _local(model, inner), max(1, ranks_per_node // inner))
    return np.repeat(inside + scattered, inner), np.repeat(across, inner)
