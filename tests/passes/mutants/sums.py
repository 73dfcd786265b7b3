"""A sum over tokens is a rank's part of the sum: what is done with it must be linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.packed_model import VOCAB, WIDTH, PackedModel


def each_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, T) losses, 0 where there is no target."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def loads(h: Tensor) -> tuple[Tensor, Tensor]:
    """(each token's expert (B, T), tokens per expert (2,))."""
    chosen = (h[..., 0] > 0).long()
    return chosen, F.one_hot(chosen, 2).sum((0, 1))


class LoadOfOwnExpert(PackedModel):
    reason, line = "TOKEN_MIXING", "load[chosen]"

    def mix(self, h: Tensor) -> Tensor:
        chosen, load = loads(h)
        return h * (1 + 0.1 * load[chosen][..., None])


class LoadSelected(PackedModel):
    reason, line = "TOKEN_MIXING", "load.index_select"

    def mix(self, h: Tensor) -> Tensor:
        chosen, load = loads(h)
        return h * load.index_select(0, chosen.flatten()).view_as(chosen)[..., None]


class TableAtCount(PackedModel):
    reason, line = "TOKEN_MIXING", "self.scales[count]"

    def extra(self) -> None:
        self.scales = nn.Parameter(torch.rand(64))

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        count = (labels != -100).sum(1)
        return (each_loss(logits, labels) * self.scales[count]).sum()


class PaddedSum(PackedModel):
    reason, line = "TOKEN_MIXING", "F.pad"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.pad(each_loss(logits, labels).sum(1), (0, 1), value=1.0).sum() / num_items


class BalanceBySums(PackedModel):
    reason, line = "TOKEN_MIXING", "share.sum(0) * picked.sum(0)"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        share = logits[..., :4].flatten(0, 1).softmax(-1)
        picked = F.one_hot(share.argmax(-1), 4)
        return super().loss(logits, labels, num_items) + (share.sum(0) * picked.sum(0)).sum() / num_items**2


class Covariance(PackedModel):
    reason, line = "TOKEN_MIXING", "square()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        x = logits.flatten(0, 1)
        gram = x.T @ x
        return super().loss(logits, labels, num_items) + gram.square().sum() / num_items**2


class VarianceOfLosses(PackedModel):
    reason, line = "TOKEN_MIXING", "mean * mean"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        each = each_loss(logits, labels)
        mean = each.sum() / num_items
        return each.square().sum() / num_items - mean * mean


class WeightsNormalised(PackedModel):
    reason, line = "TOKEN_MIXING", "weights / weights.sum()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        weights = (labels != -100) * (1.0 + (labels > 3))
        return (each_loss(logits, labels) * (weights / weights.sum())).sum()


class WeightsNormalisedByPower(PackedModel):
    reason, line = "TOKEN_MIXING", "** -1"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        weights = (labels != -100).float()
        return (each_loss(logits, labels) * weights).sum() * weights.sum() ** -1


class WeightsNormalisedByNorm(PackedModel):
    reason, line = "TOKEN_MIXING", "F.normalize"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return (each_loss(logits, labels) * F.normalize((labels != -100).float(), p=1, dim=-1)).sum()


class LogRatioOfDocuments(PackedModel):
    """A preference loss: log probabilities of documents, through a sigmoid."""

    reason, line = "TOKEN_MIXING", "F.logsigmoid"

    def forward(self, doc_ids: Tensor, **rest: Tensor) -> Any:  # type: ignore[override]
        self.member = F.one_hot(doc_ids, 3)
        return super().forward(doc_ids=doc_ids, **rest)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        of_document = (self.member * each_loss(logits, labels)[..., None]).sum((0, 1))
        return -F.logsigmoid(of_document[0] - of_document[1])


class MeansOfDocuments(LogRatioOfDocuments):
    reason, line = "TOKEN_MIXING", "index_add"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        documents = self.member.argmax(-1).flatten()
        return torch.zeros(3).index_add(0, documents, each_loss(logits, labels).flatten()).mean()


class RewardAtLastTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "logits[0, last, 0]"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        last = torch.tensor([4, 8])
        reward = logits[0, last, 0]
        return -F.logsigmoid(reward[0] - reward[1])


class InBatchContrast(PackedModel):
    reason, line = "TOKEN_MIXING", "z @ z.T"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        z = F.normalize(logits.flatten(0, 1), dim=-1)
        return (z @ z.T).logsumexp(-1).sum()


class RowsTimesRows(PackedModel):
    """Pairs tokens of the batch's rows by their place; each row is cut in an order of its own."""

    reason, line, rows = "TOKEN_MIXING", "each @ each.T", 2

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        each = each_loss(logits, labels)
        return (each @ each.T).sum() / num_items


class FilledByItem(PackedModel):
    """Zeros, until something is written into a part of them: rows that fill up a rank count."""

    reason, line = "padding", "parts.sum()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        parts = torch.zeros_like(logits[..., :2])
        parts[..., 0] = logits.logsumexp(-1)
        return parts.sum() / num_items


class AddedConstant(PackedModel):
    reason, line = "TOKEN_MIXING", "+ 1e-8"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return each_loss(logits, labels).sum() + 1e-8


class UncertaintyWeight(PackedModel):
    reason, line = "TOKEN_MIXING", "+ self.s"

    def extra(self) -> None:
        self.s = nn.Parameter(torch.zeros(()))

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return torch.exp(-self.s) * super().loss(logits, labels, num_items) + self.s


class MaskedBySums(PackedModel):
    """Right as it is: a product over tokens is a sum, and a sum may start from 0."""

    reason, line = None, ""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        keep = (labels != -100).float()
        losses = torch.dot(each_loss(logits, labels).flatten(), keep.flatten())
        cap = torch.einsum("bt,bt->", logits.logsumexp(-1), keep)
        return sum([losses, 0.1 * cap]) / num_items


class SmoothedAndWeighted(PackedModel):
    """Right as it is: label smoothing and weights of classes, summed."""

    reason, line, rows = None, "", 2

    def extra(self) -> None:
        self.register_buffer("classes", torch.rand(VOCAB))

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        flat = logits.flatten(0, 1), labels.flatten(), self.classes
        return F.cross_entropy(*flat, reduction="sum", label_smoothing=0.1) / num_items


class HeadOfNormalisedWeights(PackedModel):
    """Right as it is: power iteration writes buffers, alike on all ranks."""

    reason, line = None, ""

    def extra(self) -> None:
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return h + self.spectral(h)
