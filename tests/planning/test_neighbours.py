"""Routes of neighbours against a walk over tokens, and the ops that read them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

from cp_rewrite.capacity import Capacity
from cp_rewrite.documents import Documents
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan_input import EXTRAS, Neighbours
from cp_rewrite.planning.reads import neighbours_route
from cp_rewrite.planning.row_map import ZERO, Piece, RowMap, TokenCount

ops: Any = torch.ops.cp_rewrite
T = TokenCount(0, 1)
ONE, TWO, THREE = map(TokenCount, (1, 2, 3))


def entries(*pieces: Piece) -> RowMap:
    return RowMap(pieces)


SHIFT = Neighbours(entries(Piece(TWO, step=0, of=EXTRAS), Piece(T - TWO)), extras=1)
FIRST = Neighbours(entries(Piece(ONE), Piece(T - ONE)), keeps_fill=True)
ROLL = Neighbours(entries(Piece(THREE, T - THREE), Piece(T - THREE)))
TURNED = Neighbours(entries(Piece(ONE), Piece(T - TWO, T - TWO, -1), Piece(ONE, of=EXTRAS)), extras=1)
STATE = Neighbours(entries(Piece(TWO, ONE, of=EXTRAS), Piece(T)), extras=3)
CONV = Neighbours(entries(Piece(THREE, step=0, of=EXTRAS), Piece(T), Piece(ONE, of=EXTRAS)), 1, 4, 1)
READS = (SHIFT, FIRST, ROLL, TURNED, STATE, CONV)


def plan_of(layout: str, ranks: int, joined: bool = False) -> BatchPlan:
    """`joined`: of one row that was three."""
    if joined:
        return plan_batch([Documents.from_lengths([5, 3, 5, 4, 9])], ranks, layout, seams=(13, 17))
    rows = [Documents.from_lengths([5, 1, 7], 15), Documents.from_lengths([15])]
    return plan_batch(rows, ranks, layout)


def entries_of(read: Neighbours, tokens: int) -> list[int]:
    """The row that one process reads, entry by entry: tokens, and behind them the numbers of extra rows."""
    found: list[int] = []
    for piece in read.entries.pieces:
        start, length = piece.start.of(tokens), piece.length.of(tokens)
        rows = [start] * length if piece.step == 0 else [*range(start, start + piece.step * length, piece.step)]
        found += [row + tokens if piece.of == EXTRAS else row for row in rows]
    return found


def lists_of(route: Any, name: str) -> list[list[int]]:
    """Undoes `sum_lists`."""
    ptr, rows = route[f"{name}_ptr"], route[f"{name}_rows"]
    pairs = rows[: 2 * (len(ptr) - 1)].reshape(-1, 2)
    return [[*pair[pair >= 0], *rows[ptr[i] : ptr[i + 1]]] for i, pair in enumerate(pairs)]


MOVES = st.tuples(st.sampled_from(("take", "pad", "roll", "flip")), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(MOVES, max_size=6))
def test_maps_that_follow_each_other_move_rows_as_arrays_are_moved(moves: list[tuple[str, int, int]]) -> None:
    rows, found = np.arange(60), RowMap.entries(ZERO, T)
    for move, a, b in moves:
        length, first, last = found.length, TokenCount(a), TokenCount(b)
        whole = RowMap.entries(ZERO, length)
        rows, after = {
            "take": (rows[a : len(rows) - b], RowMap.entries(first, length - first - last)),
            "pad": (np.pad(rows, (a, b), constant_values=60), RowMap.same(first, 0) + whole + RowMap.same(last, 0)),
            "roll": (np.roll(rows, a), RowMap.entries(length - first, first) + RowMap.entries(ZERO, length - first)),
            "flip": (rows[::-1], entries(Piece(length).turned())),
        }[move]
        following = found.then(after)
        assert following is not None
        found = following
    assert found.length.of(60) == len(rows)
    assert found.rows(np.arange(len(rows)), 60).tolist() == rows.tolist()
    assert not found.is_identity or rows.tolist() == list(range(len(rows)))
    outside = RowMap.entries(TokenCount(1), found.length), RowMap.entries(TokenCount(-1), TokenCount(1))
    assert all(found.then(each) is None for each in outside)
    assert not found.reaches_beyond()
    assert RowMap.entries(TokenCount(1), T).reaches_beyond()


@pytest.mark.parametrize("read", READS, ids=["shift", "first", "roll", "turned", "state", "conv"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("capacity", [None, Capacity(9, 9, 99)])
@pytest.mark.parametrize("apart", ["", "joined", "documents"])
def test_each_token_reads_its_entries(read: Neighbours, layout: str, capacity: Capacity | None, apart: str) -> None:
    ranks = 3
    plan, read = plan_of(layout, ranks, joined=bool(apart)), replace(read, resets=apart == "documents")
    if apart and capacity and not read.entries.stays_near():
        with pytest.raises(ValueError, match="moved by their row's length, in whole rows only"):
            neighbours_route(plan, read, 0, capacity)
        return
    rows, bounds = len(plan.rows), plan.row_bounds
    bounds = np.append(plan.rows[0].starts, bounds[-1]) if read.resets else bounds
    size = rows * plan.local_size
    held = [(np.arange(rows)[:, None] * 1000 + plan.filled_indices(rank)).reshape(-1) for rank in range(ranks)]
    routes = [neighbours_route(plan, read, rank, capacity) for rank in range(ranks)]
    assert capacity is None or len({str({name: x.shape for name, x in route.items()}) for route in routes}) == 1
    extras = np.concatenate([-1 - b * 1000 - np.arange(read.extras) for b in range(rows)])
    for rank, route in enumerate(routes):
        sent: list[Any] = []
        for owner, other in enumerate(routes):
            starts = np.append(0, np.cumsum(other["splits"][0]))
            sent.append(held[owner][other["send_rows"][starts[rank] : starts[rank + 1]]])
            assert len(sent[-1]) == route["splits"][1][owner]
        found = np.concatenate([held[rank], *sent, extras])[route["rows"].reshape(-1)]
        for row, at in enumerate(route["out_rows"].reshape(-1)):
            b, token = divmod(int(held[rank][row]), 1000)
            start, end = bounds[np.searchsorted(bounds, token, side="right") - 1 :][:2]
            taps = entries_of(read, end - start)[token - start + read.first :][: read.span]
            in_row = [e < end - start for e in taps]
            expected = [
                b * 1000 + start + e if own else -1 - b * 1000 - (e - end + start)
                for e, own in zip(taps, in_row, strict=True)
            ]
            fill = plan.local_indices(rank).reshape(-1)[row] < 0 and read.keeps_fill
            assert list(found[at : at + read.span]) == ([b * 1000 + token] if fill else expected)
        assert len(held[rank]) == size
        # Back: each expanded row once to the row it names, and each of those that travelled once to its owner's.
        used = route["out_rows"].max() + read.span
        number = np.concatenate([np.arange(size), 10_000 + np.arange(sum(map(len, sent))), -1 - np.arange(len(extras))])
        named = [number[i] for i, rows in enumerate(lists_of(route, "sum")) for _ in rows]
        assert sorted(named) == sorted(number[route["rows"].reshape(-1)[:used]])
        returned = lists_of(route, "return")
        assert [rows[0] for rows in returned] == list(range(size))
        assert sorted(i for rows in returned for i in rows) == list(range(size + route["splits"][0].sum()))
        for row, rows in enumerate(returned):
            assert all(route["send_rows"][i - size] == row for i in rows[1:])


def test_only_rows_that_a_rank_lacks_travel() -> None:
    plan = plan_batch([Documents.from_lengths([16])], 2, "contiguous")
    splits = [neighbours_route(plan, CONV, rank)["splits"].tolist() for rank in range(2)]
    assert splits == [[[0, 2], [0, 1]], [[1, 0], [2, 0]]]


def test_with_a_capacity_as_many_travel_as_its_pieces_could_need() -> None:
    plan, room = plan_batch([Documents.from_lengths([160])], 2, "contiguous"), Capacity(4, 5, 99)
    routes = [neighbours_route(plan, CONV, rank, room) for rank in range(2)]
    assert [route["splits"].tolist() for route in routes] == [[[0, 19], [0, 19]], [[19, 0], [19, 0]]]
    with pytest.raises(ValueError, match=r"capacity\.pieces is 2, but this batch needs 3 on some rank"):
        neighbours_route(plan_of("balanced", 3), CONV, 0, Capacity(2, 2, 2))


def test_rows_that_are_too_short_are_refused() -> None:
    plan = plan_batch([Documents.from_lengths([2])], 2, "contiguous")
    with pytest.raises(ValueError, match="shifts tokens by more than a row has"):
        neighbours_route(plan, ROLL, 0)


def test_padding_is_not_carried_into_a_document() -> None:
    apart = replace(SHIFT, apart=True), replace(CONV, first=0, apart=True)
    padded = Documents(np.array([0, 6]), np.array([4, 6]), 14)
    for rows, refused in (([padded], True), ([Documents.from_lengths([6, 4], 14)], False)):
        plan = plan_batch(rows, 2, "contiguous")
        for rank, read in itertools.product(range(2), apart):
            if refused:
                with pytest.raises(ValueError, match="carries padding into a document"):
                    neighbours_route(plan, read, rank)
            else:
                neighbours_route(plan, read, rank)


@pytest.mark.slow
def test_ops_pass_opcheck() -> None:
    plan = plan_batch([Documents.from_lengths([4, 5])], 1, "contiguous")
    x, extras = torch.randn(9, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    for read in (SHIFT, CONV):
        tables = {key: torch.from_numpy(value) for key, value in neighbours_route(plan, read, 0).items()}
        out_rows = tables.pop("out_rows")
        names = ("rows", "send_rows", "splits", "sum_ptr", "sum_rows", "return_ptr", "return_rows")
        args = (x.requires_grad_(), extras, *(tables[name] for name in names), "")
        opcheck(ops.neighbour_rows.default, args)
        assert torch.autograd.gradcheck(lambda x, e, args=args: ops.neighbour_rows(x, e, *args[2:]), (x, extras))
    weight, bias = torch.randn(6, 2, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    rows = ops.neighbour_rows(*args).detach().requires_grad_()
    for bias_or_not in (bias.requires_grad_(), None):
        given = (rows, weight.requires_grad_(), bias_or_not, out_rows, 3, 2)
        opcheck(ops.convolve_rows.default, given)
        assert torch.autograd.gradcheck(ops.convolve_rows, given)
