"""The mask says something else than the annotation, or something that a shard can't see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.packed_model import PackedModel


def same(ids: Tensor) -> Tensor:
    return ids[:, :, None] == ids[:, None, :]


def index_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)


class MaskModel(PackedModel):
    """A mask of documents and a term of query and key index."""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = index_of(doc_ids)
        return (same(doc_ids) & self.term(index[:, None], index[None, :]))[:, None]


class StrictlyCausal(MaskModel):
    reason, line = "MASK_NOT_PACKED", "self.term"

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return q > k


class SeesOneAhead(MaskModel):
    """Kept as it is: a window of one token to the right."""

    reason, line = None, ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return q >= k - 1


class SlidingWindow(MaskModel):
    """Kept as it is."""

    reason, line = None, ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 3)


class DilatedWindow(MaskModel):
    reason, line = "MASK_", ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q - k) % 2 == 0)


class GlobalTokens(MaskModel):
    reason, line = "MASK_", ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) | (k < 2)


class PrefixMask(MaskModel):
    reason, line = "MASK_", ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) | ((q < 4) & (k < 4))


class Chunked(MaskModel):
    """Kept as it is."""

    reason, line = None, ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q // 4 == k // 4)


class BlockCausal(MaskModel):
    reason, line = "MASK_", ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return q // 4 >= k // 4


class ChunkedOffByOne(MaskModel):
    reason, line = "MASK_", ""

    def term(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q + 1) // 4 == (k + 1) // 4)


class LengthTerm(MaskModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = index_of(doc_ids)
        near = index[:, None] - index[None, :] < h.shape[1] // 2
        return (same(doc_ids) & near & (index[:, None] >= index[None, :]))[:, None]


class DocumentsFromTokens(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        ids = (input_ids == 0).cumsum(1)
        index = index_of(ids)
        return (same(ids) & (index[:, None] >= index[None, :]))[:, None]


class SameTokenMask(PackedModel):
    reason, line = "MASK_WRONG_SOURCE", "same(input_ids)"

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = index_of(input_ids)
        return (same(input_ids) & (index[:, None] >= index[None, :]))[:, None]


class DocumentsShiftedByOne(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = index_of(doc_ids)
        return ((doc_ids[:, :, None] == doc_ids.roll(1, 1)[:, None, :]) & (index[:, None] >= index[None, :]))[:, None]


class NeighbourDocuments(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = index_of(doc_ids)
        near = (doc_ids[:, :, None] - doc_ids[:, None, :]).abs() <= 1
        return (near & (index[:, None] >= index[None, :]))[:, None]


class NotSameDocument(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        return (doc_ids[:, :, None] != doc_ids[:, None, :])[:, None]


class MaskByContent(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        return (same(doc_ids) & (h[..., 0] > 0)[:, None, :])[:, None]


class LearnedBias(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = index_of(doc_ids)
        bias = -0.1 * (index[:, None] - index[None, :]).abs()
        return bias.masked_fill(~same(doc_ids), -torch.inf)[:, None]


class RandomMask(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        keep = torch.rand(doc_ids.shape) < 0.9
        return (same(doc_ids) & keep[:, None, :])[:, None]


class WrittenMask(PackedModel):
    reason, line = "MASK_", ""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        keep = same(doc_ids)[:, None].clone()
        keep[..., 0] = True
        return keep


class MaskUsedOutside(PackedModel):
    """The mask is proven, but its values are used once more outside attention."""

    reason, line = "TOKEN_MIXING", "=="

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, **rest: Tensor
    ) -> Tensor:
        seen = self.mask(self.embed(input_ids), doc_ids, position_ids, input_ids)
        assert seen is not None
        loss = super().forward(input_ids, position_ids, doc_ids, **rest)
        return loss + seen.float().mean()


class CausalOverDocuments(PackedModel):
    """Kept as it is where `across_documents` says that it is meant: causal over the whole row is a mask too."""

    reason, line = None, ""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class AttentionDropout(PackedModel):
    reason, line = "DROPOUT", "dropout_p"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


class KeysFromCache(PackedModel):
    reason, line = "QK_LENGTH", "scaled_dot_product_attention"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        past = torch.ones_like(k[:, :, :2])
        k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class LastQueryOnly(PackedModel):
    reason, line = "QK_LENGTH", "scaled_dot_product_attention"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, -1:], k, v).expand_as(q)


class CausalToMemory(PackedModel):
    """Keys are weights, which the n-th token sees n of."""

    reason, line = "TOKEN_MIXING", "is_causal=True"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        memory = self.out.weight[None, None, :, : q.shape[-1]].expand(-1, q.shape[1], -1, -1)
        return F.scaled_dot_product_attention(q, memory, memory, is_causal=True)


class KeysShifted(PackedModel):
    reason, line = "TOKEN_MIXING", "k.roll"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k.roll(1, 2), v, attn_mask=mask)


class AttentionOverHeads(PackedModel):
    """Forgets to transpose: attention runs over heads, tokens are its batch. A rank does so as one process does."""

    reason, line = None, ""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class HeadsAsRows(PackedModel):
    """Heads are made rows of the batch, whose tokens nobody cut."""

    reason, line = "SHAPE", "scaled_dot_product_attention"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        rows, keys, values = (x.flatten(0, 1)[:, None] for x in (q, k, v))
        return F.scaled_dot_product_attention(rows, keys, values, is_causal=True).view_as(q)


class RowsAsHeads(PackedModel):
    reason, line, rows = "SHAPE", "scaled_dot_product_attention", 2

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        heads, keys, values = (x.flatten(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(heads, keys, values, is_causal=True).view_as(q)


class MaskEditedAfterwards(PackedModel):
    """Right as it is: attention has read the mask before."""

    reason, line = None, ""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.fill_(True)
        return out
