"""The route of `push`: what `needed` moves, without messages, inside one NVLink domain; and how it overlaps with the
kernel.

    choose_cut                       where a rank's entries are cut in two parts, so that rows arrive while the kernel
                                     works, and which keys are read in place
    forward_stages, backward_stages  in how many stages of heads rows travel beside the kernel
    push_route, PUSH                 the tables

A rank writes its rows straight into the expanded rows of all ranks that read them, its own among them; afterwards it
reads the gradients there, and sums them.

    written in this order     own rows   | rows that early parts await | other rows
    by                        the reader | peers                       | peers

Only speed depends on the numbers here, but all ranks must find the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity
from cp_rewrite.planning.cost.constants import (
    BACKWARD_FLOPS,
    PUSH_BESIDE_LINK,
    PUSH_BESIDE_MEMORY,
    PUSH_CUT_ROWS,
    PUSH_LAG,
    PUSH_LINK,
    PUSH_PARTS_LINK,
    PUSH_SHARES,
    PUSH_SHARES_BACK,
    PUSH_STAGE,
    PUSH_STAGE_BACK,
    PUSH_STAGES_GAIN,
    PUSH_TAKEN,
    PUSH_TAKEN_BACK,
    TILE,
)
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load
from cp_rewrite.planning.cost.tiles import window_tiles
from cp_rewrite.planning.intervals import Int, expand_ranges, group_rows
from cp_rewrite.planning.names import PlaceRow, StageRow
from cp_rewrite.planning.pieces import Pieces
from cp_rewrite.planning.plan_input import PlanTensor
from cp_rewrite.planning.schedule import Runs, Schedule, at_least

from .route import Arrays, Cost, Route, filled, row_index

_DEVICE, _MODEL = Device.named("h200"), Model()
_ROWS_PER_PAIR = _MODEL.tile_flops / TILE**2 / _DEVICE.forward / (_MODEL.kv_bytes / _DEVICE.link)
"""Rows that arrive while the kernel works on one pair of a query and a key. Only speed depends on it."""


@dataclass(frozen=True)
class PushCut:
    """Args:
    keys: expanded rows before the cut; 0: there is one part.
    early: the part (0 or 1) that can begin first. awaited: how many rows of peers it reads.
    source, count: local rows [source, source + count) are read in place: they are the early part's keys, or all keys
        where there is one part. count = 0: none are.
    """

    keys: int
    early: int
    awaited: int
    source: int = 0
    count: int = 0

    @property
    def whole(self) -> bool:
        """True if all keys are read in place, by the backward too."""
        return self.keys == 0 < self.count


def choose_cut(schedule: Schedule, rank: int) -> PushCut:
    """The cut before or after the entries whose keys are read in place, or, where these are few, between two pieces.

    entries of a rank     document 1 | document 2 | end of document 3
    their keys            own rows, side by side  | own rows and peers'
    cut                                           ^ the early part is in place, the late one's rows arrive beside it

    Keys are read in place where they lie side by side in the rank's own rows, and their gradients written there.
    """
    mine = slice(*schedule.piece_bounds[rank : rank + 2])
    runs = schedule.runs.take(schedule.runs.reader == rank)
    coming = runs.take(runs.owner != rank)
    total = int(coming.length.sum())
    if schedule.launch[mine].any():
        return PushCut(0, 0, total)
    expanded = int(schedule.expanded[rank])
    source, count, early = max(_in_place(runs, rank), key=lambda block: block[1])
    if count == expanded > 0:
        return PushCut(0, 0, 0, source, count)
    if total and count >= PUSH_CUT_ROWS:
        return PushCut(expanded - count if early else count, early, 0, source, count)
    pieces = schedule.pieces.take(mine)
    if len(pieces) < 2:
        return PushCut(0, 0, total)
    return _between_pieces(pieces, np.bincount(coming.piece - mine.start, coming.length, len(pieces)))


def _between_pieces(pieces: Pieces, coming: NDArray[Any]) -> PushCut:
    """The cut between two of a rank's pieces that lets most rows arrive beside work: as many as the late part waits
    for, and the early part has work for. `coming`: rows of peers that each piece reads."""
    total = int(coming.sum())
    queries, keys = pieces.q1 - pieces.q0, pieces.keys
    # With 1, 2, … pieces before the cut: rows that work before and after it gives time for, and rows read before it.
    work = np.cumsum(queries * keys - queries**2 / 2) * _ROWS_PER_PAIR
    before, after = work[:-1] - PUSH_LAG, work[-1] - work[:-1] - PUSH_LAG
    read = coming.cumsum()[:-1]
    beside = np.stack([np.minimum(before, total - read), np.minimum(after, read)])  # by early part
    early, piece = divmod(int(beside.argmax()), len(pieces) - 1)
    if beside[early, piece] < PUSH_CUT_ROWS:
        return PushCut(0, 0, total)
    return PushCut(int(keys[: piece + 1].sum()), early, int(total - read[piece] if early else read[piece]))


def _in_place(runs: Runs, rank: int) -> list[tuple[int, int, int]]:
    """(source, count, part) of the first and of the last pieces' keys, as many as are local rows [source, source +
    count) of the rank. `runs` are those that it reads."""
    if not len(runs.row):
        return [(0, 0, 0)]
    own = runs.owner == rank
    follows = own[1:] & own[:-1] & (runs.source[1:] == (runs.source + runs.length)[:-1])
    bounds = np.flatnonzero(np.diff(runs.piece, prepend=-1, append=-1))  # before the first run of each piece; the end
    head = _leading(follows) if own[0] else 0
    tail = _leading(follows[::-1]) if own[-1] else 0
    stop = int(bounds[bounds <= head].max())  # whole pieces only
    start = int(bounds[bounds >= len(own) - tail].min())
    count = int(runs.length[start:].sum())
    blocks = [(int(runs.source[0]), int(runs.length[:stop].sum()), 0)]
    return blocks + ([(int(runs.source[start]), count, 1)] if count else [])


def _leading(follows: NDArray[np.bool_]) -> int:
    """How many runs lie side by side, from the first one on; `follows` says of each but the first whether it follows
    the one before."""
    return 1 + int(np.append(follows, False).argmin())


_H200 = Device.named("h200")


class StageLoad(NamedTuple):
    """Work of one rank in one call.

    Args:
        early, late: tiles per query head of the two parts of `choose_cut`, in the order in which they run.
        awaited: rows of peers that the early part reads. coming: rows of peers, all.
        own: expanded rows that are copies of own ones. near: so many of these a forward in one stage reads in place.
    """

    early: int
    late: int
    awaited: int
    coming: int
    own: int
    near: int


class Shape(NamedTuple):
    """Sizes of an attention. Args: heads, heads_kv. dim, dim_v: of k and of v. item_bytes: of an element."""

    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    item_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.heads_kv * (self.dim + self.dim_v) * self.item_bytes


@lru_cache(maxsize=1024)
def forward_stages(loads: tuple[StageLoad, ...], shape: Shape) -> tuple[int, ...]:
    """Key heads of each stage of a forward. Args: loads: of all ranks.

    Heads are independent: while the kernel works on those of one stage, those of the next arrive, and gradients of the
    one before go home. The first stage waits for its rows, the last one's gradients for their way.

        link      rows 0 | rows 1 | rows 2                | gradients 0 | gradients 1          | gradients 2
        kernel             stage 0 | stage 1      | stage 2                                …

    What a stage costs is a launch and its tail, so little data travels in one stage.
    """
    return _best(PUSH_SHARES, shape, lambda sizes: max(forward_seconds(load, shape, sizes) for load in loads))


@lru_cache(maxsize=1024)
def backward_stages(loads: tuple[StageLoad, ...], shape: Shape, kept: bool) -> tuple[int, ...]:
    """Key heads of each stage of a backward. Args: kept: rows are here already."""
    return _best(
        PUSH_SHARES_BACK, shape, lambda sizes: max(backward_seconds(load, shape, sizes, kept) for load in loads)
    )


def forward_seconds(load: StageLoad, shape: Shape, sizes: Sequence[int], device: Device = _H200) -> float:
    """Predicted seconds of a rank's forward with its exchange, in stages of so many key heads; one stage is cut in an
    early and a late part."""
    kernel, rows = _kernel_seconds(load, shape, device.forward), _link_seconds(load.coming, shape, device, PUSH_LINK)
    if len(sizes) == 1:
        early = kernel * load.early / max(1, load.early + load.late)
        start = max(
            _link_seconds(load.awaited, shape, device, PUSH_LINK), _copy_seconds(load.own - load.near, shape, device)
        )
        return max(start + early + PUSH_TAKEN * rows, rows) + kernel - early
    end, sent = _copy_seconds(load.own, shape, device), 0.0
    for size in sizes:
        share = size / shape.heads_kv
        sent += rows * share
        end = max(end, sent) + kernel * share + PUSH_STAGE
    return end + PUSH_TAKEN * rows


def backward_seconds(load: StageLoad, shape: Shape, sizes: Sequence[int], kept: bool, device: Device = _H200) -> float:
    """The same of a backward. In one stage rows come before the kernel, or beside its early part, and gradients go home
    after it, both faster."""
    kernel = BACKWARD_FLOPS * _kernel_seconds(load, shape, device.backward)
    copies = _copy_seconds(load.own, shape, device)
    alone = max(_link_seconds(load.coming, shape, device), copies)  # of rows before the kernel, of gradients after it
    if len(sizes) == 1 and load.near:
        early, copies = (
            kernel * load.early / (load.early + load.late),
            _copy_seconds(load.own - load.near, shape, device),
        )
        rows = copies if kept else max(_link_seconds(load.coming, shape, device, PUSH_PARTS_LINK), copies)
        home = max(_link_seconds(load.coming, shape, device), copies)
        return max(kernel + PUSH_TAKEN * rows, rows + kernel - early) + PUSH_STAGE_BACK + home
    if len(sizes) == 1:
        return (0.0 if kept else alone) + kernel + alone
    rows = 0.0 if kept else _link_seconds(load.coming, shape, device, PUSH_LINK)
    back = max(_link_seconds(load.coming, shape, device, PUSH_BESIDE_LINK), copies / 2 / PUSH_BESIDE_MEMORY)
    end, sent, home = 0.0 if kept else copies, 0.0, rows
    for size in sizes[:-1]:
        share = size / shape.heads_kv
        sent += rows * share
        end = max(end, sent) + kernel * share + PUSH_STAGE_BACK + PUSH_TAKEN_BACK * back * share
        home = max(home, end) + back * share
    share = sizes[-1] / shape.heads_kv
    return max(max(end, rows) + kernel * share + PUSH_STAGE_BACK, home) + alone * share + PUSH_TAKEN * rows


def _best(
    all_shares: Sequence[Sequence[int]], shape: Shape, seconds: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """The stages that take least; one where several gain little."""
    one = (shape.heads_kv,)
    several = {sizes for shares in all_shares if (sizes := _sizes(shares, shape.heads_kv))}
    best = min(sorted(several), key=seconds, default=one)
    return best if seconds(best) < PUSH_STAGES_GAIN * seconds(one) else one


def _sizes(shares: Sequence[int], heads: int) -> tuple[int, ...]:
    """Whole numbers of heads, at least 2 each: kernels read rows of one head through other strides. Empty: too few
    heads."""
    bounds = [round(heads * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    sizes = tuple(stop - start for start, stop in zip([0, *bounds], bounds, strict=False))
    return sizes if min(sizes) >= 2 and heads < 256 else ()


def _kernel_seconds(load: StageLoad, shape: Shape, speed: float) -> float:
    flops = 2.0 * TILE * TILE * (shape.dim + shape.dim_v) * shape.heads
    return (load.early + load.late) * flops / speed


def _link_seconds(rows: int, shape: Shape, device: Device, speed: float = 1.0) -> float:
    """Seconds that rows of peers take, at a share of the link's speed."""
    return rows * shape.row_bytes / (speed * device.link)


