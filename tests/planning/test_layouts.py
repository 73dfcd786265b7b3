"""Token orders: every token has one owner, whatever the documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.layouts import balanced as layouts
from cp_rewrite.planning.layouts.by_name import lay_out
from cp_rewrite.planning.layouts.options import LayoutOptions
from cp_rewrite.planning.layouts.simple import (
    contiguous,
    dual_chunk,
    even_contiguous,
    even_dual_chunk,
    even_head_tail,
)
from cp_rewrite.planning.layouts.token_order import TokenOrder
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan import plan
from tests import AS_SHORT
from tests.helpers.amount import drawn
from tests.helpers.packs import batches, grown, masks


def order_of(lengths: list[int], world_size: int, layout: str, total: int | None = None) -> TokenOrder:
    return lay_out(Documents.from_lengths(lengths, total), world_size, layout, PackedMask())


@drawn(150)
@given(batches(max_rows=1, max_total=300), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_every_token_has_one_owner(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    order = lay_out(rows[0], world_size, layout, mask)
    assert order.world_size == world_size
    owned = [order.local_indices(rank) for rank in range(world_size)]
    for rank, local in enumerate(owned):
        assert len(local) == order.local_size
        real = local[: order.sizes[rank]]
        assert layout == "balanced" or (np.diff(real) > 0).all()
        assert (local[order.sizes[rank] :] == -1).all()
        assert (order.rank_of()[real] == rank).all()
        intervals = order.intervals[rank]
        assert (intervals[:, 0] < intervals[:, 1]).all()
        assert (intervals[1:, 0] != intervals[:-1, 1]).all()
    everyone = np.concatenate(owned)
    np.testing.assert_array_equal(np.sort(everyone[everyone >= 0]), np.arange(rows[0].total))
    assert order.fill_rows == (everyone < 0).sum()


@drawn(150)
@given(batches(max_rows=1, max_total=300), masks(), st.integers(1, 8))
def test_balanced_gives_equal_tokens(rows: tuple[Documents, ...], mask: PackedMask, world_size: int):
    order = lay_out(rows[0], world_size, "balanced", mask)
    assert order.local_size == -(-rows[0].total // world_size)


def inner_cuts(order: TokenOrder, documents: Documents, packed: bool) -> list[int]:
    """Every cut inside a document, in tokens from the document's start."""
    spans = list(zip(documents.starts.tolist(), documents.ends.tolist(), strict=True))
    spans = spans if packed else [(0, documents.total)]
    return [cut - a for cut in order.segments[0].tolist() for a, b in spans if a < cut < b]


