"""The push route, carried out in numpy for all ranks at once, gives what the gathered route says."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes import push
from cp_rewrite.planning.routes.gathered import gathered_route
from cp_rewrite.planning.routes.push import push_route
from tests.helpers.packed import make_schedule
from tests.helpers.packs import batches, masks

LAYOUTS = st.sampled_from(("contiguous", "head_tail", "dual_chunk", "balanced"))
Route = dict[str, NDArray[np.integer]]


def written(routes: list[Route], rank: int, last: int) -> NDArray[np.int64]:
    """A rank's expanded rows when all are done with `ends[last]`: owner << 32 | row; -1: nothing is written."""
    held = np.full(int(routes[0]["capacity"][0]), -1)
    for owner, route in enumerate(routes):
        sends, targets = route["sends"][: route["ends"][last]], route["targets"][: route["ends"][last]]
        mine = targets >> 32 == rank
        assert (held[targets[mine] & 0xFFFFFFFF] == -1).all()
        held[targets[mine] & 0xFFFFFFFF] = owner << 32 | sends[mine].astype(np.int64)
    return held


def read(routes: list[Route], rank: int, last: int, total: int) -> NDArray[np.int64]:
    """The rank's `total` expanded rows as `written`, or in place where all are."""
    source, _, whole = routes[rank]["place"].tolist()
    held = written(routes, rank, last)
    if whole:
        assert (whole, (held == -1).all()) == (total, True)
        return rank << 32 | np.arange(source, source + whole)
    assert (held[total:] == -1).all()
    return held[:total]


@contextmanager
def any_worth(number: int) -> Generator[None]:
    """Rows are read in place, and come beside work, from so many on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "PUSH_LAG", 0)
        patch.setattr(push, "PUSH_CUT_ROWS", number)
        yield


@given(batches(), masks(), st.integers(1, 5), LAYOUTS, st.sampled_from((1, 1024)))
def test_push_and_return_reach_every_row(
    rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str, worth: int
) -> None:
    schedule, _ = make_schedule(rows, world_size, layout, mask)
    size = schedule.local_rows
    with any_worth(worth):
        routes = [push_route(schedule, rank) for rank in range(world_size)]
    gathered = [gathered_route(schedule, rank)["kv_rows"] for rank in range(world_size)]
    held: list[list[int]] = [[] for _ in range(world_size * size)]
    for rank, route in enumerate(routes):
        total, (source, early, whole) = int(schedule.expanded[rank]), route["place"].tolist()
        got = read(routes, rank, 2, total)
        np.testing.assert_array_equal((got >> 32) * size + (got & 0xFFFFFFFF), gathered[rank][:total])
        assert (len(route["expanded"]), len(route["copied"])) == (max(2, total), 2 if whole else max(2, total))
        # The rows that are read in place as well are the first to be sent, so that they can be left out.
        keys, part = route["stages"][2:4].tolist()
        in_place = slice(keys, None) if part else slice(keys)
        assert early in (0, len(got[:total][in_place]))
        assert route["sends"][:early].tolist() == list(range(source, source + early))
        assert (route["targets"][:early] & 0xFFFFFFFF).tolist() == list(range(total))[in_place][:early]
        owners = set((got >> 32).tolist()) - {rank}
        readers = set((route["targets"][: route["ends"][2]] >> 32).tolist()) - {rank}
        for found, partners in zip((owners, readers), route["partners"].view(np.uint32).tolist(), strict=True):
            assert found == {peer for peer in range(world_size) if partners >> peer & 1}
        assert (route["targets"][: route["ends"][0]] >> 32 == rank).all()
        for row, slot in enumerate([] if whole else gathered[rank][:total].tolist()):
            held[slot].append(rank << 32 | row)
    for rank, route in enumerate(routes):
        found = [route["holders"][low:high].tolist() for low, high in pairwise(route["holder_ptr"].tolist())]
        assert found == held[rank * size : (rank + 1) * size]


def test_rows_are_read_in_place() -> None:
    """Whole documents are, before or after what another rank's document needs; where all are, nothing is copied."""
    whole, _ = make_schedule([Documents.from_lengths([2048] * 4)], 2, "contiguous", PackedMask())
    for rank in range(2):
        route = push_route(whole, rank)
        assert route["place"].tolist() == [0, 0, 4096]
        assert (len(route["copied"]), route["capacity"][0], route["ends"].tolist()) == (2, 0, [0, 0, 0])
        assert route["stages"].tolist() == [0, 0, 0, 0, 0]
        assert not route["holder_ptr"].any()
    cut, _ = make_schedule([Documents.from_lengths([1500, 4000, 2692])], 2, "contiguous", PackedMask())
    first, second = (push_route(cut, rank) for rank in range(2))
    assert first["place"].tolist() == [0, 0, 4096]
    assert second["place"].tolist() == [1404, 2692, 0]
    assert second["stages"].tolist() == [1, 1404, 4000, 1, 0]
    assert (len(first["copied"]), len(second["copied"])) == (2, 6692)
    assert first["capacity"] == second["capacity"] == 6692
    assert first["holder_ptr"][-1] == 2596  # of the document that the other rank ends
    assert second["holder_ptr"][-1] == 4096


