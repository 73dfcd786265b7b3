"""The tables by which a token reads rows of other tokens, which lie on the ranks: for running sums (`scan_tables`), and
for shifts, rolls and convolutions over tokens (`neighbours_route`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity

from .batch_plan import BatchPlan
from .intervals import Int, expand_ranges, sum_lists
from .plan_input import Neighbours, Scan
from .routes.route import Arrays, filled, row_index


@dataclass(frozen=True)
class _Line:
    """The pieces of one line by their place in it: where they start, how long they are, who has them, and in which of
    the owner's B T_l local rows. Each is (n,) int64."""

    starts: Int
    lengths: Int
    owners: Int
    sources: Int


def scan_tables(plan: BatchPlan, scan: Scan, rank: int, capacity: Capacity | None = None) -> Arrays:
    """The tables of a running sum over a row's tokens, which lie in pieces on the ranks: those of one rank, all int64.

    A rank runs over its own tokens in the row's order. A token then lacks what other ranks have before it: for each of
    them the value that it had reached at the end of its last piece before the token's.

        row                          a b c d e f g h
        rank 0 has f g a b           runs over a b f g         gives ab, abfg at the ends of its pieces
        rank 1 has c d e h           runs over c d e h         gives cde, cdeh
        rank 0, for f and g          cde is before             f: abf cde     g: abfg cde
        rank 1, for h                abfg is before            h: cdeh abfg

    Every operation that gives the same in any order of its operands can be put together so, without taking anything
    back.

    Shapes: B rows of T tokens, T_l local rows of each; P ranks; L lines that are run over, of W local rows on each
    rank: the rows of the batch (B of T_l), or all of them as one (1 of B T_l); N pieces of a line, at most, on any
    rank.

    Returns:
        scan_order: (B, T_l) the local row, among B T_l, that stands at each place of the L lines; fill at the end.
        scan_place: (B, T_l) where each local row stands there; fill where the token stands of which it is a copy.
        scan_piece: (B, T_l) the piece of each local row, among N L.
        scan_ends: (N L,) where each piece of this rank ends, among the places of its lines.
        scan_before: (N L, P) the last piece of each rank before it, among P N L; -1: there is none, or it is this rank.
    Raises:
        ValueError: a token of no document stands before one of a document, against `apart`; a line has more pieces
            than the capacity.
    """
    _check_scan_apart(plan, scan)
    lines = _lines(plan, scan)
    most = max(int(np.bincount(line.owners, minlength=plan.world_size).max()) for line in lines)
    if capacity is not None and most > capacity.pieces:
        raise ValueError(f"capacity.pieces is {capacity.pieces}, but this batch needs {most} on some rank: raise it")
    count, size = max(most, 2) if capacity is None else capacity.pieces, len(plan.rows) * plan.local_size // len(lines)
    order = np.empty((len(lines), size), dtype=np.int64)
    piece = np.zeros(order.size, dtype=np.int64)
    ends = np.zeros((count, len(lines)), dtype=np.int64)
    before = np.full((count, len(lines), plan.world_size), -1, dtype=np.int64)
    for number, line in enumerate(lines):
        mine = line.owners == rank
        own = expand_ranges(line.sources[mine], line.lengths[mine])
        rows = np.arange(order.size) if scan.joined else np.arange(number * size, (number + 1) * size)
        order[number] = np.concatenate([own, np.setdiff1d(rows, own)])
        pieces = np.arange(int(mine.sum()))
        piece[own] = np.repeat(pieces, line.lengths[mine]) * len(lines) + number
        ends[pieces, number] = number * size + np.cumsum(line.lengths[mine]) - 1
        for other in range(plan.world_size):
            passed = np.cumsum(line.owners == other)[mine]  # the other's pieces before each of this rank's
            if other != rank:
                place = (other * count + passed - 1) * len(lines) + number
                before[pieces, number, other] = np.where(passed > 0, place, -1)
    place = np.empty(order.size, dtype=np.int64)
    place[order.reshape(-1)] = np.arange(order.size)
    copied = _copied(plan, rank)
    shape = len(plan.rows), plan.local_size
    return {
        "scan_order": order.reshape(shape),
        "scan_place": place[copied].reshape(shape),
        "scan_piece": piece[copied].reshape(shape),
        "scan_ends": ends.reshape(-1),
        "scan_before": before.reshape(-1, plan.world_size),
    }


