"""Local rows of tokens of the whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.library import opcheck

from cp_rewrite.documents import Documents
from cp_rewrite.ops.local_rows import local_rows
from cp_rewrite.planning.batch_plan import plan_batch

ops: Any = torch.ops.cp_rewrite  # opcheck takes the overload
TABLE_TB = torch.tensor([[0, -1], [-1, 0], [1, 1]])
INSIDE_TB = torch.tensor([[True, True], [True, True], [True, False]])


def test_rows_are_found_by_row_of_the_batch_or_through_all() -> None:
    token, row = torch.tensor([0, -1, 1]), torch.tensor([0, 1, 0])
    assert local_rows(TABLE_TB, token, row, None, 2).tolist() == [0, 1, -1]
    # tokens 0 1 2 of row 0, then 3 4 5 of row 1, whose local rows follow those of row 0
    assert local_rows(TABLE_TB, torch.tensor([2, 4, -1, 3]), None, None, 2).tolist() == [1, 2, 3, -1]
    opcheck(ops.local_rows.default, (TABLE_TB, token, row, None, 2), test_utils="test_schema")
    opcheck(ops.local_rows.default, (TABLE_TB, token, row, torch.ones_like(INSIDE_TB), 2), test_utils="test_faketensor")


def test_tokens_that_are_none_are_errors() -> None:
    row = torch.zeros(1, dtype=torch.int64)
    for token, given in ((6, None), (-7, None), (3, row)):
        with pytest.raises(IndexError):
            local_rows(TABLE_TB, torch.tensor([token]), given, None, 2)
    with pytest.raises(ValueError, match="a token of no document"):
        local_rows(TABLE_TB, torch.tensor([2]), row + 1, INSIDE_TB, 2)


def test_the_table_of_a_plan_undoes_its_indices() -> None:
    plan = plan_batch([Documents.from_lengths(lengths) for lengths in ([5, 3, 5], [2, 11])], 3)
    for rank in range(3):
        indices, rows = plan.local_indices(rank), plan.local_rows(rank)
        for i, row in enumerate(indices):
            owned = row[row >= 0]
            assert (rows[i][owned] == np.nonzero(row >= 0)[0]).all()
            assert (np.delete(rows[i], owned) == -1).all()
