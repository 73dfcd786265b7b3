"""What a token order costs at least, told without its schedule: most simple layouts need not be weighed any further."""

from __future__ import annotations

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.seconds import kernel_seconds
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.cost.tiles import TILE, TILE_ROW_OVERHEAD
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.sections import sections_of

from .token_order import TokenOrder


def least_seconds(documents: Documents, order: TokenOrder, mask: PackedMask, device: Device, model: Model) -> float:
    """Seconds that an order costs at least under `needed`.

    A rank's kernel works at least on the pairs that its queries see, and on the rows of tiles of its tokens. Where the
    mask has no limit to the left, a rank needs all keys of every document (but for trees) whose last token it owns.
    """
    sections = sections_of(documents, mask)
    if not len(sections.starts):
        return 0.0
    starts, stops, owners, _ = order.segments
    # Running sums over the row at every bound x of a segment: the pairs seen by sections' tokens before x, and how
    # many these tokens are. Sections before x's own count whole, x's own up to x.
    seen, before = SeenKeys(mask), sections.before
    sizes = sections.ends - sections.starts
    length = before + sizes
    work = (seen.of(length, length) - seen.of(length, before)) / TILE**2
    work_before, tokens_before = np.cumsum(work) - work, np.cumsum(sizes) - sizes
    bounds = np.append(starts, documents.total)
    at = np.maximum(sections.starts.searchsorted(bounds, side="right") - 1, 0)
    inside = np.minimum(np.maximum(bounds - sections.starts[at], 0), sizes[at])
    done = seen.of(length[at], before[at] + inside) - seen.of(length[at], before[at])
    done = work_before[at] + done / TILE**2
    tokens = tokens_before[at] + inside
    # Their differences: each segment's own.
    work, real_tokens = done[1:] - done[:-1], tokens[1:] - tokens[:-1]
    tile_rows = -(-real_tokens // TILE)
    tiles = np.bincount(owners, work + TILE_ROW_OVERHEAD * tile_rows, order.world_size)
    seconds = kernel_seconds(float(tiles.max()), 1, device, model)
    if mask.left is None and not mask.tree:
        docs = mask.documents(documents)
        real = docs.lengths > 0
        last_owner = owners[np.searchsorted(stops, docs.ends[real] - 1, side="right")]
        needed = np.bincount(last_owner, docs.lengths[real], order.world_size)
        missing = float((needed - np.bincount(owners, real_tokens, order.world_size)).max())
        seconds += 2 * max(0.0, missing) * model.kv_bytes / device.link
    return seconds


def most_runs(documents: Documents, order: TokenOrder, mask: PackedMask) -> int:
    """The most runs of keys that an order's schedule may hold (`Schedule.runs`): its time and memory go by them.

    A document of m sections in n segments has up to n + m - 1 pieces, and each reads as many runs of keys.
    """
    docs, sections = mask.documents(documents), sections_of(documents, mask)
    starts, stops = order.segments[:2]
    counts = _overlapping(docs, starts, stops) + np.maximum(_overlapping(docs, sections.starts, sections.ends), 1) - 1
    return int((counts**2).sum())


def _overlapping(docs: Documents, starts: Int, stops: Int) -> Int:
    """(N,) int64: how many of the ascending ranges [start, stop) each document overlaps."""
    first = np.searchsorted(stops, docs.starts, side="right")
    last = np.searchsorted(starts, docs.ends, side="left")
    return np.maximum(last - first, 0)
