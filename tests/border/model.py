"""A small packed model that is put together from parts, and its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Mapping[str, Any]
VOCAB, WIDTH, HEADS = 19, 16, 2
TOKENS = {"input_ids": 1, "doc_ids": 1, "labels": 1}


def document_mask(b: Batch) -> Tensor:
    """Same document and causal: padding tokens, which share an id, see each other."""
    ids = b["doc_ids"]
    index = torch.arange(ids.shape[1], device=ids.device)
    return ((ids[:, :, None] == ids[:, None, :]) & (index[:, None] >= index[None, :]))[:, None]


def keep_tokens(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h


def cross_entropy(model: Model, logits: Tensor, b: Batch) -> Tensor:
    """The sum over targets, over the number of targets in the whole batch."""
    return F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="sum") / b["num_items"]


def nothing(model: Model) -> None:
    """No more parameters or state."""


class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Embedding, attention, a head and a loss.

    Args:
        loss, mix: of the model, the logits (or the hidden states after attention) and the batch.
        mask: of the batch. extra: called once, for parameters and state.
    """

    def __init__(
        self,
        loss: Callable[[Any, Tensor, Batch], Any] = cross_entropy,
        mix: Callable[[Any, Tensor, Batch], Tensor] = keep_tokens,
        mask: Callable[[Batch], Tensor] = document_mask,
        extra: Callable[[Any], None] = nothing,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.parts = (loss, mix, mask)
        extra(self)

    def forward(self, **b: Any) -> Any:
        loss, mix, mask = self.parts
        h = self.embed(b["input_ids"])
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=mask(b)).transpose(1, 2).flatten(2)
        return loss(self, self.head(mix(self, h, b)), b)


def pack(lengths: Sequence[int] = (5, 4, 5), padding: int = 0, seed: int = 1) -> dict[str, Any]:
    """A row of documents of these lengths, then padding of id -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = [*range(len(lengths)), -1]
    doc_ids = torch.repeat_interleave(torch.tensor(ids), torch.tensor([*lengths, padding]))[None]
    labels = torch.randint(0, VOCAB, doc_ids.shape, generator=generator)
    labels[:, 2:3] = -100
    labels[doc_ids < 0] = -100
    return {
        "input_ids": torch.randint(0, VOCAB, doc_ids.shape, generator=generator),
        "doc_ids": doc_ids,
        "labels": labels,
        "num_items": (labels != -100).sum().float(),
    }
