"""Which exchange serves an attention site: decided when its graph is compiled, from static facts alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_rewrite.masks import PackedMask

from .cost import Load, exchange_seconds, fill_seconds
from .devices import Device, Model
from .routes.push_stages import Shape, StageLoad, backward_seconds, backward_stages, forward_seconds, forward_stages
from .tiles import TILE, TILE_ROW_OVERHEAD

TOKENS_PER_RANK = 8192
"""Taken for a batch's, which no graph shows."""


@dataclass(frozen=True)
class Choice:
    """An exchange, and why it was chosen."""

    exchange: str
    reason: str


def choose_exchange(
    model: Model,
    world_size: int,
    mask: PackedMask,
    device: Device,
    ranks_per_node: int | None = None,
    one_sided: bool = False,
) -> Choice:
    """The cheapest of `all_gather` and `needed` for one attention site. Pure: equal on all ranks.

    A ring and an exchange of heads are not weighed: they take longer than predicted (`examples/bench/exchanges.py`).

    Args:
        model: of the site.
        world_size: ranks; one of them needs no exchange: `local`.
        mask: of the site.
        device: speeds.
        ranks_per_node: ranks that share fast links; None: all.
        one_sided: ranks can write into each other's memory: what is needed travels beside the kernel, as `push`.
    """
    if world_size == 1:
        return Choice("local", "one rank: nothing moves")
    load = typical_load(world_size, mask)
    predicted = exchange_seconds(load, device, model, ranks_per_node)
    needed = {"push": push_seconds(load, device, model)} if one_sided else {"needed": predicted["needed"]}
    seconds = {"all_gather": predicted["all_gather"], **needed}
    best, other = sorted(seconds, key=seconds.__getitem__)
    share = int(load.received[0].sum()) / (load.local_rows * (world_size - 1))
    reason = (
        f"predicted {1e3 * seconds[best]:.2f} ms per layer against {other} {1e3 * seconds[other]:.2f} on "
        f"{device.name} ({world_size} ranks, {model.heads[0]}/{model.heads[1]} heads of {model.head_dim}, "
        f"{load.local_rows} tokens per rank, {share:.0%} of remote rows needed)"
    )
    return Choice(best, reason)


def push_seconds(load: Load, device: Device, model: Model) -> float:
    """Predicted seconds of one layer's attention and fill with `push` beside the kernel, of a kernel that waits for all
    rows or runs in stages of heads."""
    shape = Shape(*model.heads, model.head_dim, model.head_dim, model.item_bytes)
    coming = load.received.sum(1)
    columns = zip(load.tiles.tolist(), coming.tolist(), (load.expanded - coming).tolist(), strict=True)
    loads = tuple(StageLoad(0, round(tiles), 0, rows, own, 0) for tiles, rows, own in columns)
    there, back = forward_stages(loads, shape), backward_stages(loads, shape, kept=False)
    forward = max(forward_seconds(each, shape, there, device) for each in loads)
    backward = max(backward_seconds(each, shape, back, False, device) for each in loads)
    return forward + backward + fill_seconds(load, device, model)


def typical_load(world_size: int, mask: PackedMask, rows: int = TOKENS_PER_RANK) -> Load:
    """The load of a batch whose documents are not known, of `rows` local rows per rank.

    Packed rows are taken to need a fifth of all remote rows, which `balanced` stays below on usual mixes of lengths;
    one causal document three quarters; a window, or a chunk, what it reaches past two cuts per rank.
    """
    share = 0.2 if mask.packed else (0.75 if mask.causal else 1.0)
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