def _copy_seconds(rows: int, shape: Shape, device: Device) -> float:
    """Seconds that copies of own rows take, or sums of their gradients, by the whole GPU."""
    return 2 * rows * shape.row_bytes / device.memory


_LOADED_BEYOND = 256
"""A kernel loads whole tiles: up to so many rows after the last expanded one must hold numbers, not NaN."""


def push_route(schedule: Schedule, rank: int, *, cut: bool = True, filling: int = 0) -> Arrays:
    """The tables of one rank. R local rows, E expanded rows, N entries of launch 0; leading dims are at least 2.

    Args:
        cut: there may be two parts, and rows may be read in place; the same on all ranks.
        filling: so many rows after the expanded ones hold rows of this rank, if it has any.
    Returns:
        expanded (E,), copied (E or 0,) int8: dummies whose shapes carry E. Nothing is copied where all keys are read in
            place.
        sends (S,) int32, targets (S,) int64: local rows, and where they go: reader << 32 | expanded row of the reader.
            First those that stay on this rank, beginning with those that are read in place too; then those that a
            peer's early part awaits; then the others, peer after peer.
        ends (3,) int32: where each of these three ends; what follows only fills the tables up.
        partners (2,) int32, a bit per rank: those that send rows to this one; those that this one sends rows to.
        capacity (1,) int64: `copied` of the rank that has most, the same on all ranks; 0: no rank copies any.
        place (3,) int64: a `PlaceRow`: which local rows are read in place.
        holder_ptr (R + 1,) int32, holders int64: where copies of each local row are, on all ranks: reader << 32 |
            expanded row of the reader, ascending.
        stages (5,) int64: a `StageRow`: the kernel's work in two parts, of n entries and of the rest.
        rest_cu_seqlens_q, rest_cu_seqlens_k (N - n + 1,) int32: running sums over the rest, from 0.
        loads (P, 6) int64: a `StageLoad` of each rank, by which heads travel in stages. All 0: in
            one, for the host does not know, or some pieces run in launches of their own.
    """
    ranks = range(schedule.world_size)
    # A captured step always waits: in another batch rows of peers may come.
    cuts = [choose_cut(schedule, each) if cut else PushCut(0, 0, awaited=1) for each in ranks]
    mine, tables = cuts[rank], schedule.attention(rank)
    copied = np.where([each.whole for each in cuts], 0, schedule.expanded)
    runs = schedule.runs.take(copied[schedule.runs.reader] > 0)
    runs = runs.take(runs.owner == rank)
    lists = _with_filling(rank, filling, int(copied[rank]), *_sends(runs, rank, cuts, schedule.world_size))
    sends, targets, ends = lists
    partners = [_bits(schedule.received[rank]), _bits(schedule.received[:, rank])]
    place = PlaceRow(mine.source, *((0, mine.count) if mine.whole else (mine.count, 0)))
    holder_ptr, holders = _holders(runs, schedule.local_rows)
    stages = _stages(tables, mine)
    return {
        "expanded": np.zeros(max(2, int(schedule.expanded[rank])), dtype=np.int8),
        "sends": row_index(sends),
        "targets": at_least(targets, 2, 0),
        "ends": ends.astype(np.int32),
        "copied": np.zeros(max(2, int(copied[rank])), dtype=np.int8),
        "partners": np.array(partners, dtype=np.uint32).view(np.int32),
        "capacity": np.array([max(2, int(copied.max())) if copied.any() else 0], dtype=np.int64),
        "place": np.array(place, dtype=np.int64),
        "holder_ptr": holder_ptr,
        "holders": holders,
        "stages": np.array(stages, dtype=np.int64),
        "rest_cu_seqlens_q": tables["cu_seqlens_q"][stages.entries :] - stages.queries,
        "rest_cu_seqlens_k": tables["cu_seqlens_k"][stages.entries :] - stages.keys,
        "loads": _loads(schedule, cuts) * (cut and not schedule.launch.any()),
    }


