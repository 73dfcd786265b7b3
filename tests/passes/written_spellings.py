"""Attention written out as products and a softmax, in each spelling that is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.matching import PACKED

Attention = Callable[..., Tensor]


class Written(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """`attend(q, k, v, keep)`, with sinks where its name ends so. 4 query heads, `kv_heads` repeated key heads.

    With several functions it returns a list, from one graph.
    """

    def __init__(self, *attends: Any, kv_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sinks = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(64, 4 * 4)
        self.attends, self.kv_heads = attends, kv_heads

    def forward(self, **b: Tensor) -> Any:
        x = self.table(b["input_ids"]).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (x[:, : self.kv_heads] * c for c in (1.5, -2.0))
        k, v = (y[:, :, None].expand(-1, -1, 4 // self.kv_heads, -1, -1).flatten(1, 2) for y in (k, v))
        keep = PACKED(**b)
        found: list[Any] = []
        for attend in self.attends:
            found.append(attend(x, k, v, keep, *((self.sinks,) if attend.__name__.endswith("sinks") else ())))
        return found if len(found) > 1 else found[0]


def added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    mask = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.0, training=True), v)


def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(keep == 0, float("-inf"))
    return torch.softmax(scores, -1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bhqd, bhkd -> bhqk", q, k) / 2
    weights = torch.where(keep, scores, float("-inf")).softmax(dim=3)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q * 0.5 @ k.mT).masked_fill(~keep, -1e9).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.permute(0, 1, 3, 2)
    scores *= 0.5
    scores += torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, float("-inf"))
    return F.dropout(scores.softmax(-1), 0.3, training=False) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5 / 3.0) * 3.0
    return F.softmax(scores + torch.where(keep, 0.0, -math.inf), dim=-1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.transpose(-1, -2)).float() * 0.5
    scores = scores.masked_fill(~keep, -math.inf) + torch.where(i[:, None] - i < 3, 0.0, -math.inf)
    return torch.softmax(scores, dim=-1).type_as(v) @ v


def taken_off(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.5 - (1 - keep.to(q.dtype)) * 1e10).softmax(-1) @ v


def over_a_tensor(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As GPT-2 scales, and masks."""
    scores = q @ k.mT
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    return torch.where(keep, scores, least).softmax(-1).type(v.dtype) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    logits = torch.cat([scores, column], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1] @ v


def checkpointed_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    return checkpoint(with_sinks, q, k, v, keep, sinks, use_reentrant=False)  # type: ignore[return-value]


def tokens_first(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention on (B, T, H, D)."""
    q, k, v = q.transpose(1, 2), *(x[:, ::2].transpose(1, 2).repeat_interleave(2, 2) for x in (k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5).masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def merged(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Heads and rows as one dim, as in OPT and XGLM."""
    b, h, t, d = q.shape
    q, k, v = q.reshape(b * h, t, d), k.reshape(b * h, -1, d), v.reshape(b * h, -1, d)
    scores = torch.bmm(q, k.transpose(1, 2)) * 0.5
    assert scores.size() == (b * h, t, t)
    scores = scores.view(b, h, t, t) + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    least = torch.full((), torch.finfo(scores.dtype).min, device=scores.device)
    weights = torch.max(scores, least).view(b * h, t, t).softmax(-1)
    weights = F.dropout(weights.view(b, h, t, t).view(b * h, t, t), 0.0)
    return torch.bmm(weights, v).view(b, h, t, d)


def merged_masks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The mask is repeated for each head; logits and weights stay of three dims."""
    b, h, t, d = q.shape
    q, k, v = (x.contiguous().view(b * h, t, d) for x in (q, k, v))
    bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -math.inf).expand(b, h, t, t).reshape(b * h, t, t)
    weights = F.softmax(torch.einsum("nqd,nkd->nqk", q, k) * 0.5 + bias, 2)
    return torch.einsum("nqk,nkd->nqd", weights, v).unflatten(0, (b, h))


def onto_zeros(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As GPT-NeoX-Japanese."""
    b, h, t, d = q.shape
    zeros = torch.zeros(b * h, t, t, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(zeros, q.reshape(b * h, t, d), k.reshape(b * h, t, d).transpose(1, 2), beta=1.0, alpha=1 / 2)
    return (scores.view(b, h, t, -1) + torch.where(keep, 0.0, -math.inf)).softmax(-1) @ v


def filled_behind_its_back(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As XLM."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    scores.masked_fill_((~keep).expand_as(scores), torch.finfo(scores.dtype).min)
    return F.softmax(scores.float(), -1).type_as(scores) @ v


def filled_twice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    scores = q @ k.mT * 0.5
    scores.masked_fill_(~keep, -math.inf)
    scores.add_(torch.where(i[:, None] - i < 3, 0.0, -math.inf))
    return scores.softmax(-1) @ v


def scaled_after_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As CodeGen."""
    return ((q @ k.mT + torch.where(keep, 0.0, -1e9)) / (8 / 3) * (4 / 3)).softmax(-1) @ v


def by_factor_sinks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sinks: Tensor) -> Tensor:
    """As Granite with sliding windows."""
    logits = q @ k.mT * 0.5 + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    share = (torch.logsumexp(logits, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    return out * share.unsqueeze(-1).to(out.dtype)


SPELLINGS = (
    added, filled, chosen, scaled_queries, in_place, capped, two_masks, taken_off, over_a_tensor, with_sinks,
    tokens_first, merged, merged_masks, onto_zeros, filled_behind_its_back, filled_twice, scaled_after_mask,
    by_factor_sinks,
)  # fmt: skip
