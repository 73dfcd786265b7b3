"""The exchange that serves an attention site, and the seconds that each would take: decided when its graph is compiled.

exchange_seconds              attention under a schedule on a device: kernel tiles, bytes on links, rows copied,
                              launches
needed_bytes, …               bytes that ranks receive
choose_exchange               the cheapest exchange
typical_load                  the load of a batch that is not known yet
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cp_rewrite.masks import PackedMask

from .cost.constants import A2A_COPIES, A2A_PASSES, CAUSAL_SHARE, PACKED_SHARE, TILE, TILE_ROW_OVERHEAD, TOKENS_PER_RANK
from .cost.devices import Device, Model
from .cost.load import Load, from_nodes, kernel_seconds, transfer_seconds
from .cost.tiles import Float
from .names import over_part
from .routes.by_exchange import ROUTES
from .routes.head_deal import HeadDeal


def exchange_seconds(
    load: Load,
    device: Device,
    model: Model,
    ranks_per_node: int | None = None,
    grids: Mapping[int, Load] | None = None,
) -> dict[str, float]:
    """Predicted seconds of one layer's attention and fill, forward and backward, by each exchange that can serve it.

        forward   = slowest rank's exchange + slowest rank's kernel    (a phase ends when its last rank is done)
        backward  = the keys again, 2.5 x the FLOPs, and dK/dV back in fp32: 3 x the forward's bytes

        fill      = the rest of the layer on the local rows that a rank has beyond an even share of the tokens

    Every rank computes all its local rows in every part of a layer, whether a token is in them or not; so rows that a
    layout adds are paid for outside attention. Nothing is taken to overlap, except transfers of a push and of a ring
    with kernels.

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


@dataclass(frozen=True)
class ExchangeChoice:
    """An exchange, and why it was chosen."""

    exchange: str
    reason: str


def choose_exchange(
    model: Model,
    load: Load,
    device: Device,
    names: Collection[str],
    ranks_per_node: int | None = None,
    grids: Mapping[int, Load] | None = None,
) -> ExchangeChoice:
    """The cheapest exchange for one attention site. Pure: equal on all ranks.

    Args:
        model: of the site. load: of a batch under the site's mask, or a typical one.
        device: speeds.
        names: of the exchanges that can serve.
        ranks_per_node, grids: as of `exchange_seconds`.
    """
    if load.world_size == 1:
        return ExchangeChoice("local", "one rank: nothing moves")
    predicted = exchange_seconds(load, device, model, ranks_per_node, grids)
    seconds = {name: predicted[name] for name in names if name in predicted}
    best, *others = sorted(seconds, key=seconds.__getitem__)
    against = ", ".join(f"{name} {1e3 * seconds[name]:.2f}" for name in others) or "no other that can serve"
    share = int(load.received.sum(1).max()) / (load.local_rows * (load.world_size - 1))
    reason = (
        f"predicted {1e3 * seconds[best]:.2f} ms per layer against {against} on {device.name} "
        f"({load.world_size} ranks, {model.heads[0]}/{model.heads[1]} heads of {model.head_dim}, "
        f"{load.local_rows} tokens per rank, {share:.0%} of remote rows needed)"
    )
    return ExchangeChoice(best, reason)


def typical_load(world_size: int, mask: PackedMask, rows: int = TOKENS_PER_RANK) -> Load:
    """The load of a batch whose documents are not known, of `rows` local rows per rank.

    Packed rows are taken to need a fifth of all remote rows, which `balanced` stays below on usual mixes of lengths;
    one causal document three quarters; a window, or a chunk, what it reaches past two cuts per rank.
    """
    share = PACKED_SHARE if mask.packed else (CAUSAL_SHARE if mask.causal else 1.0)
    windowed = mask.left is not None and mask.right is not None
    reach = (mask.left or 0) + (mask.right or 0) if windowed else mask.chunk
    if reach is not None:
        share = min(share, 2 * reach / (rows * (world_size - 1)))
    received = np.full((world_size, world_size), int(share * rows), dtype=np.int64)
    np.fill_diagonal(received, 0)
    # Keys that a query sees on average: half of its document where that is causal, no more than its window.
    document = min(rows if mask.packed else rows * world_size, mask.chunk or rows * world_size)
    seen = document / 2 if mask.causal else document
    if windowed and reach is not None:
        seen = min(seen, reach + 1)
    tiles = np.full(world_size, rows / TILE * (seen / TILE + TILE_ROW_OVERHEAD))
    expanded = received.sum(1) + rows
    return Load(rows, tiles, received, expanded, 1, float(tiles.sum()))
