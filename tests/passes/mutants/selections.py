"""Tokens are picked, put elsewhere or paired by their place in the row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.packed_model import WIDTH, PackedModel


class FirstToken(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, :1]"

    def mix(self, h: Tensor) -> Tensor:
        return h + h[:, :1]


class LastTokenLogits(PackedModel):
    reason, line = "TOKEN_MIXING", "logits[:, -1]"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits[:, -1].sum()


class EveryOtherToken(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, ::2]"

    def mix(self, h: Tensor) -> Tensor:
        return h + h[:, ::2].sum(1, keepdim=True)


class ReversedByIndex(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, order]"

    def mix(self, h: Tensor) -> Tensor:
        order = torch.tensor([1, 0])
        return h + h[:, order].sum(1, keepdim=True)


class GatherTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.gather"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.gather(1, (h > 0).long())


class SelectTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.index_select"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.index_select(1, torch.tensor([2], device=h.device))


class FrequenciesOfTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "torch.fft.fft(h"

    def mix(self, h: Tensor) -> Tensor:
        return torch.fft.fft(h, dim=1).real


class KeepBestTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "topk"

    def mix(self, h: Tensor) -> Tensor:
        best = h.norm(dim=-1).topk(3, dim=1).values
        return h * best.mean()


class PairsOfTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.unflatten"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.unflatten(1, (-1, 2)).mean(2, keepdim=True).expand(-1, -1, 2, -1).flatten(1, 2)


class Windows(PackedModel):
    reason, line = "TOKEN_MIXING", "unfold"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.unfold(1, 2, 2).sum(1).sum(-1)[:, None]


class OneDocumentPerStride(PackedModel):
    reason, line = "NO_LOCALITY_RULE", "as_strided"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.as_strided((1, 1, WIDTH), (WIDTH, WIDTH, 1), 0)


class PromptTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "torch.cat"

    def extra(self) -> None:
        self.prompt = nn.Parameter(torch.randn(1, 2, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return torch.cat([self.prompt, h], dim=1)[:, 2:]


class LookUpTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "F.embedding"

    def mix(self, h: Tensor) -> Tensor:
        return h + F.embedding((h[..., 0] > 0).long(), h[0])
