"""Masks of documents that are cut into chunks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cp_rewrite import PackedMask, Reason
from tests.passes.mask_spellings.base import (
    DOCUMENTS,
    OFFSETS,
    POSITIONS,
    Spelling,
    add_to,
    causal,
    equal_1d,
    index,
    same,
)

SPELLINGS: list[Spelling] = []
spelling = functools.partial(add_to, SPELLINGS)
OF_ROW = PackedMask(chunk=4, chunk_of="row")
OF_DOCUMENT = PackedMask(chunk=4)


@spelling(POSITIONS, OF_ROW)
def chunks_as_transformers(**b: Tensor) -> Tensor:
    """The mask of Llama 4: `chunked_overlay`, with no padding to the left."""
    p, i = b["position_ids"], index(b)
    ids = (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    left = torch.zeros(p.shape[0], dtype=torch.long)[:, None, None, None]
    overlay = (i[None, :] - left) // 4 == (i[:, None] - left) // 4
    return same(ids) & overlay & causal(b)


@spelling(POSITIONS, OF_DOCUMENT)
def chunks_of_positions(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    return same((p == 0).cumsum(1)) & same(p // 4) & causal(b)


@spelling(POSITIONS, OF_DOCUMENT)
def chunks_from_their_start(**b: Tensor) -> Tensor:
    """No key before the chunk that holds the query."""
    p, i = b["position_ids"], index(b)
    q, k = i[:, None], i[None, :]
    start = (i - p % 4)[:, None, :, None]
    return same(i - p) & (k >= start) & (k <= q)


@spelling(DOCUMENTS, PackedMask(causal=False, chunk=4, chunk_of="row"))
def chunks_of_the_row(**b: Tensor) -> Tensor:
    return same(b["doc_ids"]) & equal_1d(index(b) // 4)


@spelling(DOCUMENTS, OF_ROW)
def chunks_of_the_row_by_their_start(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & equal_1d(i - i % 4) & causal(b)


@spelling(DOCUMENTS, PackedMask(window=(2, 0), chunk=5, chunk_of="row"))
def chunks_and_a_window(**b: Tensor) -> Tensor:
    i = index(b)
    near = i[:, None] - i[None, :] < 3
    return same(b["doc_ids"]) & equal_1d(i.div(5, rounding_mode="floor")) & near & causal(b)


@spelling(DOCUMENTS, PackedMask(packed=False, chunk=3))
def chunks_of_one_document(**b: Tensor) -> Tensor:
    return equal_1d(index(b) // 3).tril()


@spelling(OFFSETS, OF_DOCUMENT)
def chunks_of_offsets(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    ids = torch.bucketize(i, cu, right=True) - 1
    return equal_1d(ids) & equal_1d((i - cu[ids]) // 4) & causal(b)


@spelling(DOCUMENTS, PackedMask())
def chunks_in_order(**b: Tensor) -> Tensor:
    """No key of a later chunk: causality says so already."""
    i = index(b) // 4
    return same(b["doc_ids"]) & (i[:, None] >= i[None, :]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def chunks_and_the_one_before(**b: Tensor) -> Tensor:
    i = index(b) // 4
    return same(b["doc_ids"]) & (i[:, None] - i[None, :] <= 1) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def chunks_up_to_the_query_s(**b: Tensor) -> Tensor:
    """Block-causal: the query sees all of its own chunk."""
    i = index(b) // 4
    return same(b["doc_ids"]) & (i[:, None] >= i[None, :])


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def chunks_that_begin_late(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & equal_1d((i + 1) // 4) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def chunks_of_two_sizes(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & (i[:, None] // 4 == i[None, :] // 5) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def other_chunks(**b: Tensor) -> Tensor:
    i = index(b) // 4
    return same(b["doc_ids"]) & (i[:, None] != i[None, :]) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def chunks_of_any_document(**b: Tensor) -> Tensor:
    """Chunks of one number, whatever document they are of."""
    return same(b["position_ids"] // 4) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def chunk_of_position_and_index(**b: Tensor) -> Tensor:
    p, i = b["position_ids"], index(b)
    ids = (p == 0).cumsum(1)
    return same(ids) & (p[:, None, :, None] // 4 == i // 4) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def chunks_of_ids(**b: Tensor) -> Tensor:
    return same(b["doc_ids"] // 2) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def places_in_chunks(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    return same((p == 0).cumsum(1)) & same(p % 4) & causal(b)