def test_nobody_is_written_to_by_all() -> None:
    """Every rank begins with the next one."""
    schedule, _ = make_schedule([Documents.from_lengths([4096])], 4, "contiguous", PackedMask(False))
    for rank in range(4):
        route = push_route(schedule, rank)
        own, _, stop = route["ends"].tolist()
        assert own == 1024
        assert (route["targets"][own:stop] >> 32).tolist() == np.repeat((rank + 1 + np.arange(3)) % 4, 1024).tolist()


def test_partners_have_a_bit_each() -> None:
    schedule, _ = make_schedule([Documents.from_lengths([64])], 32, "contiguous", PackedMask(False))
    senders, receivers = push_route(schedule, 3)["partners"].view(np.uint32).tolist()
    assert senders == receivers == 0xFFFFFFFF - 8


@given(batches(), masks(), st.integers(1, 5), LAYOUTS)
def test_early_entries_have_their_rows_early(
    rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str
) -> None:
    schedule, _ = make_schedule(rows, world_size, layout, mask)
    with any_worth(1):
        routes = [push_route(schedule, rank) for rank in range(world_size)]
    for rank, route in enumerate(routes):
        tables = schedule.attention(rank)
        cu_q, cu_k = tables["cu_seqlens_q"], tables["cu_seqlens_k"]
        n, queries, keys, part, awaited = route["stages"].tolist()
        total, (_, some, whole) = int(schedule.expanded[rank]), route["place"].tolist()
        early, everything = (read(routes, rank, last, total) >= 0 for last in (1, 2))
        assert everything.all()
        own = read(routes, rank, 0, total) >= 0
        assert awaited == (early & ~own).sum()
        if n == 0:
            assert (queries, keys) == (0, 0)
            assert early.all()  # what is needed at once goes first
            assert some == 0
            assert whole in (0, total)
            continue
        assert 0 < n < len(cu_q) - 1
        assert (queries, keys) == (cu_q[n], cu_k[n])
        assert not (tables["pieces"][:, 6] > 0).any()
        np.testing.assert_array_equal(route["rest_cu_seqlens_q"], cu_q[n:] - queries)
        np.testing.assert_array_equal(route["rest_cu_seqlens_k"], cu_k[n:] - keys)
        sides = early[:keys], early[keys:]
        assert sides[part].all()
        assert whole == 0
        assert not sides[1 - part].all()  # something arrives beside it
        if some:
            assert some == len(sides[part])
            assert own.sum() >= some


def test_what_arrives_beside_work() -> None:
    """The first rank has all of its head of a long document, the second rank's needs the first rank's; their tails wait
    for the rest. The last rank's chunks are neighbours: one piece, which needs all its rows at once."""
    schedule, _ = make_schedule([Documents.from_lengths([32768])], 4, "balanced", PackedMask())
    routes = [push_route(schedule, rank) for rank in range(4)]
    for rank, route in enumerate(routes):
        awaited = 4096 * rank if rank < 3 else 12288
        assert route["stages"].tolist() == [*((1, 4096, 4096 * (rank + 1)) if rank < 3 else (0, 0, 0)), 0, awaited]
        own, early, everything = ((written(routes, rank, last) >= 0).sum() for last in range(3))
        assert everything == schedule.expanded[rank] == (36864 if rank < 3 else 20480)
        assert route["place"].tolist() == [0, 4096 if rank == 0 else 0, 0]
        assert early == own + awaited


def test_no_cut_and_rows_after_the_expanded_ones() -> None:
    schedule, _ = make_schedule([Documents.from_lengths([32768])], 4, "balanced", PackedMask())
    routes = [push_route(schedule, rank, cut=False, filling=100) for rank in range(4)]
    for rank, route in enumerate(routes):
        used = int(schedule.expanded[rank])
        own = route["targets"][: route["ends"][0]]
        assert (own >> 32 == rank).all()
        assert set(range(used, used + 100)) <= set((own & 0xFFFFFFFF).tolist())
        assert route["ends"][1] == route["ends"][2]
        assert route["stages"].tolist() == [0, 0, 0, 0, 1]  # whatever the batch
