"""Masks that are subtly wrong."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite import Reason
from tests.passes.mask_spellings.base import (
    DOCUMENTS,
    INF,
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


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def or_for_and(**b: Tensor) -> Tensor:
    return same(b["doc_ids"]) | causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def strictly_causal(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & (i[:, None] > i[None, :])


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def other_documents(**b: Tensor) -> Tensor:
    return ~same(b["doc_ids"]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_WRONG_SOURCE)
def queries_set_in_place(**b: Tensor) -> Tensor:
    """The mask that is written by has a dim less: it names queries, all of whose keys are seen."""
    mask = (same(b["doc_ids"]) & causal(b))[:, 0]
    mask[b["input_ids"] > 9] = True
    return mask[:, None]


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def row_set_in_place(**b: Tensor) -> Tensor:
    """The values that are written hold one entry for each key, the first of them 0."""
    t = b["input_ids"].shape[1]
    mask = torch.where(same(b["doc_ids"]) & causal(b), 0.0, -INF)
    mask[:, :, torch.ones(t, dtype=torch.bool)] = torch.arange(t) * -1.0
    return mask


@spelling(DOCUMENTS, Reason.MASK_WRONG_SOURCE)
def ids_of_another_input(**b: Tensor) -> Tensor:
    return same((b["position_ids"] == 0).cumsum(1)) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_WRONG_SOURCE)
def tokens_as_ids(**b: Tensor) -> Tensor:
    return same(b["input_ids"]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def ids_rise(**b: Tensor) -> Tensor:
    """Ids promise runs, not an order: a fall would go unseen."""
    d = b["doc_ids"]
    return same(F.pad((d[:, 1:] > d[:, :-1]).long(), (1, 0)).cumsum(1)) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def ids_ordered(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return (d[:, None, :, None] >= d[:, None, None, :]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_WRONG_DIM)
def ids_of_the_first_row(**b: Tensor) -> Tensor:
    return equal_1d(b["doc_ids"][0]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_WRONG_DIM)
def ids_over_heads(**b: Tensor) -> Tensor:
    """(B, T, T) broadcasts over heads, not rows."""
    d = b["doc_ids"][:2]
    return d[:, :, None] == d[:, None, :]


@spelling(DOCUMENTS, Reason.MASK_WRONG_DIM)
def ids_shifted(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return (d[:, None, :, None] == d.roll(1, 1)[:, None, None, :]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def keys_unmasked(**b: Tensor) -> Tensor:
    return (b["doc_ids"][:, None, None, :] >= 0) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def ids_in_bfloat16(**b: Tensor) -> Tensor:
    return same(b["doc_ids"].bfloat16()) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def weak_constant(**b: Tensor) -> Tensor:
    return torch.where(same(b["doc_ids"]) & causal(b), 0.0, -100.0)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def positive_infinity(**b: Tensor) -> Tensor:
    return torch.where(same(b["doc_ids"]) & causal(b), 0.0, INF)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def zero_times_infinity(**b: Tensor) -> Tensor:
    return (1.0 - (same(b["doc_ids"]) & causal(b)).float()) * -INF


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def bool_cast_to_float(**b: Tensor) -> Tensor:
    """An additive mask of ones and zeros: SDPA adds it."""
    return (same(b["doc_ids"]) & causal(b)).float()


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def alibi(**b: Tensor) -> Tensor:
    i = index(b)
    bias = -(i[:, None] - i[None, :]).abs().float()
    return bias.masked_fill(~(same(b["doc_ids"]) & causal(b)), -INF)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def window_with_a_hole(**b: Tensor) -> Tensor:
    i = index(b)
    d = i[:, None] - i[None, :]
    return same(b["doc_ids"]) & causal(b) & (d != 2)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def window_of_half_the_row(**b: Tensor) -> Tensor:
    i, t = index(b), b["input_ids"].shape[1]
    return same(b["doc_ids"]) & causal(b) & (i[:, None] - i[None, :] < t // 2)


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def sink_token(**b: Tensor) -> Tensor:
    """The row's first token is visible to all."""
    i = index(b)
    return causal(b) & (same(b["doc_ids"]) | (i[None, :] == 0))


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_causal_alone(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    return p[:, None, None, :] <= p[:, None, :, None]


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_one(**b: Tensor) -> Tensor:
    """Off by one: documents would start at their second token."""
    return same((b["position_ids"] == 1).cumsum(1)) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_equal(**b: Tensor) -> Tensor:
    return same(b["position_ids"]) & causal(b)


@spelling(POSITIONS, Reason.MASK_NOT_PACKED)
def positions_summed(**b: Tensor) -> Tensor:
    return same(b["position_ids"].cumsum(1)) & causal(b)


@spelling(POSITIONS, Reason.MASK_WRONG_DIM)
def positions_counted_down_the_batch(**b: Tensor) -> Tensor:
    return same((b["position_ids"] == 0).cumsum(0)) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_from_the_left(**b: Tensor) -> Tensor:
    """Off by one: a document's first token counts as the document before."""
    return equal_1d(torch.searchsorted(b["cu_seqlens"], index(b))) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_two_skipped(**b: Tensor) -> Tensor:
    return equal_1d(torch.bucketize(index(b), b["cu_seqlens"][2:], right=True)) & causal(b)


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_tail_counts_as_document(**b: Tensor) -> Tensor:
    """Without the last offset, padding at the row's end belongs to the last document; no causal term hides it."""
    return equal_1d(torch.bucketize(index(b), b["cu_seqlens"][:-1], right=True))


@spelling(OFFSETS, Reason.MASK_NOT_PACKED)
def offsets_whole_row_but_the_tail(**b: Tensor) -> Tensor:
    """Both numberings agree but for padding at the row's end, which a mask of the whole row would keep."""
    with_tail = equal_1d(torch.bucketize(index(b), b["cu_seqlens"][1:-1], right=True))
    return ~(with_tail ^ equal_1d(torch.bucketize(index(b), b["cu_seqlens"][1:], right=True)))


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def constant_blocks(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    torch._check(t == 12)
    return torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def ids_in_float32(**b: Tensor) -> Tensor:
    """Ids from 2**24 on are rounded: documents merge."""
    return same(b["doc_ids"] * 1.0) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def ids_promoted_to_half(**b: Tensor) -> Tensor:
    return same(b["doc_ids"] * torch.tensor(1.0, dtype=torch.float16)) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def ids_compared_as_floats(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return (d[:, None, :, None] == d.double().float()[:, None, None, :]) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def ids_that_wrap(**b: Tensor) -> Tensor:
    return same(b["doc_ids"].int() * 2**20) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def ids_cut(**b: Tensor) -> Tensor:
    """Pairs of documents become one."""
    return same((b["doc_ids"].double() / 2).long()) & causal(b)


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def blocks_by_a_cast(**b: Tensor) -> Tensor:
    i = (index(b) / 4).long()
    return same(b["doc_ids"]) & (i[:, None] == i[None, :])


@spelling(DOCUMENTS, Reason.MASK_NOT_PACKED)
def bytes_below_zero(**b: Tensor) -> Tensor:
    """0 - 1 is 255 in uint8: dropped keys would get a bonus."""
    return ((same(b["doc_ids"]) & causal(b)).byte() - 1).float() * 1e9


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def slopes_per_head(**b: Tensor) -> Tensor:
    i = index(b)
    bias = (i[None, :] - i[:, None]) * torch.tensor([0.5, 0.25])[:, None, None]
    return bias.masked_fill(~(same(b["doc_ids"]) & causal(b)), -INF)


@spelling(POSITIONS, Reason.MASK_UNSUPPORTED_OP)
def window_in_tenths(**b: Tensor) -> Tensor:
    """0.1 * 7 - 0.1 * 4 is less than 0.3, 0.1 * 5 - 0.1 * 2 is not."""
    i = index(b) * 0.1
    return same((b["position_ids"] == 0).cumsum(1)) & causal(b) & (i[:, None] - i[None, :] < 0.3)


@spelling(POSITIONS, Reason.MASK_UNSUPPORTED_OP)
def index_far_out_in_float32(**b: Tensor) -> Tensor:
    i = index(b) + 2.0**25
    return same((b["position_ids"] == 0).cumsum(1)) & (i[:, None] >= i[None, :])


@spelling(OFFSETS, Reason.MASK_UNSUPPORTED_OP)
def offsets_counted_in_int8(**b: Tensor) -> Tensor:
    """Document 128 is the first one again."""
    return equal_1d((b["cu_seqlens"] <= index(b)[:, None]).sum(-1, dtype=torch.int8)) & causal(b)


@spelling(OFFSETS, Reason.MASK_UNSUPPORTED_OP)
def offsets_with_alternating_marks(**b: Tensor) -> Tensor:
    """The first mark is 0, and every other one after it."""
    starts = b["cu_seqlens"][1:-1]
    marks = torch.zeros_like(index(b)).scatter(0, starts, torch.arange(starts.numel()) % 2)
    return equal_1d(marks.cumsum(0)) & causal(b)


@spelling(OFFSETS, Reason.MASK_UNSUPPORTED_OP)
def offsets_with_marks_multiplied_in(**b: Tensor) -> Tensor:
    starts = b["cu_seqlens"][1:-1]
    marks = torch.zeros_like(index(b)).scatter(0, starts, 1, reduce="multiply")
    return equal_1d(marks.cumsum(0)) & causal(b)
