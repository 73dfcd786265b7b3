"""The number of tokens, where it is another one on a shard: as an offset, an index, a shift, an output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.packed_model import WIDTH, PackedModel


class WithTable(PackedModel):
    """The packed model with a table of 64 rows."""

    def extra(self) -> None:
        self.table = nn.Parameter(torch.randn(64, WIDTH))


class RowOfLength(WithTable):
    reason, line = "POSITION_GENERATOR", "self.table[length - 1 :"

    def mix(self, h: Tensor) -> Tensor:
        length = h.shape[1]
        return h + self.table[length - 1 : length]


class NarrowedAtLength(WithTable):
    reason, line = "POSITION_GENERATOR", "self.table.narrow"

    def mix(self, h: Tensor) -> Tensor:
        return h + self.table.narrow(0, h.shape[1], 1)


class FeaturesAtLength(PackedModel):
    reason, line = "POSITION_GENERATOR", "h.narrow"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.narrow(-1, h.shape[1] % 5, 3).sum(-1, keepdim=True)


class RolledByLength(PackedModel):
    reason, line = "POSITION_GENERATOR", "h.roll"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.roll(h.shape[1] % 5, -1)


class NthByLength(PackedModel):
    reason, line = "POSITION_GENERATOR", "h.kthvalue"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.kthvalue(h.shape[1] % 5 + 1, -1, keepdim=True).values


class ScatteredLength(PackedModel):
    reason, line = "POSITION_GENERATOR", "scatter"

    def mix(self, h: Tensor) -> Tensor:
        return h + torch.zeros_like(h).scatter(-1, h.topk(2, -1).indices, 1.0 / h.shape[1])


class LengthAtMost(PackedModel):
    reason, line = "POSITION_GENERATOR", "min("

    def mix(self, h: Tensor) -> Tensor:
        return h * min(h.shape[1], 512)


class LengthReturned(PackedModel):
    reason, line = "POSITION_GENERATOR", "labels.flatten()"
    alone = True  # who returns the number is not seen in the line where it was first asked for

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items), labels.numel()


class ScaledByLength(PackedModel):
    """Attention by hand, with a scale of the shard's length."""

    reason, line = "KERNEL", "q @ k.mT"

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return (q @ k.mT * q.shape[2] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
