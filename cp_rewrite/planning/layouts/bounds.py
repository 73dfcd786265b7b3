"""What a token order costs at least, told without its schedule: most simple layouts need not be weighed any further."""

from __future__ import annotations

import numpy as np

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import kernel_seconds
from cp_rewrite.planning.cost.seen_keys import SeenKeys
from cp_rewrite.planning.cost.tiles import TILE, TILE_ROW_OVERHEAD, Float
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.sections import sections_of

from .slices import Slices
from .token_order import TokenOrder


def least_seconds(documents: Documents, order: TokenOrder, mask: PackedMask, device: Device, model: Model) -> float:
    """Seconds that an order costs at least under `needed`.

    A rank's kernel works on whole sections as it does, and on parts of them at least on the pairs that their queries
    see, and on the rows of tiles of their tokens; its keys are copied. Where the mask has no limit to the left, a rank
    needs all keys of every document (but for trees) whose last token it owns.
    """
    sections = sections_of(documents, mask)
    if not len(sections.starts):
        return 0.0
    starts, stops, owners, _ = order.segments
    seen, before = SeenKeys(mask), sections.before
    sizes = sections.ends - sections.starts
    length, exact = before + sizes, Slices.of_row(documents, mask).work[: len(sizes)]
    work_before, tokens_before = np.append(0, np.cumsum(exact)), np.cumsum(sizes) - sizes

    def part(s: Int, low: Int, high: Int) -> Float:
        """Of tokens [low, high) of sections `s`, in tiles."""
        pairs = seen.of(length[s], before[s] + high) - seen.of(length[s], before[s] + low)
        least = pairs / TILE**2 + TILE_ROW_OVERHEAD * -(-(high - low) // TILE)
        return np.where((low == 0) & (high == sizes[s]), exact[s], least)

    # Each bound of a segment as a section, and how many of its tokens come before.
    bounds = np.append(starts, documents.total)
    at = np.maximum(sections.starts.searchsorted(bounds, side="right") - 1, 0)
    inside = np.minimum(np.maximum(bounds - sections.starts[at], 0), sizes[at])
    first, low, last, high = at[:-1], inside[:-1], at[1:], inside[1:]
    several = part(first, low, sizes[first]) + work_before[last] - work_before[first + 1] + part(last, high * 0, high)
    work = np.where(first == last, part(first, low, high), several)
    real_tokens = np.diff(tokens_before[at] + inside)
    owned = np.bincount(owners, real_tokens, order.world_size)
    tiles = np.bincount(owners, work, order.world_size)
    copied = 5 * float(owned.max()) * model.kv_bytes / device.memory
    seconds = kernel_seconds(float(tiles.max()), 1, device, model) + copied + 3 * (device.latency + device.launch)
    if mask.left is None and sections.paths is None:
        docs = mask.documents(documents)
        real = docs.lengths > 0
        last_owner = owners[np.searchsorted(stops, docs.ends[real] - 1, side="right")]
        needed = np.bincount(last_owner, docs.lengths[real], order.world_size)
        missing = float((needed - owned).max())
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
