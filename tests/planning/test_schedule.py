"""The schedule against a dense mask, and every route against the exchange it stands for, played in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.gathered import gathered_route, local_route, needed_route
from tests.helpers.amount import drawn
from tests.helpers.packs import batches, masks

Tables = dict[str, NDArray[np.integer]]
Moved = tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]


def global_rows(plan: BatchPlan) -> Int:
    """(P, R) flat global row b T + t of each local row, -1 where there is none."""
    offset = np.arange(len(plan.rows))[:, None] * plan.rows[0].total
    local = [plan.local_indices(rank) for rank in range(plan.world_size)]
    return np.stack([np.where(index < 0, -1, index + offset).reshape(-1) for index in local])


def seen_by(table: Tables) -> list[tuple[Int, Int]]:
    """(query local row, expanded row) of every pair that a rank's pieces hold, piece by piece."""
    pairs: list[tuple[Int, Int]] = []
    for q0, q1, k0, k1, left, right, launch in table["pieces"].tolist():
        assert (q0 == q1) == (k0 == k1)
        delta = np.arange(k1 - k0)[None] - np.arange(q1 - q0)[:, None] - (k1 - k0) + (q1 - q0)
        keep = np.ones_like(delta, dtype=np.bool_)
        if left >= 0:
            keep &= delta >= -left
        if right >= 0:
            keep &= delta <= right
        assert q0 == q1 or table["launches"][launch, :2].tolist() == [left, right]
        queries, keys = np.nonzero(keep)
        pairs.append((queries + q0, keys + k0))
    return pairs


def wanted_pairs(rows: tuple[Documents, ...], mask: PackedMask) -> NDArray[np.int64]:
    """1 where a query, of all tokens of the batch, sees a key."""
    total = rows[0].total
    wanted = np.zeros((len(rows) * total, len(rows) * total), dtype=np.int64)
    for b, documents in enumerate(rows):
        wanted[b * total : (b + 1) * total, b * total : (b + 1) * total] = mask.materialize(documents)
    return wanted


