"""Token orders: every token has one owner, whatever the documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.layouts import LAYOUTS, TokenOrder, dual_chunk, order_tokens
from cp_rewrite.masks import PackedMask

from .packs import batches, masks


def order_of(lengths: list[int], world_size: int, layout: str, total: int | None = None) -> TokenOrder:
    return order_tokens(Documents.from_lengths(lengths, total), world_size, layout, PackedMask())


@settings(max_examples=300)
@given(batches(max_rows=1, max_total=300), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_every_token_has_one_owner(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    order = order_tokens(rows[0], world_size, layout, mask)
    assert order.world_size == world_size
    owned = [order.local_indices(rank) for rank in range(world_size)]
    for rank, local in enumerate(owned):
        assert len(local) == order.local_size
        real = local[: order.sizes[rank]]
        assert (np.diff(real) > 0).all()
        assert (local[order.sizes[rank] :] == -1).all()
        assert (order.rank_of()[real] == rank).all()
        intervals = order.intervals[rank]
        assert (intervals[:, 0] < intervals[:, 1]).all()
        assert (intervals[1:, 0] > intervals[:-1, 1]).all()
    everyone = np.concatenate(owned)
    np.testing.assert_array_equal(np.sort(everyone[everyone >= 0]), np.arange(rows[0].total))
    assert order.padding_rows == (everyone < 0).sum()


@settings(max_examples=200)
@given(batches(max_rows=1, max_total=300), masks(), st.integers(1, 8))
def test_balanced_gives_equal_tokens(rows: tuple[Documents, ...], mask: PackedMask, world_size: int):
    order = order_tokens(rows[0], world_size, "balanced", mask)
    assert order.local_size == -(-rows[0].total // world_size)


def test_contiguous_pads_the_last_rank():
    order = order_of([10], 4, "contiguous")
    assert [part.tolist() for part in order.intervals] == [[[0, 3]], [[3, 6]], [[6, 9]], [[9, 10]]]
    assert order.local_indices(3).tolist() == [9, -1, -1]


def test_head_tail_chunks_the_row():
    order = order_of([5, 3], 2, "head_tail")
    assert [order.local_indices(rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_dual_chunk_is_the_order_of_data_pipelines():
    order = dual_chunk(np.array([0, 8, 16]), 2)
    assert order.local_indices(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert order.local_indices(1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 5))
def test_dual_chunk_by_its_formula(sizes: list[int], ranks: int):
    spans = np.concatenate([[0], np.cumsum(np.array(sizes) * 2 * ranks)])
    order = dual_chunk(spans, ranks)
    for rank in range(ranks):
        rows: list[int] = []
        for start, stop in zip(spans[:-1].tolist(), spans[1:].tolist(), strict=True):
            length = (stop - start) // ranks
            half = length // 2
            rows += [start + t + half * (rank if t < half else 2 * (ranks - 1) - rank) for t in range(length)]
        assert order.local_indices(rank).tolist() == rows


def test_dual_chunk_of_any_length_shortens_the_last_chunks():
    order = dual_chunk(np.array([0, 7]), 2)  # chunks [0, 2) [2, 4) [4, 6) [6, 7)
    assert order.local_indices(0).tolist() == [0, 1, 6, -1]
    assert order.local_indices(1).tolist() == [2, 3, 4, 5]


def test_dual_chunk_works_on_padded_documents():
    documents = Documents.from_cu_seqlens([0, 5, 12], 16, [0, 8, 16])
    order = order_tokens(documents, 2, "dual_chunk", PackedMask())
    assert order.local_indices(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]


def test_fewer_tokens_than_ranks():
    for layout in LAYOUTS:
        order = order_of([2], 4, layout)
        assert order.local_size <= 2
        assert sorted(order.sizes.tolist())[-1] >= 1


def test_bad_arguments_name_the_choices():
    with pytest.raises(ValueError, match="contiguous, head_tail, dual_chunk, balanced"):
        order_of([4], 2, "zigzag")
    with pytest.raises(ValueError, match="world_size must be >= 1"):
        order_of([4], 0, "contiguous")