def fixed_push_route(schedule: Schedule, rank: int, capacity: Capacity) -> Arrays:
    """The same in the sizes of a capacity. Rows after the rank's expanded ones repeat own ones."""
    rows = capacity.rows
    filling = min(_LOADED_BEYOND, rows - int(schedule.expanded[rank]))
    # A captured step replays on batches whose cuts the host can't tell it.
    route = push_route(schedule, rank, cut=False, filling=filling)
    most = schedule.world_size * rows
    return {
        **route,
        "sends": filled(route["sends"], most, 0),
        "targets": filled(route["targets"], most, 0),
        "expanded": np.zeros(rows, dtype=np.int8),
        "copied": np.zeros(rows, dtype=np.int8),
        "capacity": np.array([rows], dtype=np.int64),
        "holders": filled(route["holders"], most, 0),
        "rest_cu_seqlens_q": np.zeros(2, dtype=np.int32),
        "rest_cu_seqlens_k": np.zeros(2, dtype=np.int32),
    }


def push_seconds(load: Load, device: Device, model: Model, _: int) -> float:
    """`push`: rows travel beside the kernel, which waits for all of them or runs in stages of heads."""
    shape = Shape(*model.heads, model.head_dim, model.head_dim, model.item_bytes)
    coming = load.received.sum(1)
    columns = zip(load.tiles.tolist(), coming.tolist(), (load.expanded - coming).tolist(), strict=True)
    loads = tuple(StageLoad(0, round(tiles), 0, rows, own, 0) for tiles, rows, own in columns)
    there, back = forward_stages(loads, shape), backward_stages(loads, shape, kept=False)
    forward = max(forward_seconds(each, shape, there, device) for each in loads)
    return forward + max(backward_seconds(each, shape, back, False, device) for each in loads)


