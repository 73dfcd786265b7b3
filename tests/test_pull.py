"""The pull route, carried out in numpy for all ranks at once, gives what the gathered route says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite import pull
from cp_rewrite.active import PlanInput
from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.pull import NAMES, pull_route
from tests.packed import make_schedule
from tests.packs import batches, masks


@given(batches(), masks(), st.integers(1, 5), st.sampled_from(("contiguous", "head_tail", "dual_chunk", "balanced")))
def test_pull_and_return_reach_every_row(
    rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str
) -> None:
    schedule, _ = make_schedule(rows, world_size, layout, mask)
    size = schedule.rows
    routes = [pull_route(schedule, rank) for rank in range(world_size)]
    published = np.zeros((world_size, size), dtype=np.bool_)
    sent = np.zeros((world_size, int(routes[0]["capacity"][0])), dtype=np.bool_)
    for rank, route in enumerate(routes):
        published[rank, route["publish_rows"]] = True
        sent[rank, route["return_rows"]] = True
        assert tuple(route) == NAMES
        assert all(len(array) >= 2 for name, array in route.items() if not PlanInput(name).is_static)
    for rank, route in enumerate(routes):
        expanded = int(schedule.expanded[rank])
        got = np.full(max(expanded, 2), -1)
        for job, source in enumerate(route["job_source"]):
            targets = route["job_rows"][slice(*route["job_ptr"][job : job + 2])]
            if len(targets):
                assert source // size == rank or published[source // size, source % size]
                assert (got[targets] == -1).all()
                got[targets] = source
        np.testing.assert_array_equal(got[:expanded], schedule.route("all_gather", rank)["kv_rows"][:expanded])
        for row in range(size):
            for entry in route["pull_rows"][slice(*route["pull_ptr"][row : row + 2])]:
                reader, expanded_row = entry >> 32, entry & 0xFFFFFFFF
                assert reader == rank or sent[reader, expanded_row]
                kv_rows = schedule.route("all_gather", int(reader))["kv_rows"]
                assert kv_rows[expanded_row] == rank * size + row


def test_peers_take_turns() -> None:
    """Jobs of all peers are spread over the list, so that no peer is read by everyone at once; own rows come last."""
    schedule, _ = make_schedule([Documents.from_lengths([4096])], 4, "contiguous", PackedMask())
    route = pull_route(schedule, 3)
    owners, remote = route["job_source"] // schedule.rows, int(route["remote_jobs"][0])
    assert remote == 3072
    assert (owners[remote:] == 3).all()
    for window in owners[:remote].reshape(16, -1):
        assert np.bincount(window).tolist() == [64, 64, 64]


def test_each_row_is_pulled_once() -> None:
    schedule, _ = make_schedule([Documents.from_lengths([256])], 4, "dual_chunk", PackedMask())
    route = pull_route(schedule, 1)
    assert len(np.unique(route["job_source"])) == len(route["job_source"]) < len(route["job_rows"])


@given(batches(), masks(), st.integers(1, 5), st.sampled_from(("contiguous", "head_tail", "dual_chunk", "balanced")))
def test_the_early_part_reads_early_rows_only(
    rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str
) -> None:
    schedule, _ = make_schedule(rows, world_size, layout, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pull, "_WORTH", 1)
        routes = [pull_route(schedule, rank) for rank in range(world_size)]
    for rank, route in enumerate(routes):
        tables = schedule.attention(rank)
        cu_q, cu_k = tables["cu_seqlens_q"], tables["cu_seqlens_k"]
        n, queries, keys, part = route["stages"].tolist()
        first, remote = int(route["early_jobs"][0]), int(route["remote_jobs"][0])
        assert (n == -1) == (remote == 0)
        if n <= 0:
            assert first == 0
            continue
        assert 0 < n < len(cu_q) - 1
        assert (queries, keys) == (cu_q[n], cu_k[n])
        assert not (tables["pieces"][:, 6] > 0).any()
        np.testing.assert_array_equal(route["rest_cu_seqlens_q"], cu_q[n:] - queries)
        np.testing.assert_array_equal(route["rest_cu_seqlens_k"], cu_k[n:] - keys)
        here = np.zeros(max(2, int(schedule.expanded[rank])), dtype=np.bool_)
        for job in [*range(first), *range(remote, len(route["job_source"]))]:
            here[route["job_rows"][slice(*route["job_ptr"][job : job + 2])]] = True
        early = slice(keys, cu_k[-1]) if part else slice(0, keys)
        assert here[early].all()
        assert not here[: cu_k[-1]].all()  # something arrives beside it


def test_what_arrives_beside_work() -> None:
    """The second rank's head of a long document needs the first rank's only; its tail waits for the rest. The last
    rank's tail needs no more than its head does."""
    schedule, _ = make_schedule([Documents.from_lengths([32768])], 4, "balanced", PackedMask())
    for rank in range(4):
        route = pull_route(schedule, rank)
        assert route["stages"].tolist() == ([1, 4096, 4096 * (rank + 1), 0] if rank < 3 else [0, 0, 0, 0])
        assert route["early_jobs"][0] == (4096 * rank if rank < 3 else 0)
        assert route["remote_jobs"][0] == 4096 * (6 - rank)