@drawn(300)
@given(batches(), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_pieces_cover_exactly_the_mask(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    plan = plan_batch(rows, world_size, layout, mask)
    schedule, total, where = plan.schedule(mask), rows[0].total, global_rows(plan)
    seen = np.zeros((len(rows) * total, len(rows) * total), dtype=np.int64)
    for rank in range(world_size):
        source = where.reshape(-1)[gathered_route(schedule, rank)["kv_rows"]]
        for queries, keys in seen_by(schedule.attention(rank)):
            np.add.at(seen, (where[rank][queries], source[keys]), 1)
    np.testing.assert_array_equal(seen, wanted_pairs(rows, mask))


@drawn(100)
@given(batches(), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_cu_seqlens_describe_launch_0(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    schedule = plan_batch(rows, world_size, layout, mask).schedule(mask)
    for rank in range(world_size):
        table = schedule.attention(rank)
        cu_q, cu_k, pieces, launches = (table[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "pieces", "launches"))
        assert len(cu_q) == len(cu_k) >= 3
        assert cu_q[0] == cu_k[0] == 0
        assert cu_q[-1] == schedule.local_rows
        entries = {
            (q0, q1): (k0, k1) for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False) if k0 < k1
        }
        main = pieces[(pieces[:, 6] == 0) & (pieces[:, 0] < pieces[:, 1])]
        assert entries == {(q0, q1): (k0, k1) for q0, q1, k0, k1 in main[:, :4].tolist()}
        assert launches[0, 2] == np.diff(cu_q).max()
        real = pieces[pieces[:, 0] < pieces[:, 1]]
        assert (np.diff(real[:, 6]) >= 0).all()
        assert real[:, 3].tolist() == np.cumsum(real[:, 3] - real[:, 2]).tolist()
        assert schedule.expanded[rank] == (real[-1, 3] if len(real) else 0)
        for launch, (left, right, max_q, max_k) in enumerate(launches.tolist()):
            part = real[real[:, 6] == launch]
            assert (part[:, 4] == left).all()
            assert (part[:, 5] == right).all()
            assert max_k == (part[:, 3] - part[:, 2]).max(initial=0)
            assert max_q >= (part[:, 1] - part[:, 0]).max(initial=0)


def summed_rows(ptr: NDArray[np.integer], lists: NDArray[np.integer], row: int) -> NDArray[np.integer]:
    """The rows whose sum `row` is, as `ops.sum_rows` says."""
    pair = lists[2 * row : 2 * row + 2]
    return np.concatenate([pair[pair >= 0], lists[ptr[row] : ptr[row + 1]]])


def sum_rows(x: NDArray[np.float64], ptr: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """Row i: the sum of x at its rows (`sum_lists`). Also checks that these ascend."""
    summed = [summed_rows(ptr, rows, i) for i in range(len(ptr) - 1)]
    assert all((np.diff(members) > 0).all() for members in summed)
    return np.array([x[members].sum() for members in summed])


def play(exchange: str, routes: list[Tables], local: NDArray[np.float64], grads: list[NDArray[np.float64]]) -> Moved:
    """(what each rank gathers, what each rank's local rows get back) when rows move as `exchange` says."""
    ranks, size = local.shape
    if exchange == "needed":
        return play_needed(routes, local, grads)
    gathered = [local.reshape(-1)[route["kv_rows"]] for route in routes]
    sums = [sum_rows(grad, route["sum_ptr"], route["sum_rows"]) for grad, route in zip(grads, routes, strict=True)]
    return gathered, list(np.stack(sums).reshape(ranks, ranks, size).sum(0))


def play_needed(routes: list[Tables], local: NDArray[np.float64], grads: list[NDArray[np.float64]]) -> Moved:
    ranks, size = local.shape
    splits = np.stack([route["splits"] for route in routes])
    assert (splits[:, 0] == splits[:, 1].T).all()

    def blocks(counts: Int, rows: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        return np.split(rows[: counts.sum()], np.cumsum(counts)[:-1])

    sent = [blocks(splits[r, 0], local[r][routes[r]["send_rows"]]) for r in range(ranks)]
    received = [np.concatenate([sent[peer][rank] for peer in range(ranks)]) for rank in range(ranks)]
    gathered = [np.concatenate([local[r], received[r]])[routes[r]["kv_rows"]] for r in range(ranks)]
    sums = [sum_rows(grad, route["sum_ptr"], route["sum_rows"]) for grad, route in zip(grads, routes, strict=True)]
    home = [blocks(splits[r, 1], sums[r][size:]) for r in range(ranks)]
    back: list[NDArray[np.float64]] = []
    for rank in range(ranks):
        returned = np.concatenate([home[peer][rank] for peer in range(ranks)])
        merged = np.concatenate([sums[rank][:size], returned])
        back.append(sum_rows(merged, routes[rank]["return_ptr"], routes[rank]["return_rows"]))
    return gathered, back


@drawn(300)
@given(
    batches(), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS), st.sampled_from(("local", "all_gather", "needed"))
)
def test_routes_move_rows_there_and_gradients_back(
    rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str, exchange: str
):
    world_size = 1 if exchange == "local" else world_size
    plan = plan_batch(rows, world_size, layout, mask)
    schedule, where = plan.schedule(mask), global_rows(plan)
    tables = [schedule.attention(rank) for rank in range(world_size)]
    routes = [ROUTES[exchange].arrays(schedule, rank) for rank in range(world_size)]
    assert all(len(array) >= 2 for table in (*tables, *routes) for array in table.values())
    keys = [expanded_keys(table, where[rank], rows, mask) for rank, table in enumerate(tables)]
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(len(k)) for k in keys]
    local = np.where(where < 0, np.nan, where.astype(np.float64))  # padding must never be read
    gathered, back = play(exchange, routes, local, grads)
    dense = np.zeros(len(rows) * rows[0].total)
    for rank in range(world_size):
        np.testing.assert_array_equal(gathered[rank][: len(keys[rank])], keys[rank])
        np.add.at(dense, keys[rank], grads[rank])
    for rank in range(world_size):
        owned = where[rank] >= 0
        np.testing.assert_allclose(back[rank][owned], dense[where[rank][owned]], atol=1e-12)
        assert (back[rank][~owned] == 0).all()


def expanded_keys(table: Tables, where: Int, rows: tuple[Documents, ...], mask: PackedMask) -> Int:
    """Flat global row of each expanded row, worked out from the pieces' queries alone."""
    total = rows[0].total
    keys: list[Int] = []
    for q0, q1, k0, k1 in table["pieces"][:, :4].tolist():
        if q0 == q1:
            continue
        b, first = divmod(int(where[q0]), total)
        last = int(where[q1 - 1]) % total
        keep = mask.materialize(rows[b])[first : last + 1].any(axis=0)
        span = np.flatnonzero(keep)
        assert len(span) == k1 - k0
        assert mask.tree or k1 - k0 == span[-1] - span[0] + 1
        keys.append(span + b * total)
    return np.concatenate(keys) if keys else np.zeros(0, dtype=np.int64)


@drawn(60)
@given(batches(), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_received_counts_what_needed_moves(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    schedule = plan_batch(rows, world_size, layout, mask).schedule(mask)
    splits = [needed_route(schedule, rank)["splits"] for rank in range(world_size)]
    np.testing.assert_array_equal(schedule.received, np.stack(splits)[:, 1])


def test_a_window_that_the_document_end_clips_has_its_own_launch():
    rows = (Documents.from_lengths([40, 24]),)
    mask = PackedMask(causal=False, window=(6, 6))
    table = plan_batch(rows, 2, "contiguous").schedule(mask).attention(0)
    # Tokens [0, 32) of the first document: the window of the last queries ends at token 38, inside the document.
    assert table["pieces"][0].tolist() == [0, 32, 0, 38, 12, 0, 0]
    table = plan_batch((Documents.from_lengths([34, 30]),), 2, "contiguous").schedule(mask).attention(0)
    # Now the document ends at 34: queries [28, 32) see keys [22, 34) and need (6 + 2, no limit).
    assert table["pieces"].tolist() == [[0, 28, 0, 34, 12, 0, 0], [28, 32, 34, 46, 8, -1, 1]]
    assert table["launches"].tolist() == [[12, 0, 28, 34], [8, -1, 4, 12]]


def test_a_piece_that_sees_all_its_keys_shares_the_launch_of_whole_documents():
    mask = PackedMask(causal=False, window=(6, 6))
    # Rank 0 has the start of a document of 6 tokens, all of which its queries see.
    table = plan_batch((Documents.from_lengths([6, 2]),), 2, "contiguous").schedule(mask)
    assert [table.attention(rank)["pieces"][:, 4:].tolist() for rank in range(2)] == [
        [[6, 6, 0], [0, 0, 0]],
        [[6, 6, 0], [6, 6, 0]],
    ]
    # Of a document of 8, queries 2 and 3 see all keys, which (6, 6) would not let the last query do.
    rows = (Documents.from_lengths([8]),)
    table = plan_batch(rows, 2, "contiguous").schedule(mask).attention(0)
    assert table["pieces"][0].tolist() == [2, 4, 0, 8, -1, -1, 0]
    table = plan_batch(rows, 2, "contiguous").schedule(PackedMask(causal=False, window=(None, 6))).attention(0)
    assert [2, 4, -1, 6] in table["pieces"][:, [0, 1, 4, 5]].tolist()


def test_the_local_route_is_for_one_rank():
    schedule = plan_batch((Documents.from_lengths([8]),), 2).schedule(PackedMask())
    with pytest.raises(ValueError, match="one rank"):
        local_route(schedule, 0)