def _lines(plan: BatchPlan, scan: Scan) -> list[_Line]:
    found: list[_Line] = []
    for b, row in enumerate(plan.orders):
        starts, stops, owners, sources = row.segments
        found.append(_Line(b * row.total + starts, stops - starts, owners, b * plan.local_size + sources))
    if not scan.joined:
        return found
    parts = zip(*((x.starts, x.lengths, x.owners, x.sources) for x in found), strict=True)
    return [_Line(*map(np.concatenate, parts))]


def _copied(plan: BatchPlan, rank: int) -> Int:
    """(B T_l,) each local row among them; of fill the one that it is a copy of, where this rank has that."""
    held, own = plan.copied_rows(rank), np.arange(plan.local_size)
    rows = np.where(held < plan.local_size, held, own) + np.arange(len(plan.rows))[:, None] * plan.local_size
    return rows.reshape(-1)


def _check_scan_apart(plan: BatchPlan, scan: Scan) -> None:
    if not scan.apart:
        return
    of_document = [row.document_ids() >= 0 for row in plan.rows]
    for inside in [np.concatenate(of_document)] if scan.joined else of_document:
        if (inside & np.logical_or.accumulate(~inside)).any():
            raise ValueError(
                "a running sum of the model carries padding into a document behind it: tokens of no document attend to "
                "nothing here, whatever the model's mask says. Put padding at the end of rows, set it to 0 before, or "
                "give it a document of its own"
            )


@dataclass(frozen=True)
class _Room:
    """The sizes that a capacity gives. sent: rows from each rank to each other. entries: E."""

    sent: int
    entries: int


