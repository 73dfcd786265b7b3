"""The `balanced` layout: equal tokens and equal attention work on every rank, least rows moved.

documents  ──  slices  ──  shared out over few ranks, in a few variants  ──┐
                       ──  halved over many ranks  ────────────────────────┤
                       ──  whole, where that may save something  ──────────┼──  the best by the cost model
simple layouts with equal tokens per rank  ───────────────────────────────┘
                                                                          └──  each rank's own order: home pieces first

Lower bounds of what a token order costs, without its schedule: most simple layouts need not be weighed further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

from .halves import even_pairs, share_out_by_halves
from .options import LayoutOptions
from .share_out import Slices, Variant, share_out, share_out_whole, slice_tiles
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


ENOUGH, ENOUGH_FOR_ONE = 1.015, 1.005
"""Imbalance that is not worth another round: of several slices, and of one, which the first round nearly balances."""
LIMIT = 1.02
"""Imbalance up to which traffic decides between orders."""
CROWDED = 0.3
"""Share of all remote rows above which a rank receives too many, if another order does without."""
VARIANTS = (
    Variant(),
    Variant(slack=0.003, whole=False, tries=1, rounds=2),
    Variant(slack=0.003),
    Variant(slack=0.012),
    Variant(slack=0.004, tries=3, rounds=6),
    Variant(slack=0.008, tries=3, rounds=6),
)
"""Tried one after another until an order is balanced and no rank crowded. The first is tried on every row, the second,
too, where documents are few: there either may move fewer rows. `docs/internals/planner.md` has what each is worth."""
LOST = 0.01
"""Share of its rows that a rank receives, or imbalance, above which it is tried to leave documents whole."""
FEW = 4
"""Documents per rank."""
FEW_RANKS, FEW_SLICES = 8, 512
"""Up to so many ranks are filled one after another, in variants; more, and more slices, are shared out by halves."""
SHORT, LONG = 512, 4096
"""Tokens of a rank. Up to the first, rows are shared out by halves alone; below the second, in a variant too. A row of
tiles is much of a rank's work there: no variant balances, so all would be tried."""
FOR_SHORT = VARIANTS[3]  # most slack
MOST_RUNS = 1 << 17
"""Runs of keys, over all pieces, up to which a simple layout is weighed: some milliseconds."""


class Candidate(NamedTuple):
    """A token order and what speaks against it. Over several nodes only seconds count: there links decide.

    imbalance: work of the rank that has most over the mean.
    lost: the share of its rows that a rank receives, or of its time that the mean rank waits for the slowest.
    by_heads: heads exchanged inside of nodes serve it best, even if the ranks of a node did equal work.
    """

    unbalanced: bool
    crowded: bool
    seconds: float
    imbalance: float
    lost: float
    order: TokenOrder
    schedule: Schedule
    by_heads: bool = False


@dataclass(frozen=True)
class Judge:
    """Weighs token orders of one row.

    Args:
        bounds: of orders of the row under its mask.
        options: what it runs on.
        node_size: ranks of each node.
        most_rows: a rank that receives more KV rows is crowded.
    """

    bounds: Bounds
    options: LayoutOptions
    node_size: int
    most_rows: float

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
        received = int(load.received.sum(1).max())
        uneven = imbalance(load.tiles)
        lost = max(uneven - 1, received / max(1, order.local_size))
        seconds, by_heads = self._seconds(load, order, lambda places, rows: load_of(self._build(places, rows)))
        seconds += self._state_seconds(order)
        if self.node_size < order.world_size:
            return Candidate(False, False, seconds, uneven, lost, order, schedule, by_heads)
        return Candidate(uneven > LIMIT, received > self.most_rows, seconds, uneven, lost, order, schedule)

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
        if order.local_size != best.order.local_size or self.bounds.most_runs(order) > MOST_RUNS:
            return best
        least = self.bounds.least_load
        if self._seconds(least(order), order, least)[0] + self._state_seconds(order) >= best.seconds:
            return best
        return min(best, self.weigh(order), key=lambda c: c.seconds)


