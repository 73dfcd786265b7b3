"""The `balanced` layout: equal tokens and equal attention work on every rank, least rows moved.

    documents  ──  slices  ──  halved; over few ranks in variants  ──┐
                           ──  whole, where that may save something  ┼──  the best by the cost model
    simple layouts with equal tokens per rank  ──────────────────────┘
                                                                     └──  each rank's own order: home pieces first

The search is as long as what it may save: in rows of few tokens a rank attention is a small part of a layer, and simple
layouts alone are compared; in longer ones documents are halved once, and in long ones in variants.

    Bounds       lower bounds of what an order costs, without its schedule: most simple layouts need not be weighed
    Judge        weighs orders by their schedules
    balanced     the search
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.choose_exchange import exchange_seconds
from cp_rewrite.planning.cost.constants import TILE, TILE_ROW_OVERHEAD
from cp_rewrite.planning.cost.load import Load, kernel_seconds, load_of
from cp_rewrite.planning.cost.tiles import Float, SeenKeys, imbalance
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.names import part_of, split_exchange
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.gathered import needed_seconds
from cp_rewrite.planning.schedule import Schedule, build
from cp_rewrite.planning.sections import Sections, sections_of

from .halves import Whole, even_pairs, share_out_by_halves
from .options import LayoutOptions
from .share_out import Slices, share_out_whole
from .simple import contiguous, dual_chunk, even_contiguous, even_dual_chunk, even_head_tail
from .token_order import TokenOrder, outer_order


@dataclass(frozen=True)
class Bounds:
    """Bounds of token orders of one row. Args: documents, mask: what attention is over."""

    documents: Documents
    mask: PackedMask

    @cached_property
    def slices(self) -> Slices:
        """The row's sections, each as one slice, then its padding."""
        return Slices.of_row(self.documents, self.mask)

    @cached_property
    def _sections(self) -> Sections:
        return sections_of(self.documents, self.mask)

    @cached_property
    def _docs(self) -> Documents:
        return self.mask.documents(self.documents)

    @cached_property
    def _real(self) -> tuple[Int, Int, Int]:
        """(starts, ends, runs) of documents with tokens: how many runs of keys each has that no rank cuts."""
        real = self._docs.lengths > 0
        starts, ends = self._docs.starts[real], self._docs.ends[real]
        if not self.mask.hangs_on_others:
            return starts, ends, np.ones_like(starts)
        first = np.searchsorted(self._sections.ends, starts, side="right")
        last = np.searchsorted(self._sections.starts, ends, side="left")
        return starts, ends, np.maximum(last - first, 1)

    @cached_property
    def _lines(self) -> tuple[Int, Int, Float, Float, Int]:
        """(sizes, keys before, tiles) of all sections; tiles and tokens of those before each, and before the end."""
        before, sizes = self._sections.before, self._sections.ends - self._sections.starts
        tiles = self.slices.work[: len(sizes)]
        return sizes, before, tiles, np.append(0, np.cumsum(tiles)), np.append(0, np.cumsum(sizes))

    def least_load(self, order: TokenOrder, local_rows: int | None = None) -> Load:
        """A load that takes no longer under any exchange than the order's, which has `local_rows` (None: its own).

        A rank's kernel works on whole sections as it does, and on parts of them at least on the pairs that their
        queries see, and on the rows of tiles of their tokens; its keys are copied. A token behind a cut sees the one
        before it. Where the mask has no limit to the left, a rank needs all keys of every document (but for trees)
        whose last token it owns. They stand as if half of them went to and fro by fast links: so they take as long as
        if they only came.
        """
        ranks, rows = order.world_size, order.local_size if local_rows is None else local_rows
        _, stops, owners, _ = order.segments
        tiles, owned, cut = self._least_tiles(order)
        received = np.zeros((ranks, ranks), dtype=np.int64)
        if self.mask.left != 0:
            received[owners[1:][cut], owners[:-1][cut]] = 1
            np.fill_diagonal(received, 0)
        if self.mask.left is None and self._sections.paths is None:
            # Documents that end on a rank: of those that end by each stop, all tokens up to there.
            starts, ends, _ = self._real
            tokens = np.append(0, np.cumsum(ends - starts))[np.searchsorted(ends, stops, side="right")]
            needed = np.bincount(owners, np.diff(tokens, prepend=0), ranks).astype(np.int64)
            np.fill_diagonal(received, np.maximum((needed - owned) // 2 - received.sum(1), 0))
        fill, whole = rows - self.documents.total / ranks, float(self.slices.work.sum())
        return Load(rows, tiles, received, owned, 1, whole, fill)

    def _least_tiles(self, order: TokenOrder) -> tuple[Float, Int, NDArray[np.bool_]]:
        """(tiles at least, tokens of documents), each (P,); which segments but the first begin inside of a section."""
        starts, _, owners, _ = order.segments
        sections, seen = self._sections, SeenKeys(self.mask)
        if not len(sections.starts):
            none = np.zeros(order.world_size, dtype=np.int64)
            return none.astype(np.float64), none, np.zeros(len(starts) - 1, dtype=np.bool_)
        sizes, before, exact, work_before, tokens_before = self._lines

        def part(s: Int, low: Int, high: Int) -> Float:
            """Least work of tokens [low, high) of sections `s`, in tiles."""
            length = before[s] + sizes[s]
            pairs = seen.of(length, before[s] + high) - seen.of(length, before[s] + low)
            least = pairs / TILE**2 + TILE_ROW_OVERHEAD * -(-(high - low) // TILE)
            return np.where((low == 0) & (high == sizes[s]), exact[s], least)

        # Each bound of a segment as a section, and how many of its tokens come before.
        bounds = np.append(starts, self.documents.total)
        at = np.maximum(sections.starts.searchsorted(bounds, side="right") - 1, 0)
        inside = np.minimum(np.maximum(bounds - sections.starts[at], 0), sizes[at])
        first, low, last, high = at[:-1], inside[:-1], at[1:], inside[1:]
        between = work_before[last] - work_before[first + 1]
        several = part(first, low, sizes[first]) + between + part(last, high * 0, high)
        work = np.where(first == last, part(first, low, high), several)
        owned = np.bincount(owners, np.diff(tokens_before[at] + inside), order.world_size)
        tiles = np.bincount(owners, work, order.world_size).astype(np.float64)
        return tiles, owned.astype(np.int64), (low[1:] > 0) & (low[1:] < sizes[first[1:]])

    def most_runs(self, order: TokenOrder) -> int:
        """The most runs of keys that an order's schedule may hold (`Schedule.runs`): its time and memory go by them.

        A document of m sections in n segments has up to n + m - 1 pieces, and each reads as many runs of keys.
        """
        starts, ends, runs = self._real
        cuts = order.segments[0]
        at = np.searchsorted(ends, cuts, side="right")
        inside = at < len(ends)
        inside[inside] = starts[at[inside]] < cuts[inside]
        cut, times = np.unique(at[inside], return_counts=True)
        # (runs + times)² of documents that are cut, runs² of all others.
        return int((runs**2).sum() + (times * (2 * runs[cut] + times)).sum())


VARIANTS = Whole(), Whole(least=0.03), Whole((0, 0, 0))
"""Ways to halve few ranks, of which the best counts; many are halved in the first alone."""
LOST = 0.01
"""Share of its rows that a rank receives, or imbalance, above which it is tried to leave documents whole."""
FEW_RANKS, FEW_SLICES = 8, 512
"""Ranks and slices, at most, for which all ways are tried: more take longer."""
SIMPLE, ONCE, TWICE = 1024, 4096, 8192
"""Tokens of a rank up to which simple layouts alone are compared, or on one node documents are halved in one way, or in
two, none left whole. A layer of 8,192 columns then takes some 12, 50 or 100 ms: what a longer search saves is below 2 %
of it."""
MOST_RUNS = 1 << 17
"""Runs of keys, over all pieces, up to which a simple layout is weighed: some milliseconds."""


class Candidate(NamedTuple):
    """A token order and what speaks against it.

    seconds: of attention under the exchange that serves it best, and of recurrent layers.
    lost: the share of its rows that a rank receives, or of its time that the mean rank waits for the slowest.
    by_heads: heads exchanged inside of nodes serve it best, even if the ranks of a node did equal work.
    """

    seconds: float
    lost: float
    order: TokenOrder
    schedule: Schedule
    by_heads: bool


@dataclass(frozen=True)
class Judge:
    """Weighs token orders of one row.

    Args:
        bounds: of orders of the row under its mask.
        options: what it runs on.
        world_size, node_size: ranks, and those of each node.
    """

    bounds: Bounds
    options: LayoutOptions
    world_size: int
    node_size: int

    @property
    def documents(self) -> Documents:
        return self.bounds.documents

    @property
    def mask(self) -> PackedMask:
        return self.bounds.mask

    def weigh(self, order: TokenOrder) -> Candidate:
        """The order as a candidate, with its seconds under the exchange that serves it best."""
        schedule = self._build(order)
        load = load_of(schedule)
        lost = max(imbalance(load.tiles) - 1, int(load.received.sum(1).max()) / max(1, order.local_size))
        seconds, by_heads = self._seconds(load, order, lambda places, rows: load_of(self._build(places, rows)))
        return Candidate(seconds + self._state_seconds(order), lost, order, schedule, by_heads)

    def weigh_shares(self, slices: Slices, owner: Int) -> Candidate:
        """The order in which rank owner[i] owns slice i, as a candidate."""
        by_start = np.argsort(slices.start, kind="stable")
        cuts = np.append(slices.start[by_start], self.documents.total)
        return self.weigh(TokenOrder.from_cuts(cuts, owner[by_start], self.world_size))

    def _build(self, order: TokenOrder, local_rows: int | None = None) -> Schedule:
        return build([self.documents], [order], self.mask, local_rows)

    def _seconds(
        self, load: Load, order: TokenOrder, load_of_places: Callable[[TokenOrder, int], Load]
    ) -> tuple[float, bool]:
        """(seconds, `Candidate.by_heads`). Over several nodes an all-gather enters each node once, and may be cheaper;
        so may heads inside of nodes."""
        size, grids, asked = self.node_size, dict[int, Load](), self.options.exchange
        device, model = self.options.device, self.options.model
        if size == order.world_size:
            cost = ROUTES[asked].cost if asked in ROUTES else None
            return (cost.seconds if cost else needed_seconds)(load, device, model, size), False
        scattered, kind = split_exchange(asked)
        inner = part_of(asked) or size
        if inner > 1 and (asked == "auto" or (scattered and kind != "local")):
            grids[inner] = load_of_places(outer_order(order, inner), inner * order.local_size)
        seconds = exchange_seconds(load, device, model, size, grids)
        name = f"a2a+{kind}" if part_of(asked) else asked
        if name in seconds:
            return seconds[name], name.startswith("a2a+")
        by_keys, by_heads = min(seconds["needed"], seconds["all_gather"]), seconds.get("a2a+needed", np.inf)
        waits = float(load.tiles.max() - load.tiles.mean())
        even = by_keys - kernel_seconds(waits, 0, device, model)
        return min(by_keys, by_heads), by_heads <= even

    def _state_seconds(self, order: TokenOrder) -> float:
        states = self.options.states
        return 0.0 if states is None else states.seconds(self.documents, order, self.options.device, self.node_size)

    def cheaper(self, order: TokenOrder, best: Candidate) -> Candidate:
        """The order, if it has as many local rows as `best` and costs less; else `best`."""
        if order is best.order or order.local_size != best.order.local_size:
            return best
        if self.bounds.most_runs(order) > MOST_RUNS:
            return best
        least = self.bounds.least_load
        if self._seconds(least(order), order, least)[0] + self._state_seconds(order) >= best.seconds:
            return best
        return min(best, self.weigh(order), key=lambda c: c.seconds)


def balanced(documents: Documents, world_size: int, mask: PackedMask, options: LayoutOptions) -> TokenOrder:
    """The token order found that takes least seconds.

    Every rank owns ceil(total / world_size) tokens, or fewer, so that only the row's end is padded; with a chunk size,
    the same in chunks, of which the row's last may be short. It costs no more than a simple layout that gives ranks
    equal tokens. (A simple layout that would cut the documents into hundreds of thousands of runs of keys, as hundreds
    of documents on 16 ranks do, is not compared.)

    Pure: the same on every rank.
    """
    unit = options.chunk_size
    chunks, more = divmod(-(-documents.total // unit), world_size)
    quotas = [(chunks + (r < more)) * unit for r in range(world_size)]
    judge = Judge(Bounds(documents, mask), options, world_size, options.node_size(world_size))
    even = even_contiguous(documents.total, world_size, unit)
    if quotas[0] <= SIMPLE:
        best = judge.weigh(even)
    else:
        slices = judge.bounds.slices if unit == 1 else Slices.of_row(documents, mask, unit)
        best = _best_shared_out(slices, quotas, judge)
    for order in _simple_orders(documents, even, unit):
        best = judge.cheaper(order, best)
    return best.order if unit > 1 else _home_first(best.order, best.schedule)


def _home_first(order: TokenOrder, schedule: Schedule) -> TokenOrder:
    """The order with each rank's home pieces first, those whose keys are all its own: kernels read these in place.

    tokens of rank 0    0 1 2   8 9   12 13 14      [0, 3) and [12, 15) are whole documents;
    home first          0 1 2   12 13 14   8 9      [8, 10) is the end of one that begins on rank 1
    """
    pieces, away = schedule.pieces, np.zeros(len(schedule.pieces), dtype=np.bool_)
    away[schedule.remote[0]] = True
    tokens, owner = order.parts
    ends = np.cumsum(tokens[:, 1] - tokens[:, 0])
    begins = ends - (tokens[:, 1] - tokens[:, 0])  # of each interval, in the rows of all ranks, rank after rank
    starts = (np.cumsum(order.sizes) - order.sizes)[pieces.rank] + pieces.q0
    by_row = np.argsort(starts, kind="stable")
    cuts = np.sort(np.append(begins, starts), kind="stable")
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]  # each stretch from one cut to the next stays or moves as a whole
    inside = np.searchsorted(begins, cuts, side="right") - 1
    start, rank = tokens[inside, 0] + cuts - begins[inside], owner[inside]
    stop = start + np.diff(cuts, append=ends[-1:])
    piece = by_row[np.searchsorted(starts[by_row], cuts, side="right") - 1] if len(by_row) else rank[:0]
    last = away[piece] & (pieces.rank[piece] == rank) if len(by_row) else False  # rows before the first piece stay
    sort = np.argsort(2 * rank + last, kind="stable")
    return TokenOrder.of_parts(order.total, np.stack([start, stop], 1)[sort], rank[sort], order.world_size)


def _best_shared_out(slices: Slices, quotas: list[int], judge: Judge) -> Candidate:
    """The best of the variants, and of whole documents."""
    if quotas[0] <= TWICE and judge.node_size == len(quotas):
        return _best_by_halves(slices, quotas, judge, VARIANTS[-1:] if quotas[0] <= ONCE else VARIANTS[::2])
    if len(quotas) > FEW_RANKS or len(slices) > FEW_SLICES:
        return _best_by_halves(slices, quotas, judge, VARIANTS[:1])
    best = _best_by_halves(slices, quotas, judge, VARIANTS)
    ranks = share_out_whole(slices, quotas) if best.lost > LOST else None
    if ranks is None:
        return best
    owner = np.repeat(np.arange(len(ranks)), [len(held) for held in ranks])
    return min(best, judge.weigh_shares(Slices.join(ranks), owner), key=lambda c: c.seconds)


def _best_by_halves(slices: Slices, quotas: list[int], judge: Judge, ways: Sequence[Whole]) -> Candidate:
    """Halved, and then evened out between pairs of ranks, or of nodes."""
    unit, ranks, node = judge.options.chunk_size, len(quotas), judge.node_size
    slices, owner = share_out_by_halves(slices, quotas, node, judge.mask, unit, ways)
    if node == ranks:
        slices, owner = even_pairs(slices, owner, quotas * len(ways), node, judge.mask, unit)
    found: list[Candidate] = []
    for way in range(len(ways)):
        mine = np.flatnonzero(owner // ranks == way)
        halved = slices.take(mine), owner[mine] - way * ranks
        found.append(judge.weigh_shares(*halved))
        if node < ranks:
            # Partners share a node, so that no row crosses for them; where heads are exchanged inside of nodes, nodes
            # are even.
            most, inner = (ranks, node) if found[-1].by_heads else (node, 1)
            shares = even_pairs(*halved, quotas, most, judge.mask, unit, inner)
            if shares[0] is not halved[0]:  # ranks swapped tokens
                found.append(judge.weigh_shares(*shares))
    return min(found, key=lambda c: c.seconds)


def _simple_orders(documents: Documents, even: TokenOrder, unit: int) -> Iterator[TokenOrder]:
    """The simple layouts, as they are and with equal tokens per rank, of which `even` is the contiguous one."""
    total, spans, world_size = documents.total, documents.bounds, even.world_size
    if total % (2 * world_size * unit):  # else their twins are the same
        yield contiguous(total, world_size, unit)
        yield dual_chunk(np.array([0, total]), world_size, unit)
    yield even
    yield even_head_tail(spans, world_size, unit)
    yield even_head_tail(spans, world_size, unit, near=True)
    if documents.lengths.size * (2 * world_size) ** 2 > MOST_RUNS:
        return
    yield dual_chunk(spans, world_size, unit)
    yield even_dual_chunk(spans, world_size, unit)