def neighbours_route(plan: BatchPlan, read: Neighbours, rank: int, capacity: Capacity | None = None) -> Arrays:
    """The route of neighbours: what a shift, a roll or a convolution over tokens reads of other ranks' rows. The tables
    of one rank. B rows, P ranks, R = B T_l local rows, V rows received, S rows sent, M extras.

    Entries are what one process would read: the row's T tokens and a few rows that all ranks have, in some order. The
    local row of token p reads the entries p + first, p + first + 1, …, as many as `span`:

        cat([zero, x[:, :-1]], 1)                    x padded by 2 zeros, for a convolution of 3 taps
        entries  0  x0 x1 x2 x3 x4                   entries  0  0  x0 x1 x2 x3 x4 x5
        token 2     x1          first 0, span 1      token 2        x0 x1 x2           first 0, span 3

    Tokens that stand side by side on a rank read their entries in one run:

        rank 1 has tokens 3 4 5, span 3              expanded rows  x1 x2 x3 x4 x5     out_rows 0 1 2
        rank 0 has tokens 0 1 2                      expanded rows  0  0  x0 x1 x2     out_rows 0 1 2

    Rows that were joined to one have entries each of their own, and so have documents where states begin anew. With a
    capacity all ranks send each other equally many rows, as many as its pieces could need, and have equally many
    expanded rows.

    Returns:
        rows: int32 into cat(R local rows, V received rows by source, B M extras); (B, T_l) where span is 1, else (E,).
        out_rows: (B, T_l) int32, where each local row's entries begin among `rows`.
        send_rows, splits, return_ptr, return_rows: as of `needed_route`.
        sum_ptr (R + V + B M + 1,), sum_rows: int32, which of `rows` name each row, see `intervals.sum_lists`.
    Raises:
        ValueError: a row is too short, a token of a document reads one of none against `apart`, or the batch needs more
            than the capacity has.
    """
    room = None if capacity is None else _room(plan, read, capacity)
    size, total = len(plan.rows) * plan.local_size, plan.rows[0].total
    batch, source, kept, out_rows = _expanded(plan, read, rank)
    slots = _slots(plan)
    slot = np.where(source < total, slots[batch, np.minimum(source, total - 1)], -1)
    slot = np.where(kept >= 0, rank * size + kept, slot)
    foreign = (slot >= 0) & (slot // size != rank)
    received = np.unique(slot[foreign])
    place, arriving = _places(received // size, rank, plan.world_size, room)
    others = size + int(arriving.sum())
    rows = np.where(slot >= 0, slot - rank * size, others + batch * read.extras + source - total)
    rows[foreign] = size + place[np.searchsorted(received, slot[foreign])]
    sent = [_foreign_slots(plan, read, slots, reader, rank) - rank * size for reader in range(plan.world_size)]
    if room is not None:  # what is sent in vain is not read, so that it returns no gradient
        vain = np.arange(room.sent) % size
        sent = [np.append(s, vain[: (reader != rank) * room.sent - len(s)]) for reader, s in enumerate(sent)]
    send_rows = np.concatenate(sent)
    ptr, members = sum_lists(rows, others + len(plan.rows) * read.extras)
    return_ptr, return_rows = sum_lists(np.concatenate([np.arange(size), send_rows]), size)
    if room is not None:
        rows = filled(rows, room.entries, 0)
        members = filled(members, 2 * (len(ptr) - 1) + room.entries, 0)
        return_rows = filled(return_rows, 3 * size + len(send_rows), 0)
    shape = len(plan.rows), plan.local_size
    return {
        "rows": rows.astype(np.int32).reshape(shape) if read.span == 1 else row_index(rows),
        "out_rows": out_rows.astype(np.int32).reshape(shape),
        "send_rows": row_index(send_rows),
        "splits": np.stack([[len(rows) for rows in sent], arriving]),
        "sum_ptr": row_index(ptr),
        "sum_rows": row_index(members),
        "return_ptr": row_index(return_ptr),
        "return_rows": row_index(return_rows),
    }


def _expanded(plan: BatchPlan, read: Neighbours, rank: int) -> tuple[Int, Int, Int, Int]:
    """The rows that a rank reads: (row of the batch, source, local row that is read as it is or -1) of each expanded
    row, and `out_rows`."""
    tokens, own = plan.filled_indices(rank), plan.local_indices(rank) >= 0
    batch = np.repeat(np.arange(len(tokens)), tokens.shape[1])
    token, (start, end) = tokens.reshape(-1), _own_rows(plan, read, tokens)
    if read.span == 1:
        kept = np.where(own | (not read.keeps_fill), -1, np.arange(tokens.size).reshape(tokens.shape)).reshape(-1)
        source = _sources(plan, read, token + read.first, start, end)
        _check_apart(plan, read, batch, token, source)
        return batch, source, kept, np.arange(tokens.size)
    begin = np.flatnonzero(_run_starts(plan, read, rank))
    count = np.diff(np.append(begin, tokens.size))
    lengths = count + read.span - 1
    entries = expand_ranges(token[begin] + read.first, lengths)
    row, start, end = (np.repeat(x[begin], lengths) for x in (batch, start, end))
    source = _sources(plan, read, entries, start, end)
    out_rows = expand_ranges(np.cumsum(lengths) - lengths, count)
    for tap in range(read.span if read.apart else 0):
        _check_apart(plan, read, batch, token, source[out_rows + tap])
    return row, source, np.full(len(source), -1), out_rows


def _sources(plan: BatchPlan, read: Neighbours, entries: Int, start: Int, end: Int) -> Int:
    """Source of each entry of tokens in [start, end): a token of the row of the batch, or, behind those, an extra."""
    source = read.entries.rows(entries - start, end - start)
    return start + np.where(source < end - start, source, source + plan.rows[0].total - end)


def _own_rows(plan: BatchPlan, read: Neighbours, tokens: Int) -> tuple[Int, Int]:
    """(B T_l,) where what has entries of its own begins and ends around each of the tokens (B, T_l): the row; each of
    the rows that were joined to it; or a document, and what is between two."""
    found: list[tuple[Int, Int]] = []
    for row, inside in zip(plan.rows, tokens, strict=True):
        bounds = np.array([0, row.total]) if read.across else plan.row_bounds
        if read.resets:
            bounds = np.unique(np.concatenate([bounds, row.starts, row.ends]))
        place = np.searchsorted(bounds, inside, side="right")
        found.append((bounds[place - 1], bounds[place]))
    starts, ends = (np.concatenate(each) for each in zip(*found, strict=True))
    return starts, ends


def _run_starts(plan: BatchPlan, read: Neighbours, rank: int) -> NDArray[np.bool_]:
    """(B, T_l): a run begins where a token does not follow the one before it, or has entries of another row; fill is a
    run by itself."""
    tokens, own = plan.filled_indices(rank), plan.local_indices(rank) >= 0
    first = _own_rows(plan, read, tokens)[0].reshape(tokens.shape)
    starts = np.ones(tokens.shape, dtype=np.bool_)
    starts[:, 1:] = (np.diff(tokens, axis=1) != 1) | ~own[:, 1:] | (np.diff(first, axis=1) != 0)
    return starts


def _places(owners: Int, rank: int, world_size: int, room: _Room | None) -> tuple[Int, Int]:
    """Places of rows that are received from these owners, ascending; how many come from each rank."""
    counts = np.bincount(owners, minlength=world_size)
    if room is None:
        return np.arange(len(owners)), counts
    within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    arriving = np.full(world_size, room.sent)
    arriving[rank] = 0
    return within + room.sent * (owners - (owners > rank)), arriving


def _room(plan: BatchPlan, read: Neighbours, capacity: Capacity) -> _Room:
    """Sizes that serve every batch of as many tokens whose ranks have no more runs of tokens than the capacity pieces.

    A run of tokens p … q reads of a piece the tokens p + d … q + d + span - 1: of others no more than those before p
    and behind q. All fill of a row of the batch reads what one token does.
    """
    size, tokens, batch = len(plan.rows) * plan.local_size, plan.rows[0].total, len(plan.rows)
    fill = batch * plan.fill
    each = [_run_starts(plan, read, rank) & (plan.local_indices(rank) >= 0) for rank in range(plan.world_size)]
    runs = max(int(starts.sum()) for starts in each)
    if runs > capacity.pieces:
        raise ValueError(f"capacity.pieces is {capacity.pieces}, but this batch needs {runs} on some rank: raise it")
    if (read.resets or (plan.seams and not read.across)) and not read.entries.stays_near():
        detail = "with a capacity, tokens are turned around, or moved by their row's length, in whole rows only"
        raise ValueError(detail)
    sent, entry = 0, 0
    for piece in read.entries.pieces:
        first, length = piece.start.of(tokens) - entry + read.first, piece.length.of(tokens)
        reach = length if piece.step < 0 else max(0, -first) + max(0, first + read.span - 1)
        sent += min(batch * length, capacity.pieces * reach + batch * read.span) * (piece.of is None)
        entry += length
    most = min(size, capacity.pieces + fill)
    return _Room(min(size, sent), size + (read.span - 1) * most)


def _check_apart(plan: BatchPlan, read: Neighbours, batch: Int, token: Int, source: Int) -> None:
    if not read.apart or not plan.padding:
        return
    others = np.ones((len(plan.rows), read.extras), dtype=np.bool_)
    of_document = np.concatenate([np.stack([row.document_ids() >= 0 for row in plan.rows]), others], axis=1)
    if (of_document[batch, token] & ~of_document[batch, source]).any():
        raise ValueError(
            "a shift or a convolution of the model carries padding into a document: tokens of no document attend to "
            "nothing here, whatever the model's mask says. Put padding at the end of rows, or give it a document of "
            "its own"
        )


def _slots(plan: BatchPlan) -> Int:
    """(B, T): where each token is among the local rows of all ranks, rank after rank."""
    slots = np.empty((len(plan.rows), plan.rows[0].total), dtype=np.int64)
    for b, order in enumerate(plan.orders):
        starts, stops, owners, sources = order.segments
        slots[b] = expand_ranges((owners * len(plan.rows) + b) * plan.local_size + sources, stops - starts)
    return slots


def _foreign_slots(plan: BatchPlan, read: Neighbours, slots: Int, reader: int, owner: int) -> Int:
    """The local rows of `owner` that `reader` reads, ascending, among those that any rank reads."""
    if reader == owner:
        return np.zeros(0, dtype=np.int64)
    batch, source, kept, _ = _expanded(plan, read, reader)
    found = (source < plan.rows[0].total) & (kept < 0)
    read_slots = slots[batch[found], source[found]]
    return np.unique(read_slots[read_slots // (len(plan.rows) * plan.local_size) == owner])
