"""Which exchange serves an attention site: decided when its graph is compiled, from static facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cp_rewrite.masks import PackedMask

from .cost import Device, Load, Model, exchange_seconds
from .tiles import TILE, TILE_ROW_OVERHEAD

EXCHANGES = ("all_gather", "needed", "p2p", "a2a")


@dataclass(frozen=True)
class Choice:
    """An exchange, why it was chosen, and the seconds predicted for each that was considered."""

    exchange: str
    reason: str
    seconds: Mapping[str, float]


def choose_exchange(
    model: Model,
    world_size: int,
    mask: PackedMask,
    device: Device,
    *,
    available: tuple[str, ...] = ("all_gather", "needed"),
    ranks_per_node: int | None = None,
    tokens_per_rank: int = 8192,
) -> Choice:
    """The exchange for one attention site, from what is known when its graph is compiled: pure, equal on all ranks.

    Document lengths are not known then. Packed rows are taken to need a fifth of all rows, which balanced layouts stay
    below on usual length mixes; one causal document needs three quarters, a window at most its own length per cut.

    Args:
        model: heads, head dim and element size.
        world_size: ranks.
        mask: of the site.
        device: speeds.
        available: exchanges that can serve the site.
        ranks_per_node: ranks that share fast links; None: all.
        tokens_per_rank: R, when known.
    Raises:
        ValueError: no exchange is available.
    """
    if world_size == 1:
        return Choice("local", "one rank: nothing moves", {})
    load = _typical_load(world_size, tokens_per_rank, mask)
    predicted = exchange_seconds(load, device, model, ranks_per_node)
    seconds = {name: predicted[name] for name in EXCHANGES if name in available and name in predicted}
    if not seconds:
        raise ValueError(f"no exchange can serve this attention: available are {available}")
    best = min(seconds, key=seconds.__getitem__)
    share = int(load.received[0].sum()) / (load.local_rows * (world_size - 1))
    others = ", ".join(f"{name} {1e3 * t:.2f}" for name, t in seconds.items() if name != best)
    reason = (
        f"predicted {1e3 * seconds[best]:.2f} ms per layer" + (f" against {others}" if others else "") + f" on "
        f"{device.name} ({world_size} ranks, {model.heads[0]}/{model.heads[1]} heads of {model.head_dim}, "
        f"{tokens_per_rank} tokens per rank, {share:.0%} of remote rows needed)"
    )
    return Choice(best, reason, seconds)


def _typical_load(world_size: int, rows: int, mask: PackedMask) -> Load:
    share = 0.2 if mask.packed else (0.75 if mask.causal else 1.0)
    if mask.left is not None and mask.right is not None:
        # Two cuts per rank, each needing what the window reaches past it.
        share = min(share, 2 * (mask.left + mask.right) / (rows * (world_size - 1)))
    received = np.full((world_size, world_size), int(share * rows), dtype=np.int64)
    np.fill_diagonal(received, 0)
    document = rows if mask.packed else rows * world_size
    seen = document / 2 if mask.causal else document
    if mask.left is not None and mask.right is not None:
        seen = min(seen, mask.left + mask.right + 1)
    tiles = np.full(world_size, rows / TILE * (seen / TILE + TILE_ROW_OVERHEAD))
    expanded = received.sum(1) + rows
    return Load(rows, tiles, received, expanded, 1, float(tiles.sum()))