def balanced(documents: Documents, world_size: int, mask: PackedMask, options: LayoutOptions) -> TokenOrder:
    """The best token order found: first balanced within 2%, then no rank that is crowded, then least seconds.

    Every rank owns ceil(total / world_size) tokens, or fewer, so that only the row's end is padded; with a chunk size,
    the same in chunks, of which the row's last may be short. Over several nodes the cheapest order wins, balanced or
    not. It costs no more than a simple layout that gives ranks equal tokens. (A simple layout that would cut the
    documents into hundreds of thousands of runs of keys, as hundreds of documents on 16 ranks do, is not compared.)

    Pure: the same on every rank.
    """
    unit = options.chunk_size
    chunks, more = divmod(-(-documents.total // unit), world_size)
    quotas = [(chunks + (r < more)) * unit for r in range(world_size)]
    # The rank with the last token of a long causal document needs all of it: fewer rows are not to be had.
    most_rows = max(CROWDED * (world_size - 1) * quotas[0], int(documents.lengths.max(initial=0)) - quotas[0])
    judge = Judge(Bounds(documents, mask), options, options.node_size(world_size), most_rows)
    slices = judge.bounds.slices if unit == 1 else Slices.of_row(documents, mask, unit)
    best = _best_shared_out(slices, quotas, judge)
    for order in _simple_orders(documents, world_size, unit):
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
    """The best of the first few trials, or of more, until one is balanced and no rank of it crowded, and of whole
    documents. Of many ranks or slices, and of short rows, see `FEW_RANKS` and `SHORT`.

    Over several nodes all are made: what crosses links depends on where a few cuts happen to fall.
    """
    one_node = judge.node_size == len(quotas)
    if len(quotas) > FEW_RANKS or len(slices) > FEW_SLICES or (one_node and quotas[0] <= SHORT):
        return _best_by_halves(slices, quotas, judge)
    if one_node and quotas[0] < LONG:
        variant = replace(FOR_SHORT, unit=judge.options.chunk_size)
        filled = _share_out_repeatedly(slices, quotas, judge.mask, len(quotas), variant)
        halved = _best_by_halves(slices, quotas, judge)
        return min(halved, _weigh_shares(filled, judge), key=lambda c: c.seconds)
    best: Candidate | None = None
    halves_first = _can_halve(quotas, judge.node_size) and _too_big(slices, quotas) > 1
    few = len(slices) <= FEW * len(quotas)
    least = 1 + halves_first + few if one_node else len(VARIANTS)
    for tried, ranks in enumerate(_trials(slices, quotas, judge, halves_first), 1):
        candidate = _weigh_shares(ranks, judge)
        best = candidate if best is None else min(best, candidate, key=lambda c: c[:3])
        if tried >= least and not best.unbalanced and not best.crowded:
            break
    assert best is not None
    whole = share_out_whole(slices, quotas) if best.lost > LOST else None
    if whole is not None:
        best = min(best, _weigh_shares(whole, judge), key=lambda c: c[:3])
    return best


def _weigh_shares(ranks: list[Slices], judge: Judge) -> Candidate:
    return judge.weigh(_to_order(*_owned(ranks), len(ranks), judge.documents.total))


def _best_by_halves(slices: Slices, quotas: list[int], judge: Judge) -> Candidate:
    """Halved, and then evened out between pairs of ranks, or of nodes."""
    unit = judge.options.chunk_size
    ranks, node, total = len(quotas), judge.node_size, judge.documents.total
    halved = share_out_by_halves(slices, quotas, node, judge.mask, unit)
    if node == ranks:
        shares = even_pairs(*halved, quotas, node, judge.mask, unit)
        return judge.weigh(_to_order(*shares, ranks, total))
    best = judge.weigh(_to_order(*halved, ranks, total))
    # Partners share a node, so that no row crosses for them; where heads are exchanged inside of nodes, nodes are even.
    most, inner = (ranks, node) if best.by_heads else (node, 1)
    shares = even_pairs(*halved, quotas, most, judge.mask, unit, inner)
    if shares[0] is halved[0]:  # no ranks swapped tokens
        return best
    return min(best, judge.weigh(_to_order(*shares, ranks, total)), key=lambda c: c.seconds)


def _trials(slices: Slices, quotas: list[int], judge: Judge, halves_first: bool) -> Iterator[list[Slices]]:
    """Shares of all ranks: by every variant over the nodes, and once over two halves of the ranks. Made on demand."""
    unit = judge.options.chunk_size
    trials = [(replace(variant, unit=unit), judge.node_size) for variant in VARIANTS]
    if _can_halve(quotas, judge.node_size):
        trials.insert(1 if halves_first else len(trials), (Variant(unit=unit), len(quotas) // 2))
    for variant, group in trials:
        yield _share_out_repeatedly(slices, quotas, judge.mask, group, variant)


def _can_halve(quotas: list[int], node_size: int) -> bool:
    """Whether the row can first be shared out over two halves of the ranks, which keeps long documents in one half."""
    return node_size == len(quotas) and len(quotas) % 2 == 0 and len(quotas) > 2


def _too_big(slices: Slices, quotas: list[int]) -> int:
    """Documents with more work than a rank should do: they must be cut, and better within half of the ranks."""
    return int((slices.work > 1.5 * slices.work.sum() / len(quotas)).sum())


def _share_out_repeatedly(
    slices: Slices, quotas: list[int], mask: PackedMask, group: int, variant: Variant
) -> list[Slices]:
    """The share of each rank, dealt over groups of `group` ranks first, then over each one's ranks.

    Each round knows what cuts cost every rank in the round before; the round that balanced best counts.
    """
    if not len(slices):  # the other group has all tokens
        return [slices] * len(quotas)
    if group < len(quotas):
        groups = [quotas[i : i + group] for i in range(0, len(quotas), group)]
        shares = _share_out_repeatedly(slices, [sum(ranks) for ranks in groups], mask, len(groups), variant)
        return [
            rank
            for share, ranks in zip(shares, groups, strict=True)
            for rank in _share_out_repeatedly(share, ranks, mask, len(ranks), variant)
        ]
    # A guess at what cuts cost, before any is made: nothing for the first rank, which chooses among all slices, up to
    # two rows of tiles for the last, which takes what is left.
    tile_row = float(slices.work.sum() / slices.size.sum()) * TILE
    extra = np.linspace(0, 2, len(quotas)) * tile_row
    best, least, enough = [slices], np.inf, ENOUGH if len(slices) > 1 else ENOUGH_FOR_ONE
    for _ in range(variant.rounds):
        ranks = share_out(slices, quotas, extra.tolist(), mask, variant)
        tiles = _tiles(ranks, mask)
        if imbalance(tiles) < least:
            best, least = ranks, imbalance(tiles)
        if least < enough:
            break
        extra = tiles - np.array([float(rank.work.sum()) for rank in ranks])
    return best


def _tiles(ranks: list[Slices], mask: PackedMask) -> Float:
    """(P,) what each rank's slices cost, cuts included."""
    owner = np.repeat(np.arange(len(ranks)), [len(slices) for slices in ranks])
    return np.bincount(owner, slice_tiles(Slices.join(ranks), mask), len(ranks)).astype(np.float64)


def _simple_orders(documents: Documents, world_size: int, unit: int) -> Iterator[TokenOrder]:
    """The simple layouts, as they are and with equal tokens per rank."""
    total, spans = documents.total, documents.bounds
    if total % (2 * world_size * unit):  # else their twins are the same
        yield contiguous(total, world_size, unit)
        yield dual_chunk(np.array([0, total]), world_size, unit)
    yield even_contiguous(total, world_size, unit)
    yield even_head_tail(spans, world_size, unit)
    yield even_head_tail(spans, world_size, unit, near=True)
    if documents.lengths.size * (2 * world_size) ** 2 > MOST_RUNS:
        return
    yield dual_chunk(spans, world_size, unit)
    yield even_dual_chunk(spans, world_size, unit)


def _owned(ranks: list[Slices]) -> tuple[Slices, Int]:
    """(slices of all ranks, the owner of each) of what each rank owns."""
    return Slices.join(ranks), np.repeat(np.arange(len(ranks)), [len(slices) for slices in ranks])


def _to_order(slices: Slices, owner: Int, world_size: int, total: int) -> TokenOrder:
    """The token order in which rank owner[i] owns slice i."""
    order = np.argsort(slices.start, kind="stable")
    return TokenOrder.from_cuts(np.append(slices.start[order], total), owner[order], world_size)