PUSH = Route(
    (
        PlanTensor("expanded", on_host=True),
        PlanTensor("sends"),
        PlanTensor("targets"),
        PlanTensor("ends", static=True),
        PlanTensor("copied", on_host=True),
        PlanTensor("partners", static=True),
        PlanTensor("capacity", on_host=True, static=True),
        PlanTensor("place", on_host=True, static=True),
        PlanTensor("holder_ptr"),
        PlanTensor("holders"),
        PlanTensor("stages", on_host=True, static=True),
        PlanTensor("rest_cu_seqlens_q"),
        PlanTensor("rest_cu_seqlens_k"),
        PlanTensor("loads", on_host=True, static=True),
    ),
    push_route,
    fixed_push_route,
    cost=Cost(push_seconds, in_one_node=True),
)


def _stages(tables: Arrays, cut: PushCut) -> StageRow[int]:
    n = int(np.searchsorted(tables["cu_seqlens_k"], cut.keys))
    return StageRow(n, int(tables["cu_seqlens_q"][n]), cut.keys, cut.early, cut.awaited)


def _loads(schedule: Schedule, cuts: list[PushCut]) -> Int:
    """`loads` of `push_route`."""
    pieces, runs = schedule.pieces, schedule.runs
    tiles = window_tiles(pieces.q1 - pieces.q0, pieces.key1 - pieces.key0, pieces.left, pieces.right)
    coming = np.bincount(runs.reader, np.where(runs.owner == runs.reader, 0, runs.length), schedule.world_size)
    found: list[StageLoad] = []
    for rank, cut in enumerate(cuts):
        mine = slice(*schedule.piece_bounds[rank : rank + 2])
        before = np.cumsum((pieces.key1 - pieces.key0)[mine]) <= cut.keys
        first, second = float(tiles[mine][before].sum()), float(tiles[mine][~before].sum())
        rows = int(coming[rank])
        own = 0 if cut.whole else int(schedule.expanded[rank]) - rows
        if cut.keys == 0:
            found.append(StageLoad(0, round(second), 0, rows, own, 0))
        else:
            early, late = (second, first) if cut.early else (first, second)
            found.append(StageLoad(round(early), round(late), cut.awaited, rows, own, cut.count))
    return np.array(found, dtype=np.int64)


