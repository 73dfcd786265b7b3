"""Documents of a row, read from what batches carry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite import PackedMask
from cp_rewrite.documents import Documents
from tests.helpers.packs import batches


def naive_ids(documents: Documents) -> list[int]:
    ids = [-1] * documents.total
    for i, (start, length) in enumerate(zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)):
        ids[start : start + length] = [i] * length
    return ids


@given(batches(max_rows=1))
def test_document_ids_and_spans(rows: tuple[Documents, ...]):
    documents = rows[0]
    assert documents.document_ids().tolist() == naive_ids(documents)
    spans = documents.bounds
    assert len(spans) == max(1, len(documents.lengths)) + 1
    assert (spans[0], spans[-1]) == (0, documents.total)
    assert (np.diff(spans) >= 0).all()
    assert (spans[1:-1] == documents.starts[1:]).all()


@given(batches(max_rows=1))
def test_every_source_tells_the_same(rows: tuple[Documents, ...]):
    documents = rows[0]
    real = documents.lengths > 0
    by_ids = Documents.from_document_ids(documents.document_ids())
    assert by_ids.starts.tolist() == documents.starts[real].tolist()
    assert by_ids.lengths.tolist() == documents.lengths[real].tolist()
    cu = np.concatenate([[0], np.cumsum(documents.lengths)])
    padded = np.append(documents.starts, documents.total)
    if len(documents.starts) and documents.starts[0] == 0:
        by_cu = Documents.from_cu_seqlens(cu, documents.total, padded)
        assert by_cu.document_ids().tolist() == documents.document_ids().tolist()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_position_ids(lengths: list[int]):
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert Documents.from_position_ids(positions).lengths.tolist() == lengths


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 9), st.booleans())
def test_rows_that_begin_inside_of_a_document(lengths: list[int], before: int, of_row: bool):
    positions = np.concatenate([np.arange(length) for length in [lengths[0] + before, *lengths[1:]]])
    documents = Documents.from_position_ids(positions[before:])
    assert documents.lengths.tolist() == lengths
    assert documents.before == before
    chunks = np.arange(sum(lengths)) // 4 if of_row else positions[before:] // 4
    same = documents.document_ids()[:, None] == documents.document_ids()
    expected = same & (chunks[:, None] == chunks) & np.tril(np.ones(same.shape, dtype=np.bool_))
    seen = PackedMask(chunk=4, chunk_of="row" if of_row else "document").materialize(documents)
    assert (seen == expected).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_tokens_that_end_or_start_documents(lengths: list[int]):
    first = np.concatenate([np.arange(length) == 0 for length in lengths])
    last = np.append(first[1:], False)  # the row's end needs none
    assert Documents.from_end_tokens(np.where(last, 2, 5), 2).lengths.tolist() == lengths
    assert Documents.from_start_tokens(np.where(first, 2, 5), 2).lengths.tolist() == lengths


def test_ids_up_to_the_padding_value_are_padding():
    documents = Documents.from_document_ids([-1, 1, 1, 0, 0, 2, 0], padding=0)
    assert documents.document_ids().tolist() == [-1, 0, 0, -1, -1, 1, -1]


def test_lengths_leave_tail_padding():
    documents = Documents.from_lengths([3, 0, 2], 8)
    assert documents.ends.tolist() == [3, 3, 5]
    assert documents.document_ids().tolist() == [0, 0, 0, 2, 2, -1, -1, -1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents.from_lengths([3, -1]), "lengths must be >= 0"),
        (lambda: Documents.from_lengths([3, 3], 5), "sum to 6 tokens, but the row has 5"),
        (lambda: Documents(np.array([0, 2]), np.array([3, 1]), 9), "document 0 holds"),
        (lambda: Documents(np.array([0]), np.array([3]), 2), "end of the row is at 2"),
        (lambda: Documents(np.array([0]), np.array([3, 4]), 9), "equal 1-d shapes"),
        (lambda: Documents.from_cu_seqlens([1, 4], 4), "start at 0"),
        (lambda: Documents.from_cu_seqlens([0, 4, 3], 4), "never decrease"),
        (lambda: Documents.from_cu_seqlens([0, 4], 8, [0, 4, 8]), "3 entries, cu_seqlens has 2"),
        (lambda: Documents.from_position_ids([0, 1, 5, 6]), "jump to 5 at token 2"),
        (lambda: Documents.from_position_ids([0, 1, 2, 1, 1]), "1 from there to the end is padding: .*PaddingMask"),
        (lambda: Documents.from_position_ids([0, 1, 0, -1, -1]), "-1 from there to the end is padding"),
        (lambda: Documents.from_position_ids([2, 3, 4, 1, 1]), "1 from there to the end is padding"),
        (lambda: Documents.from_position_ids([3, 3, 4, 4]), "numbers of documents"),
        (lambda: Documents.from_position_ids([2, 3, 4, 2, 3]), r"begin at 2 in each document: .* WholeRows\(\)"),
        (lambda: Documents.from_position_ids([0, 0, 1, 1, 3, 3]), "are packing=DocumentIds"),
        (lambda: Documents.from_document_ids([0, 0, 1, 0]), "2 separate runs"),
        (lambda: Documents.from_document_ids([0.0, 0.5]), "document ids must be whole numbers, got float64"),
        (lambda: Documents.from_document_ids([0, 2**31]), "go up to 2147483647, got 2147483648"),
        (lambda: Documents.from_position_ids([[0, 1], [0, 1]]), r"position_ids must be a list of numbers, .* \(2, 2\)"),
        (lambda: Documents.from_cu_seqlens([0, 3, 6], 8, [0, 4, 9]), "cu_seqlens_padded ends at token 9, .* has 8"),
    ],
)
def test_refuses_what_is_no_packing(make: Callable[[], Documents], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
