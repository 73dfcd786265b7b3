"""The `balanced` layout: equal tokens and equal attention work on every rank, least rows moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost import (
    Device,
    Model,
    all_gather_seconds,
    least_seconds,
    load_of,
    most_runs,
    needed_seconds,
)
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.schedule import build
from cp_rewrite.planning.tiles import TILE, Float, imbalance

from .fill import Style, share_out
from .line import Parts, part_tiles
from .orders import TokenOrder, contiguous, dual_chunk, even_contiguous, even_dual_chunk, even_head_tail, joined

ENOUGH = 1.015
"""Imbalance that is not worth another round. One document is balanced better than that at once."""
LIMIT = 1.02
"""Imbalance up to which traffic decides between plans."""
CROWDED = 0.3
"""Share of all remote rows above which a rank receives too many, if other plans do without."""
STYLES = (
    Style(),
    Style(slack=0.003, whole=False, tries=1, rounds=2),
    Style(slack=0.003),
    Style(slack=0.012),
    Style(slack=0.004, tries=3, rounds=6),
    Style(slack=0.008, tries=3, rounds=6),
)
"""The first is always tried; the second too where documents are few: there either may move fewer rows."""
FEW = 4
"""Documents per rank."""
MOST_RUNS = 1 << 22
"""Runs of keys, over all pieces, up to which a simple layout is weighed; more would take seconds and gigabytes."""


class Candidate(NamedTuple):
    """A way to share out a row, and what it costs. Over several nodes only the cost counts: links decide there."""

    unbalanced: bool
    crowded: bool
    seconds: float
    order: TokenOrder


@dataclass(frozen=True)
class Scale:
    """Weighs the orders of one row.

    Args:
        documents, mask: what attention is over.
        device, model, ranks_per_node: what it runs on.
        most_rows: rows to receive that crowd a rank.
    """

    documents: Documents
    mask: PackedMask
    device: Device
    model: Model
    ranks_per_node: int
    most_rows: float

    def weigh(self, order: TokenOrder) -> Candidate:
        """The order with its cost under the exchange that serves it."""
        load = load_of(build([self.documents], [order], self.mask))
        seconds = needed_seconds(load, self.device, self.model, self.ranks_per_node)
        if self.ranks_per_node < order.world_size:  # an all-gather, which enters each node once, may be cheaper
            seconds = min(seconds, all_gather_seconds(load, self.device, self.model, self.ranks_per_node))
            return Candidate(False, False, seconds, order)
        crowded = bool(load.received.sum(1).max() > self.most_rows)
        return Candidate(imbalance(load.tiles) > LIMIT, crowded, seconds, order)

    def cheaper(self, order: TokenOrder, best: Candidate) -> Candidate:
        """`best`, or the order if it has as many rows per rank and costs less."""
        if order.local_size != best.order.local_size or most_runs(self.documents, order, self.mask) > MOST_RUNS:
            return best
        if least_seconds(self.documents, order, self.mask, self.device, self.model) >= best.seconds:
            return best
        return min(best, self.weigh(order), key=lambda c: c.seconds)


def balanced(
    documents: Documents,
    world_size: int,
    mask: PackedMask,
    chunk_size: int = 1,
    ranks_per_node: int | None = None,
    device: Device | None = None,
    model: Model | None = None,
) -> TokenOrder:
    """The best order found: balanced within 2%, then no rank with too many rows to receive, then cheapest.

    Over several nodes the cheapest, balanced or not. Never dearer than a simple layout that gives ranks equal tokens,
    as this one always does: a rank has ceil(total / world_size) tokens or (so that only the row's end is padded) fewer.
    Those that cut documents into millions of runs of keys (hundreds of ranks, thousands of documents) are not compared.
    Ranks keep what needs no other rank's keys first, where kernels can read those keys in place, then the rest; with a
    chunk size all by position. Pure: the same on every rank.

    Args:
        documents: the row's documents.
        world_size: ranks.
        mask: what attention sees.
        chunk_size: documents, which start at multiples of it, are cut only at multiples of it. Ranks get
            equal numbers of chunks, or some fewer where ranks do not divide them; the row's last chunk may be short.
        ranks_per_node: ranks that share a node's fast links; documents then stay inside nodes where they can.
        device, model: what the cost model plans for; by default an H200, 64/8 heads of 128.
    """
    chunks, more = divmod(-(-documents.total // chunk_size), world_size)
    quotas = [(chunks + (r < more)) * chunk_size for r in range(world_size)]
    # The rank with the last token of a long causal document needs all of it: fewer rows are not to be had.
    most_rows = max(CROWDED * (world_size - 1) * quotas[0], int(documents.lengths.max(initial=0)) - quotas[0])
    device, model = device or Device.named("h200"), model or Model()
    scale = Scale(documents, mask, device, model, ranks_per_node or world_size, most_rows)
    best = _best_way(Parts.of_row(documents, mask, chunk_size), quotas, chunk_size, scale)
    for order in _simple_orders(documents, world_size, chunk_size):
        best = scale.cheaper(order, best)
    return best.order if chunk_size > 1 else _home_first(best.order, documents, mask)


def _home_first(order: TokenOrder, documents: Documents, mask: PackedMask) -> TokenOrder:
    """The order with every rank's pieces first whose keys it owns."""
    schedule = build([documents], [order], mask)
    runs, away = schedule.runs, np.zeros(len(schedule.pieces), dtype=np.bool_)
    away[runs.piece[runs.owner != runs.reader]] = True
    intervals = list(order.intervals)
    for rank, tokens in enumerate(order.intervals):
        mine = slice(*schedule.piece_bounds[rank : rank + 2])
        by_row = np.argsort(schedule.pieces.q0[mine])
        starts, goes_last = schedule.pieces.q0[mine][by_row], away[mine][by_row]
        if (goes_last[:-1] & ~goes_last[1:]).any():
            intervals[rank] = _parted(tokens, starts, goes_last)
    return TokenOrder(order.total, tuple(intervals), order.pad_to_multiple)


def _parted(tokens: Int, starts: Int, goes_last: NDArray[np.bool_]) -> Int:
    """A rank's intervals with those parts last that go last; part i begins at local token starts[i], and what is before
    the first one stays there."""
    ends = np.cumsum(tokens[:, 1] - tokens[:, 0])
    begins = ends - (tokens[:, 1] - tokens[:, 0])
    cuts = np.union1d(begins, starts)
    inside = np.searchsorted(begins, cuts, side="right") - 1
    start = tokens[inside, 0] + cuts - begins[inside]
    stop = start + np.diff(cuts, append=ends[-1])
    last = np.append(False, goes_last)[np.searchsorted(starts, cuts, side="right")]
    return joined(np.stack([start, stop], axis=1)[np.argsort(last, kind="stable")])


def _best_way(parts: Parts, quotas: list[int], unit: int, scale: Scale) -> Candidate:
    """The best of the ways that are worth a try on such a row; of more, until all ranks are balanced, none crowded.

    What crosses nodes depends on where a few cuts happen to fall: there all styles are tried.
    """
    best: Candidate | None = None
    halves = _can_halve(quotas, scale.ranks_per_node) and _too_big(parts, quotas) > 1
    few = len(parts) <= FEW * len(quotas)
    least = 1 + halves + few if scale.ranks_per_node == len(quotas) else len(STYLES)
    for tried, ranks in enumerate(_ways(parts, quotas, scale.mask, scale.ranks_per_node, unit, halves), 1):
        candidate = scale.weigh(_to_order(ranks, scale.documents.total))
        best = candidate if best is None else min(best, candidate, key=lambda c: c[:3])
        if tried >= least and not best.unbalanced and not best.crowded:
            break
    assert best is not None
    return best


def _ways(
    parts: Parts, quotas: list[int], mask: PackedMask, per_node: int, unit: int, halves: bool
) -> Iterator[list[Parts]]:
    """Ways to share out, each made when asked for: those most worth a try first."""
    halved = Style(unit=unit), len(quotas) // 2
    ways = [(replace(style, unit=unit), per_node) for style in STYLES]
    if halves:
        ways.insert(1, halved)
    elif _can_halve(quotas, per_node):
        ways.append(halved)
    for style, group in ways:
        yield _balance(parts, quotas, mask, group, style)


def _can_halve(quotas: list[int], per_node: int) -> bool:
    """Whether the row can be shared out over two halves of the ranks first, which keeps long documents in one."""
    return per_node == len(quotas) and len(quotas) % 2 == 0 and len(quotas) > 2


def _too_big(parts: Parts, quotas: list[int]) -> int:
    """Documents that do more work than a rank should: they will be cut, best within half of the ranks."""
    return int((parts.work > 1.5 * parts.work.sum() / len(quotas)).sum())


def _balance(parts: Parts, quotas: list[int], mask: PackedMask, per_node: int, style: Style) -> list[Parts]:
    """Share out, then again with what the cuts have cost each rank, until it is balanced. First over nodes."""
    if not len(parts):  # the second half of the ranks, where the first has all tokens
        return [parts] * len(quotas)
    if per_node < len(quotas):
        groups = [quotas[i : i + per_node] for i in range(0, len(quotas), per_node)]
        nodes = _balance(parts, [sum(group) for group in groups], mask, len(groups), style)
        return [
            rank
            for node, group in zip(nodes, groups, strict=True)
            for rank in _balance(node, group, mask, len(group), style)
        ]
    # A first guess at what cuts cost: nothing for the first rank, two tile rows for the last, whose choice is least.
    tile_row = float(parts.work.sum() / parts.size.sum()) * TILE
    extra = np.linspace(0, 2, len(quotas)) * tile_row
    best, least, enough = [parts], np.inf, ENOUGH if len(parts) > 1 else 1.005
    for _ in range(style.rounds):
        ranks = share_out(parts, quotas, extra.tolist(), mask, style)
        tiles = _tiles(ranks, mask)
        if imbalance(tiles) < least:
            best, least = ranks, imbalance(tiles)
        if least < enough:
            break
        extra = tiles - np.array([float(part.work.sum()) for part in ranks])
    return best


def _tiles(ranks: list[Parts], mask: PackedMask) -> Float:
    owner = np.repeat(np.arange(len(ranks)), [len(part) for part in ranks])
    return np.bincount(owner, part_tiles(Parts.join(ranks), mask), len(ranks)).astype(np.float64)


def _simple_orders(documents: Documents, world_size: int, unit: int) -> Iterator[TokenOrder]:
    """The simple layouts, as they are and with equal tokens per rank."""
    total, spans = documents.total, documents.spans
    yield contiguous(total, world_size, unit)
    yield even_contiguous(total, world_size, unit)
    yield dual_chunk(np.array([0, total]), world_size, unit)
    yield even_head_tail(spans, world_size, unit)
    yield even_head_tail(spans, world_size, unit, near=True)
    yield dual_chunk(spans, world_size, unit)
    yield even_dual_chunk(spans, world_size, unit)


def _to_order(ranks: list[Parts], total: int) -> TokenOrder:
    """The token order in which rank r owns ranks[r]."""
    start = np.concatenate([parts.start for parts in ranks])
    owner = np.repeat(np.arange(len(ranks)), [len(parts) for parts in ranks])
    order = np.argsort(start, kind="stable")
    return TokenOrder.from_cuts(np.append(start[order], total), owner[order], len(ranks))