def _sends(runs: Runs, rank: int, cuts: list[PushCut], world_size: int) -> tuple[Int, Int, Int]:
    """(local rows, targets, ends) of `push_route`. Every rank begins with the peer after it: at no time do all ranks
    write to one."""
    columns = [(cut.keys, cut.early, cut.count) for cut in cuts]
    keys, early, count = np.array(columns, dtype=np.int64)[runs.reader].T
    in_early = (keys == 0) | ((runs.row >= keys) == early)
    # Where the early part reads in place, nothing is needed at once.
    stage = np.where(runs.reader == rank, 0, np.where(in_early & (count == 0), 1, 2))
    order = np.lexsort(((runs.reader - rank) % world_size, ~in_early, stage))
    runs, stage = runs.take(order), stage[order]
    ends = np.cumsum(np.bincount(stage, runs.length, 3)).astype(np.int64)
    targets = expand_ranges((runs.reader << 32) + runs.row, runs.length)
    return expand_ranges(runs.source, runs.length), targets, ends


def _with_filling(rank: int, filling: int, used: int, sends: Int, targets: Int, ends: Int) -> tuple[Int, Int, Int]:
    """Sends with own rows for this rank's expanded rows [used, used + filling) too, if there are own ones."""
    own = int(ends[0])
    more = filling if own else 0
    rows, into = np.resize(sends[:own], more), (rank << 32) + used + np.arange(more)
    return np.insert(sends, own, rows), np.insert(targets, own, into), ends + more


def _holders(runs: Runs, rows: int) -> tuple[NDArray[np.int32], Int]:
    """(holder_ptr, holders) of `push_route`, from the runs that one rank owns."""
    holders = expand_ranges((runs.reader << 32) + runs.row, runs.length)
    ptr, members = group_rows(expand_ranges(runs.source, runs.length), rows)
    return ptr.astype(np.int32), at_least(holders[members], 2, 0)


def _bits(rows: Int) -> int:
    """A number with a bit for each rank that has rows."""
    return int((1 << np.flatnonzero(rows)).sum())
