"""A catalogue of packed attention masks as people write them, right and subtly wrong, with what each one means.

Each spelling is a function of the batch: input_ids (B, T), position_ids (B, T), doc_ids (B, T), cu_seqlens (N + 1,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason

Mask = Callable[..., Tensor]
Packing = cp.PositionIds | cp.DocumentIds | cp.CuSeqlens

POSITIONS, DOCUMENTS, OFFSETS = cp.PositionIds("position_ids"), cp.DocumentIds("doc_ids"), cp.CuSeqlens("cu_seqlens")
CAUSAL, FULL = PackedMask(), PackedMask(causal=False)
LOWEST = torch.finfo(torch.float32).min
INF = float("inf")


@dataclass(frozen=True)
class Spelling:
    """A mask function, the annotation it is read under, and its meaning: a PackedMask, or why it is refused."""

    mask: Mask
    packing: Packing
    means: PackedMask | Reason

    @property
    def name(self) -> str:
        return f"{self.mask.__name__}-{type(self.packing).__name__}"


SPELLINGS: list[Spelling] = []


def spelling(packing: Packing, means: PackedMask | Reason) -> Callable[[Mask], Mask]:
    def add(mask: Mask) -> Mask:
        SPELLINGS.append(Spelling(mask, packing, means))
        return mask

    return add


# -- capture and brute force ---------------------------------------------------------------------------------


def attend(mask: Mask, **batch: Tensor) -> Tensor:
    """A model of one attention call: heads (B, 2, T, 4) made from the tokens."""
    x = batch["input_ids"][:, None, :, None].float().expand(-1, 2, -1, 4)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask(**batch))


def capture(model: Callable[..., Any], batch: Mapping[str, Any], dynamic: bool | None = True) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend for `model(**batch)`."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(**batch)
    (gm,) = graphs
    return gm


def make_batch(lengths: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Rows of packed documents. `cu_seqlens` describes the first row."""
    rows = [[n for n in row if n > 0] for row in lengths]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    # Ids are no running count: only runs are promised.
    doc_ids = torch.stack([torch.cat([torch.full((n,), (7 * i + 3) % 11) for i, n in enumerate(r)]) for r in rows])
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths[0]).tolist()])
    input_ids = torch.arange(position_ids.numel()).view_as(position_ids) % 13
    return {"input_ids": input_ids, "position_ids": position_ids, "doc_ids": doc_ids, "cu_seqlens": cu_seqlens}


def annotate(packing: Packing, **options: Any) -> cp.Sharding:
    return cp.Sharding(2, {"input_ids": 1, "position_ids": 1, "doc_ids": 1}, packing, **options)


def kept(mask: Tensor) -> Tensor:
    """Which keys a boolean or additive mask keeps: those whose softmax weight is not zero."""
    return mask if mask.dtype == torch.bool else torch.exp(mask.double()) > 0


# -- document ids --------------------------------------------------------------------------------------------


def index(batch: dict[str, Tensor]) -> Tensor:
    return torch.arange(batch["input_ids"].shape[1])


