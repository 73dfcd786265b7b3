"""Entries of the catalogue of masks, their batches, and how a mask is captured."""

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
Packing = cp.PositionIds | cp.DocumentIds | cp.CuSeqlens | cp.EndOfDocument | cp.StartOfDocument

POSITIONS, DOCUMENTS, OFFSETS = cp.PositionIds("position_ids"), cp.DocumentIds("doc_ids"), cp.CuSeqlens("cu_seqlens")
COUNTED = cp.DocumentIds("counted_ids", padding=0)
MARK = 9
ENDED, STARTED = cp.EndOfDocument("ended_ids", MARK), cp.StartOfDocument("started_ids", MARK)
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


def add_to(spellings: list[Spelling], packing: Packing, means: PackedMask | Reason) -> Callable[[Mask], Mask]:
    """Decorator that puts a mask into a catalogue."""

    def add(mask: Mask) -> Mask:
        spellings.append(Spelling(mask, packing, means))
        return mask

    return add


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
    """Rows of packed documents. `cu_seqlens` describes the first row.

    `counted_ids` count documents from 1. Of `ended_ids` (`started_ids`) MARK is each document's last (first) token.
    """
    rows = [[n for n in row if n > 0] for row in lengths]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    # Ids are no running count: only runs are promised.
    doc_ids = torch.stack([torch.cat([torch.full((n,), (7 * i + 3) % 11) for i, n in enumerate(r)]) for r in rows])
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths[0]).tolist()])
    input_ids = torch.arange(position_ids.numel()).view_as(position_ids) % 13
    batch = {"input_ids": input_ids, "position_ids": position_ids, "doc_ids": doc_ids, "cu_seqlens": cu_seqlens}
    return batch | tokens_of_documents(position_ids)


def tokens_of_documents(position_ids: Tensor) -> dict[str, Tensor]:
    """Arguments that tell documents apart by one number per token: counts, and marks at ends or starts."""
    first = position_ids == 0
    last = first.roll(-1, 1)  # the row's last token ends its document, whether it says so or not
    text = torch.arange(first.numel()).view_as(first) % MARK
    return {
        "counted_ids": first.cumsum(1),
        "ended_ids": text.masked_fill(last, MARK),
        "started_ids": text.masked_fill(first & (torch.arange(first.shape[1]) > 0), MARK),
    }


def annotate(packing: Packing, **options: Any) -> cp.Sharding:
    names = ("input_ids", "position_ids", "doc_ids", "counted_ids", "ended_ids", "started_ids")
    return cp.Sharding(2, dict.fromkeys(names, 1), packing, **options)


def kept(mask: Tensor) -> Tensor:
    """Which keys a boolean or additive mask keeps: those whose softmax weight is not zero."""
    return mask if mask.dtype == torch.bool else torch.exp(mask.double()) > 0


def index(batch: dict[str, Tensor]) -> Tensor:
    return torch.arange(batch["input_ids"].shape[1])


def same(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


def causal(batch: dict[str, Tensor]) -> Tensor:
    i = index(batch)
    return i[:, None] >= i[None, :]


def equal_1d(ids: Tensor) -> Tensor:
    return ids[:, None] == ids[None, :]