@drawn(150)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(0, 40),
    masks(),
    st.integers(1, 8),
    st.integers(1, 200),
    st.sampled_from(LAYOUTS),
)
def test_cuts_fall_on_chunks(
    chunks: list[tuple[int, int]], short: int, mask: PackedMask, world_size: int, chunk_size: int, layout: str
):
    """Documents of whole chunks with whole chunks of padding after them; a few tokens are missing at the end."""
    sizes = np.array(chunks, dtype=np.int64) * chunk_size
    starts = np.cumsum(sizes.sum(1)) - sizes.sum(1)
    total = max(1, int(sizes.sum()) - short % chunk_size)
    lengths = np.clip(total - starts, 0, sizes[:, 0])
    documents = grown(Documents(np.minimum(starts, total), lengths, total), 0)
    order = lay_out(documents, world_size, layout, mask, LayoutOptions(chunk_size, 2 * chunk_size))
    assert all(cut % chunk_size == 0 for cut in inner_cuts(order, documents, mask.packed))
    assert order.rank_of().shape == (total,)
    if layout == "balanced":
        whole = -(-total // (world_size * chunk_size)) * chunk_size
        assert order.sizes.max() <= whole
        assert order.local_size == -(-whole // (2 * chunk_size)) * 2 * chunk_size


@drawn(100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 64), masks())
def test_chunks_with_exactly_equal_tokens(chunks: list[int], world_size: int, chunk_size: int, mask: PackedMask):
    rest = -sum(chunks) % world_size
    documents = grown(Documents.from_lengths(np.array([*chunks, rest]) * chunk_size), 0)
    order = lay_out(documents, world_size, "balanced", mask, LayoutOptions(chunk_size))
    assert order.sizes.tolist() == [documents.total // world_size] * world_size
    assert all(cut % chunk_size == 0 for cut in inner_cuts(order, documents, mask.packed))


@drawn(100)
@given(batches(max_rows=1, max_total=300), st.integers(1, 8), st.integers(1, 70), st.sampled_from(LAYOUTS))
def test_ranks_are_padded_to_a_multiple(rows: tuple[Documents, ...], world_size: int, multiple: int, layout: str):
    plain = lay_out(rows[0], world_size, layout, PackedMask())
    order = lay_out(rows[0], world_size, layout, PackedMask(), LayoutOptions(pad_to_multiple=multiple))
    assert order.local_size == -(-plain.local_size // multiple) * multiple
    assert order.fill_rows == world_size * order.local_size - rows[0].total
    for rank in range(world_size):
        local = order.local_indices(rank)
        np.testing.assert_array_equal(local[: plain.local_size], plain.local_indices(rank))
        assert (local[plain.local_size :] == -1).all()


def test_chunks_that_cannot_be_had():
    with pytest.raises(ValueError, match="document 1 starts at token 100; pad the documents before it"):
        lay_out(Documents.from_lengths([100, 28]), 2, "contiguous", PackedMask(), LayoutOptions(64))
    with pytest.raises(ValueError, match="are 96 rows each, but whole chunks of 64 need 128"):
        lay_out(Documents.from_lengths([192]), 2, "balanced", PackedMask(), LayoutOptions(64))
    order = lay_out(Documents.from_lengths([192]), 2, "balanced", PackedMask(), LayoutOptions(64, 64))
    assert sorted(order.sizes.tolist()) == [64, 128]
    for name in ("chunk_size", "pad_to_multiple"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            LayoutOptions(**{name: 0})  # type: ignore[arg-type]


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


def test_even_dual_chunk_deals_what_is_left_over():
    order = even_dual_chunk(np.array([0, 7, 12]), 2)
    assert order.rank_of().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 6), st.integers(1, 5), st.integers(0, 4))
def test_even_dual_chunk_is_even(sizes: list[int], ranks: int, unit: int, short: int):
    spans = np.concatenate([[0], np.cumsum(np.array(sizes) * unit)])
    whole = even_dual_chunk(spans, ranks, unit)
    units = sum(sizes)
    assert (whole.sizes // unit).tolist() == [units // ranks + (rank < units % ranks) for rank in range(ranks)]
    assert (whole.segments[0] % unit == 0).all()
    if all(size % (2 * ranks) == 0 for size in sizes):
        np.testing.assert_array_equal(whole.rank_of(), dual_chunk(spans, ranks).rank_of())
    if sizes[-1]:
        spans[-1] -= short % unit
        clipped = even_dual_chunk(spans, ranks, unit)
        np.testing.assert_array_equal(clipped.rank_of(), whole.rank_of()[: spans[-1]])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_even_contiguous_and_head_tail_are_even(sizes: list[int], ranks: int, unit: int, near: bool):
    spans = np.concatenate([[0], np.cumsum(np.array(sizes) * unit)])
    units, total = sum(sizes), int(spans[-1])
    fair = sorted(units // ranks + (rank < units % ranks) for rank in range(ranks))
    row, ends = even_contiguous(total, ranks, unit), even_head_tail(spans, ranks, unit, near=near)
    for order in (row, ends):
        assert sorted((order.sizes // unit).tolist()) == fair
        assert (order.segments[0] % unit == 0).all()
    assert (np.diff(row.rank_of()) >= 0).all()
    if units % (2 * ranks) == 0:
        np.testing.assert_array_equal(row.rank_of(), contiguous(total, ranks).rank_of())
        plain = even_head_tail(spans, ranks, unit)
        np.testing.assert_array_equal(plain.rank_of(), dual_chunk(np.array([0, total]), ranks).rank_of())


def test_even_head_tail_cuts_between_documents_that_are_near():
    spans = np.array([0, 5, 14])
    assert even_head_tail(spans, 2).rank_of().tolist() == [0] * 4 + [1] * 7 + [0] * 3
    assert even_head_tail(spans, 2, near=True).rank_of().tolist() == [0] * 5 + [1] * 7 + [0] * 2
    far = np.array([0, 6, 14])
    np.testing.assert_array_equal(even_head_tail(far, 2, near=True).rank_of(), even_head_tail(far, 2).rank_of())


def test_dual_chunk_works_on_padded_documents():
    documents = Documents.from_cu_seqlens([0, 5, 12], 16, [0, 8, 16])
    order = lay_out(documents, 2, "dual_chunk", PackedMask())
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


@pytest.mark.parametrize("local", [130, 300, 512, 1000, 2000, 4000, 6000, 8192])
def test_short_rows_lose_little_by_fewer_trials(local: int, monkeypatch: pytest.MonkeyPatch):
    """Seconds of whole layers of 8,192 columns: attention is a small part of them there."""

    def seconds() -> float:
        rng, found = np.random.default_rng(7), 3 * 3 * 24 * 8192**2 * local / 500e12
        for ranks in (2, 5, 8):
            lengths = rng.integers(1, local * ranks // 3, 200).cumsum()
            kept = np.diff(lengths[lengths < local * ranks], prepend=0, append=local * ranks)
            found += min(plan(kept.tolist(), ranks, heads=(64, 8)).seconds.values())
        return found

    slow = seconds()
    for name, tokens in AS_SHORT.items():
        monkeypatch.setattr(layouts, name, tokens)
    assert seconds() <= 1.02 * slow