def same(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


def causal(batch: dict[str, Tensor]) -> Tensor:
    i = index(batch)
    return i[:, None] >= i[None, :]


@spelling(DOCUMENTS, CAUSAL)
def ids_equal_and_index(**b: Tensor) -> Tensor:
    return same(b["doc_ids"]) & causal(b)


@spelling(DOCUMENTS, FULL)
def ids_equal(**b: Tensor) -> Tensor:
    return same(b["doc_ids"])


@spelling(DOCUMENTS, CAUSAL)
def ids_equal_tril(**b: Tensor) -> Tensor:
    return same(b["doc_ids"]).tril()


@spelling(DOCUMENTS, CAUSAL)
def ids_as_floats_plus_one(**b: Tensor) -> Tensor:
    return same(b["doc_ids"].float() * 2 + 1).tril()


@spelling(DOCUMENTS, CAUSAL)
def ids_difference_zero(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return torch.logical_and((d[:, :, None] - d[:, None, :] == 0), causal(b))[:, None]


@spelling(DOCUMENTS, CAUSAL)
def changes_of_ids(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    starts = F.pad((d[:, 1:] != d[:, :-1]).long(), (1, 0))
    return same(starts.cumsum(1)) & causal(b)


@spelling(DOCUMENTS, CAUSAL)
def ids_equal_and_not_padding(**b: Tensor) -> Tensor:
    d = b["doc_ids"]
    return same(d) & (d[:, None, None, :] >= 0) & causal(b)


@spelling(DOCUMENTS, PackedMask(window=(3, 0)))
def ids_causal_window(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & causal(b) & (i[:, None] - i[None, :] < 4)


@spelling(DOCUMENTS, PackedMask(causal=False, window=(2, 2)))
def ids_symmetric_window(**b: Tensor) -> Tensor:
    i = index(b)
    return same(b["doc_ids"]) & ((i[:, None] - i[None, :]).abs() <= 2)


@spelling(DOCUMENTS, PackedMask(causal=False, window=(3, 1)))
def ids_triu_tril_band(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    band = torch.ones(t, t, dtype=torch.bool).tril(1).triu(-3)
    return same(b["doc_ids"]) & band


@spelling(DOCUMENTS, PackedMask(causal=False, window=(0, None)))
def ids_only_later_keys(**b: Tensor) -> Tensor:
    """Causal with query and key swapped: it is another mask, and is read as that."""
    i = index(b)
    return same(b["doc_ids"]) & (i[:, None] <= i[None, :])


@spelling(DOCUMENTS, CAUSAL)
def ids_masked_fill(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"]) & causal(b)
    return torch.zeros(t, t).masked_fill(~keep, -INF)


@spelling(DOCUMENTS, CAUSAL)
def ids_masked_fill_in_place(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"]) & causal(b)
    mask = torch.zeros(keep.shape[0], 1, t, t)
    mask.masked_fill_(keep.logical_not(), LOWEST)
    return mask


@spelling(DOCUMENTS, CAUSAL)
def ids_where(**b: Tensor) -> Tensor:
    return torch.where(same(b["doc_ids"]) & causal(b), 0.0, LOWEST)


@spelling(DOCUMENTS, CAUSAL)
def ids_one_minus(**b: Tensor) -> Tensor:
    return (1.0 - (same(b["doc_ids"]) & causal(b)).float()) * LOWEST


@spelling(DOCUMENTS, CAUSAL)
def ids_sum_of_additive(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    future = torch.full((t, t), -INF).triu(1)
    return future + torch.where(same(b["doc_ids"]), 0.0, LOWEST)


@spelling(DOCUMENTS, CAUSAL)
def ids_product_of_floats(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    keep = same(b["doc_ids"]).float() * torch.tril(torch.ones(t, t))
    return keep.log()


@spelling(DOCUMENTS, CAUSAL)
def ids_not_or(**b: Tensor) -> Tensor:
    d, i = b["doc_ids"], index(b)
    return ~((d[:, None, :, None] != d[:, None, None, :]) | (i[None, :] > i[:, None]))


@spelling(DOCUMENTS, CAUSAL)
def ids_multiplied(**b: Tensor) -> Tensor:
    return (same(b["doc_ids"]).int() * causal(b).int()).bool()


@spelling(DOCUMENTS, CAUSAL)
def ids_vmapped(**b: Tensor) -> Tensor:
    d, i = b["doc_ids"], index(b)
    rows = torch.arange(d.shape[0])

    def keep(row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (d[row, q] == d[row, k]) & (k <= q)

    over_keys = torch.vmap(keep, in_dims=(None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, 0, None))
    return torch.vmap(over_queries, in_dims=(0, None, None))(rows, i, i)[:, None]


# -- position ids --------------------------------------------------------------------------------------------


@spelling(POSITIONS, CAUSAL)
def positions_as_transformers(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    ids = (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return same(ids) & (p[:, None, None, :] <= p[:, None, :, None])


@spelling(POSITIONS, CAUSAL)
def positions_zero(**b: Tensor) -> Tensor:
    return same((b["position_ids"] == 0).cumsum(1)) & causal(b)


@spelling(POSITIONS, CAUSAL)
def positions_fall(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    ids = F.pad(p[:, 1:] <= p[:, :-1], (1, 0)).int().cumsum(-1)
    return same(ids).tril()


@spelling(POSITIONS, CAUSAL)
def positions_roll(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    return same((p != p.roll(1, 1) + 1).cumsum(-1)).tril()


@spelling(POSITIONS, CAUSAL)
def positions_start_index(**b: Tensor) -> Tensor:
    start = index(b) - b["position_ids"]
    return same(start) & causal(b)


@spelling(POSITIONS, CAUSAL)
def positions_ordered_documents(**b: Tensor) -> Tensor:
    """Causal, and no key of an earlier document: so the same document."""
    ids = (b["position_ids"] == 0).cumsum(1)
    return (ids[:, None, :, None] <= ids[:, None, None, :]) & causal(b)


@spelling(POSITIONS, PackedMask(window=(2, 0)))
def positions_window(**b: Tensor) -> Tensor:
    p = b["position_ids"]
    q, k = p[:, None, :, None], p[:, None, None, :]
    return same((p == 0).cumsum(1)) & (k <= q) & (k > q - 3)


@spelling(POSITIONS, PackedMask(packed=False))
def whole_row_causal(**b: Tensor) -> Tensor:
    return causal(b)


@spelling(POSITIONS, PackedMask(packed=False, window=(4, 0)))
def whole_row_window(**b: Tensor) -> Tensor:
    i = index(b)
    return causal(b) & (i[:, None] - i[None, :] <= 4)


# -- cu_seqlens ----------------------------------------------------------------------------------------------


def equal_1d(ids: Tensor) -> Tensor:
    return ids[:, None] == ids[None, :]


@spelling(OFFSETS, CAUSAL)
def offsets_searchsorted(**b: Tensor) -> Tensor:
    ids = torch.searchsorted(b["cu_seqlens"], index(b), right=True) - 1
    return equal_1d(ids) & causal(b)


@spelling(OFFSETS, FULL)
def offsets_bucketize_full(**b: Tensor) -> Tensor:
    return equal_1d(torch.bucketize(index(b), b["cu_seqlens"], right=True))


@spelling(OFFSETS, CAUSAL)
def offsets_bucketize_starts(**b: Tensor) -> Tensor:
    return equal_1d(torch.bucketize(index(b), b["cu_seqlens"][1:], right=True)).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_count(**b: Tensor) -> Tensor:
    ids = (b["cu_seqlens"][None, :] <= index(b)[:, None]).sum(-1)
    return equal_1d(ids).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_count_inner(**b: Tensor) -> Tensor:
    ids = (index(b)[None, :] >= b["cu_seqlens"][1:-1, None]).sum(0)
    return equal_1d(ids).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_left_of_next(**b: Tensor) -> Tensor:
    ids = torch.searchsorted(b["cu_seqlens"], index(b) + 1)
    return equal_1d(ids).tril()


@spelling(OFFSETS, CAUSAL)
def offsets_repeat_interleave(**b: Tensor) -> Tensor:
    cu = b["cu_seqlens"]
    ids = torch.repeat_interleave(torch.arange(cu.numel() - 1), cu.diff(), output_size=b["input_ids"].shape[1])
    return equal_1d(ids) & causal(b)


@spelling(OFFSETS, CAUSAL)
def offsets_start_table(**b: Tensor) -> Tensor:
    cu, i = b["cu_seqlens"], index(b)
    ids = torch.searchsorted(cu, i, right=True) - 1
    local = i - cu[ids]
    return equal_1d(ids) & (local[:, None] >= local[None, :])


@spelling(OFFSETS, PackedMask(window=(5, 0)))
def offsets_marks(**b: Tensor) -> Tensor:
    i = index(b)
    marks = torch.zeros_like(i)
    marks[b["cu_seqlens"][1:-1]] = 1
    d = i[:, None] - i[None, :]
    return equal_1d(marks.cumsum(0)) & (d >= 0) & (d < 6)


# -- subtly wrong --------------------------------------------------------------------------------------------


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
def blocks_of_four(**b: Tensor) -> Tensor:
    i = index(b) // 4
    return same(b["doc_ids"]) & (i[:, None] == i[None, :])


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


@spelling(DOCUMENTS, Reason.MASK_UNSUPPORTED_OP)
def constant_blocks(**b: Tensor) -> Tensor:
    t = b["input_ids"].shape[1]
    torch._check(t == 12)
    return torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()
