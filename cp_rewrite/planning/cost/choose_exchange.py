"""Which exchange serves an attention site: decided when its graph is compiled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from cp_rewrite.masks import PackedMask

from .constants import CAUSAL_SHARE, PACKED_SHARE, TILE, TILE_ROW_OVERHEAD, TOKENS_PER_RANK
from .devices import Device, Model
from .load import Load
from .seconds import exchange_seconds


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
