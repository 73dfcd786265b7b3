"""The tables of running operations: followed by hand on all ranks, they give the running sum of the row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cp_rewrite.capacity import Capacity
from cp_rewrite.documents import Documents
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan_input import Scan
from cp_rewrite.planning.reads import scan_tables


def values(plan: BatchPlan, rank: int) -> np.ndarray:
    """(B T_l,) a number for each local row, that of its token; of fill a large one."""
    indices = plan.local_indices(rank)
    token = indices + plan.rows[0].total * np.arange(len(indices))[:, None]
    return np.where(indices >= 0, token**2 + 1, 10**6).reshape(-1)


def followed(plan: BatchPlan, scan: Scan, capacity: Capacity | None) -> list[np.ndarray]:
    """The running sums that each rank has in the end, (B T_l,)."""
    tables = [scan_tables(plan, scan, rank, capacity) for rank in range(plan.world_size)]
    assert capacity is None or all(len(t["scan_ends"]) % capacity.pieces == 0 for t in tables)
    lines = 1 if scan.joined else len(plan.rows)
    own = [values(plan, r)[t["scan_order"].reshape(lines, -1)].cumsum(1).reshape(-1) for r, t in enumerate(tables)]
    reached = np.concatenate([x[t["scan_ends"]] for x, t in zip(own, tables, strict=True)])
    found: list[np.ndarray] = []
    for x, t in zip(own, tables, strict=True):
        before = np.where(t["scan_before"] >= 0, reached[t["scan_before"]], 0).sum(1)
        found.append(x[t["scan_place"].reshape(-1)] + before[t["scan_piece"].reshape(-1)])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_give_the_rows_running_sum(layout: str, ranks: int) -> None:
    for lengths in ([[7]], [[5, 4, 5], [2, 11, 1]], [[1] * 13, [13]], [[1], [1]]):
        plan = plan_batch([Documents.from_lengths(row) for row in lengths], ranks, layout)
        total, rows = plan.rows[0].total, len(plan.rows)
        token = np.arange(rows * total).reshape(rows, total)
        for joined in (False, True):
            expected = (token**2 + 1).reshape(-1 if joined else rows, *[total] * (not joined)).cumsum(-1)
            expected = expected.reshape(rows, total)
            for rank, found in enumerate(followed(plan, Scan(joined), Capacity(9, 20, 9) if ranks > 1 else None)):
                there, filled = plan.local_indices(rank) >= 0, plan.filled_indices(rank)
                wanted = np.take_along_axis(expected, filled, 1)
                held = there | (np.take_along_axis(plan.local_rows(rank), filled, 1) >= 0)
                assert (found.reshape(there.shape) == wanted)[held].all()


def test_padding_before_a_document_is_an_error_where_attention_gave_its_values() -> None:
    gap = Documents(np.array([0, 9]), np.array([4, 5]), 14)
    end = Documents.from_lengths([4, 5], 14)
    for rows, joined, wrong in itertools.product(((gap,), (end,), (end, end)), (False, True), (False, True)):
        plan = plan_batch(rows, 2)
        behind = rows[0] is gap or (joined and len(rows) > 1)
        if behind and wrong:
            with pytest.raises(ValueError, match="carries padding into a document"):
                scan_tables(plan, Scan(joined, apart=wrong), 0)
        else:
            scan_tables(plan, Scan(joined, apart=wrong), 0)
