"""Masks of a batch, compared with its documents on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import cp_rewrite as cp
from cp_rewrite.batch import masks
from cp_rewrite.batch.masks import mask_argument

TOKENS = {"input_ids": 1, "doc_ids": 1}


def sharding(**options: Any) -> cp.Sharding:
    return cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), layout="contiguous", **options)


def batch(mask: Any, *rows: list[int]) -> dict[str, Any]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "doc_ids": ids, "mask": mask}


def keep(documents: cp.Documents, mask: cp.PackedMask) -> Tensor:
    return torch.from_numpy(mask.materialize(documents))


ROW = [0, 0, 0, 1, 1, -1, 2, 2]
DOCUMENTS = cp.Documents.from_document_ids(ROW)


def test_a_rank_gets_what_no_one_can_read() -> None:
    added = torch.zeros(1, 1, 8, 8).masked_fill(~keep(DOCUMENTS, cp.PackedMask()), -torch.inf)
    with sharding().shard(batch(added, ROW)) as local:
        assert local["mask"].shape == (1, 1, 4, 4)
        assert local["mask"].isnan().all()
        found = mask_argument(local["mask"])
        assert found is not None
        assert (found.name, found.mask, found.kind) == ("mask", cp.PackedMask(), "adds")


def test_queries_of_padding_may_see_anything() -> None:
    mask = keep(DOCUMENTS, cp.PackedMask())
    mask[5] = True
    with sharding().shard(batch(mask, ROW)):
        pass
    mask[6, 5] = True
    with pytest.raises(cp.MaskMismatch, match="lets query 6 see key 5 in row 0"), sharding().shard(batch(mask, ROW)):
        pass


def test_rows_may_share_a_mask_where_their_documents_are_the_same() -> None:
    mask = keep(DOCUMENTS, cp.PackedMask())[None]
    with sharding().shard(batch(mask, ROW, ROW)):
        pass
    other = [0, 0, 1, 1, 1, -1, 2, 2]
    with pytest.raises(cp.MaskMismatch, match="row 1"), sharding().shard(batch(mask, ROW, other)):
        pass


@pytest.mark.parametrize("values", [torch.rand(8, 8), torch.full((8, 8), -100.0), torch.full((8, 8), 3)])
def test_what_holds_other_numbers_is_no_mask(values: Tensor) -> None:
    with sharding().shard(batch(values, ROW)) as local:
        assert local["mask"] is values
    named = sharding(masks={"mask": cp.PackedMask()})
    with pytest.raises(ValueError, match="holds other numbers"), named.shard(batch(values, ROW)):
        pass


def test_a_table_of_flags_that_is_no_mask() -> None:
    table = torch.eye(8, dtype=torch.bool)
    with pytest.raises(cp.MaskMismatch, match="None, if it is no mask"), sharding().shard(batch(table, ROW)):
        pass
    with sharding(masks={"mask": None}).shard(batch(table, ROW)) as local:
        assert local["mask"] is table


def test_annotations_of_masks() -> None:
    with pytest.raises(TypeError, match=r"masks\['mask'\] must be a cp_rewrite.PackedMask"):
        sharding(masks={"mask": "causal"})
    with pytest.raises(ValueError, match="leave it out of tokens"):
        sharding(masks={"doc_ids": cp.PackedMask()})
    with (
        pytest.raises(ValueError, match=r"must be \(T, T\)"),
        sharding(masks={"mask": cp.PackedMask()}).shard(batch(torch.ones(1, 8), ROW)),
    ):
        pass


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
windows = st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(0, 6)))


@st.composite
def rows_and_masks(draw: st.DrawFn) -> tuple[cp.Documents, cp.PackedMask]:
    """A row with padding at its end, and a mask."""
    row = draw(lengths)
    documents = cp.Documents.from_lengths(row, sum(row) + draw(st.integers(0, 4)))
    return documents, cp.PackedMask(draw(st.booleans()), draw(windows), draw(st.booleans()))


def dense_difference(seen: Tensor, documents: cp.Documents, mask: cp.PackedMask) -> bool:
    """True if a query of a document, or of the row, sees other keys than the mask keeps, pair by pair."""
    wrong = seen.numpy() != mask.materialize(documents)
    return bool(wrong[mask.documents(documents).document_ids() >= 0].any())


@settings(max_examples=60, deadline=None)
@given(rows_and_masks(), rows_and_masks(), st.randoms())
def test_every_pair_of_a_tensor_is_compared(one: Any, other: Any, random: Any) -> None:
    (documents, mask), total = one, one[0].total
    seen = keep(documents, mask)
    assert masks.first_difference(seen[None, None], [documents], mask) is None
    q, k = random.randrange(total), random.randrange(total)
    seen[q, k] ^= True
    found = masks.first_difference(seen[None, None], [documents], mask)
    assert (found is not None) == dense_difference(seen, documents, mask)
    assert found is None or found == ((0, q, k), bool(seen[q, k]))


def block_mask(seen: Tensor, size: int) -> BlockMask:
    padded = torch.nn.functional.pad(seen, (0, 64 - len(seen), 0, 64 - len(seen)))  # create_block_mask asks beyond
    return create_block_mask(lambda _, __, q, k: padded[q, k], None, None, *seen.shape, device="cpu", BLOCK_SIZE=size)


@settings(max_examples=25, deadline=None)
@given(rows_and_masks(), rows_and_masks(), st.sampled_from([4, 16]))
def test_block_masks_of_other_rows_differ_in_the_sampled_pairs(one: Any, other: Any, size: int) -> None:
    """Whatever the packing, window and direction of the one and the other."""
    documents, mask = one
    assert (
        masks.first_difference_of_blocks(block_mask(keep(documents, mask), size), [documents], mask, "sampled") is None
    )
    theirs = cp.Documents(other[0].starts, other[0].lengths, max(documents.total, other[0].total))
    mine = cp.Documents(documents.starts, documents.lengths, theirs.total)
    seen = keep(theirs, other[1])
    found = masks.first_difference_of_blocks(block_mask(seen, size), [mine], mask, "sampled")
    assert (found is not None) == dense_difference(seen, mine, mask)


@pytest.mark.parametrize("pairs", ["many", "all"])
def test_a_single_pair_of_a_block_mask_is_found(pairs: str) -> None:
    documents, mask = cp.Documents.from_lengths([30, 2]), cp.PackedMask()
    seen = keep(documents, mask)
    seen[20, 7] = False
    assert masks.first_difference_of_blocks(block_mask(seen, 16), [documents], mask, pairs) == ((0, 20, 7), False)


def test_lists_of_blocks_are_compared_whole() -> None:
    documents, mask = cp.Documents.from_lengths([12, 4]), cp.PackedMask()
    right = block_mask(keep(documents, mask), 4)
    counts = right.kv_num_blocks.clone()
    counts[..., 1] -= 1
    fewer = BlockMask.from_kv_blocks(
        counts, right.kv_indices, right.full_kv_num_blocks, right.full_kv_indices, right.BLOCK_SIZE, right.mask_mod
    )
    found = masks.first_difference_of_blocks(fewer, [documents], mask, "sampled")
    assert found is not None
    assert not found[1]
    none = torch.zeros_like(counts)
    whole = BlockMask.from_kv_blocks(
        none, right.kv_indices, right.kv_num_blocks, right.kv_indices, right.BLOCK_SIZE, right.mask_mod
    )
    found = masks.first_difference_of_blocks(whole, [documents], mask, "sampled")
    assert found is not None
    assert found[1]
