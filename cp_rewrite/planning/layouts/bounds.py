"""What a token order costs at least, told without its schedule: most simple layouts need not be weighed any further."""

from __future__ import annotations

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost import kernel_seconds
from cp_rewrite.planning.devices import Device, Model
from cp_rewrite.planning.seen_keys import SeenKeys
from cp_rewrite.planning.tiles import TILE, TILE_ROW_OVERHEAD

from .token_order import TokenOrder


def least_seconds(documents: Documents, order: TokenOrder, mask: PackedMask, device: Device, model: Model) -> float:
    """Seconds that an order costs at least under `needed`.

    A rank's kernel works at least on the pairs that its queries see, and on the rows of tiles of its tokens. Where the
    mask has no limit to the left, a rank needs all keys of every document whose last token it owns.
    """
    docs = mask.documents(documents)
    if not docs.lengths.any():
        return 0.0
    starts, stops, owners, _ = order.segments
    # Running sums over the row at every bound x of a segment: the pairs seen by documents' tokens before x, and how
    # many these tokens are. Documents before x's own count whole, x's own up to x.
    seen = SeenKeys(mask)
    work = seen.of(docs.lengths, docs.lengths) / TILE**2
    work_before, tokens_before = np.cumsum(work) - work, np.cumsum(docs.lengths) - docs.lengths
    bounds = np.append(starts, docs.total)
    doc = np.maximum(docs.starts.searchsorted(bounds, side="right") - 1, 0)
    lengths = docs.lengths[doc]
    inside = np.minimum(np.maximum(bounds - docs.starts[doc], 0), lengths)
    done = work_before[doc] + seen.of(lengths, inside) / TILE**2
    tokens = tokens_before[doc] + inside
    # Their differences: each segment's own.
    work, real_tokens = done[1:] - done[:-1], tokens[1:] - tokens[:-1]
    tile_rows = -(-real_tokens // TILE)
    tiles = np.bincount(owners, work + TILE_ROW_OVERHEAD * tile_rows, order.world_size)
    seconds = kernel_seconds(float(tiles.max()), 1, device, model)
    if mask.left is None:
        real = docs.lengths > 0
        last_owner = owners[np.searchsorted(stops, docs.ends[real] - 1, side="right")]
        needed = np.bincount(last_owner, docs.lengths[real], order.world_size)
        missing = float((needed - np.bincount(owners, real_tokens, order.world_size)).max())
        seconds += 2 * max(0.0, missing) * model.kv_bytes / device.link
    return seconds


def most_runs(documents: Documents, order: TokenOrder, mask: PackedMask) -> int:
    """The most runs of keys that an order's schedule may hold (`Schedule.runs`): its time and memory go by them.

    A document that lies in n segments has up to n pieces, and each reads keys in up to n segments.
    """
    docs = mask.documents(documents)
    starts, stops = order.segments[:2]
    first = np.searchsorted(stops, docs.starts, side="right")
    last = np.searchsorted(starts, docs.ends, side="left")
    return int((np.maximum(last - first, 0) ** 2).sum())
