"""Tables of recurrent states: what travels, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from cp_rewrite.capacity import Capacity
from cp_rewrite.documents import Documents
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.intervals import CHUNK, chunk_rows, level_major
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan_input import STATES, States
from cp_rewrite.planning.states import run_tables, state_tables


def splits_of(plan: BatchPlan, read: States, name: str = "splits") -> list[list[int]]:
    """Summaries that each rank sends to each."""
    tables = [state_tables(plan, read, rank)[name] for rank in range(plan.world_size)]
    assert np.array_equal(np.stack([table[0] for table in tables]), np.stack([table[1] for table in tables]).T)
    return [table[0].tolist() for table in tables]


def test_only_documents_that_are_cut_send_and_only_to_ranks_that_have_later_pieces() -> None:
    whole = plan_batch([Documents.from_lengths([10, 10, 10])], 3, "contiguous")
    assert splits_of(whole, States(True)) == splits_of(whole, States(True), "splits_back") == [[0] * 3] * 3
    assert splits_of(whole, States(False)) == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert splits_of(whole, States(False), "splits_back") == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    cut = plan_batch([Documents.from_lengths([5, 20, 5])], 3, "contiguous")
    assert splits_of(cut, States(True)) == splits_of(cut, States(False))
    ends = plan_batch([Documents.from_lengths([12])], 2, "head_tail")  # rank 0 has the first and the last quarter
    assert splits_of(ends, States(True)) == [[0, 1], [1, 0]]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_chunks_hold_every_row_once_and_none_of_no_sequence(layout: str) -> None:
    plan = plan_batch([Documents.from_lengths([3, 0, 200, 1], 217), Documents.from_lengths([150], 217)], 4, layout)
    for rank in range(4):
        held = plan.local_indices(rank)
        inside = np.stack([row.document_ids()[tokens] for row, tokens in zip(plan.rows, held, strict=True)])
        inside[held < 0] = -1
        for read in (States(True), States(False, apart=True)):
            tables = state_tables(plan, read, rank)
            rows = tables["chunk_rows"]
            assert sorted(rows[rows >= 0]) == list(np.flatnonzero(inside.reshape(-1) >= 0))
            assert tables["chunk_levels"].sum() * CHUNK == len(rows)
            assert set(tables) == {tensor.name for tensor in STATES}
            assert all(len(table) >= 2 for table in tables.values())


def test_runs_take_in_every_row_and_know_which_are_cut() -> None:
    plan = plan_batch([Documents.from_lengths([5, 20, 5], 31)], 3, "contiguous")
    tables = [state_tables(plan, States(True), rank) for rank in range(3)]
    assert [table["runs"].tolist() for table in tables] == [
        [[0, 5, -1, -1], [5, 11, -1, 0]],
        [[0, 11, 0, 0], [11, 11, -2, -2]],
        [[0, 3, 0, -1], [3, 8, -1, -1], [8, 11, -2, -2]],
    ]
    assert [table["run_states"].tolist() for table in tables] == [[2, 0], [0, 2], [0, 2, 2]]
    assert [table["run_offsets"].tolist() for table in tables] == [[0, 5, 11], [0, 11, 11], [0, 3, 8, 11]]
    long = run_tables(np.array([70]), np.array([130]), np.array([-1]), np.array([-1]), 200, 0)
    assert long["run_chunks"].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]


def test_levels_are_ordered_by_number_and_then_by_chain() -> None:
    levels, chain, level = level_major(np.array([3, 2, 1]))
    assert (levels.tolist(), chain.tolist(), level.tolist()) == ([3, 2, 1], [0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2])
    rows, levels = chunk_rows(np.array([5, 200]), np.array([70, 2]))
    assert levels.tolist() == [2, 1]
    assert [row[row >= 0].tolist() for row in rows] == [[*range(5, 69)], [200, 201], [*range(69, 75)]]


def test_padding_that_attention_gave_does_not_go_into_a_state() -> None:
    padded = plan_batch([Documents(np.array([0, 6]), np.array([4, 6]), 14)], 2, "contiguous")
    with pytest.raises(ValueError, match="carries padding into a document"):
        state_tables(padded, States(False, apart=True), 0)
    for read in (States(False), States(True, apart=True)):
        state_tables(padded, read, 0)
    behind = plan_batch([Documents.from_lengths([6, 4], 14)], 2, "contiguous")
    state_tables(behind, States(False, apart=True), 0)


def test_a_capacity_is_refused() -> None:
    plan = plan_batch([Documents.from_lengths([9])], 1)
    with pytest.raises(ValueError, match="takes no capacity"):
        state_tables(plan, States(True), 0, Capacity(9, 9, 9))
