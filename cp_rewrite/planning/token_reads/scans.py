"""The tables of a running sum over a row's tokens, which lie in pieces on the ranks.

A rank runs over its own tokens in the row's order. A token then lacks what other ranks have before it: for each of them
the value that it had reached at the end of its last piece before the token's.

    row                          a b c d e f g h
    rank 0 has f g a b           runs over a b f g         gives ab, abfg at the ends of its pieces
    rank 1 has c d e h           runs over c d e h         gives cde, cdeh
    rank 0, for f and g          cde is before             f: abf cde     g: abfg cde
    rank 1, for h                abfg is before            h: cdeh abfg

Every operation that gives the same in any order of its operands can be put together so, without taking anything back.

Shapes: B rows of T tokens, T_l local rows of each; P ranks; L lines that are run over, of W local rows on each rank:
the rows of the batch (B of T_l), or all of them as one (1 of B T_l); N pieces of a line, at most, on any rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_rewrite.capacity import Capacity
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.intervals import Int, expand_ranges
from cp_rewrite.planning.plan_input import Scan
from cp_rewrite.planning.routes.route import Arrays


@dataclass(frozen=True)
class _Line:
    """The pieces of one line by their place in it: where they start, how long they are, who has them, and in which of
    the owner's B T_l local rows. Each is (n,) int64."""

    starts: Int
    lengths: Int
    owners: Int
    sources: Int


def scan_tables(plan: BatchPlan, scan: Scan, rank: int, capacity: Capacity | None = None) -> Arrays:
    """The tables of one rank, all int64.

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
    _check_apart(plan, scan)
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


def _check_apart(plan: BatchPlan, scan: Scan) -> None:
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
