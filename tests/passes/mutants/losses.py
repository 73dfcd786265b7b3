"""The loss is not a sum of the ranks' parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.helpers.packed_model import VOCAB, PackedModel


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


class ShiftInLoss(PackedModel):
    reason, line = "TOKEN_MIXING", "logits[:, :-1]"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        a, b = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(a.reshape(-1, VOCAB), b.reshape(-1), reduction="sum") / num_items


class ShiftOfTransformers(PackedModel):
    reason, line = "TOKEN_MIXING", "nn.functional.pad(labels"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return ForCausalLMLoss(logits, labels, VOCAB, num_items)


class MeanOfTransformers(PackedModel):
    reason, line = "TOKEN_MIXING", "nn.functional.cross_entropy"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return ForCausalLMLoss(logits, labels, VOCAB, shift_labels=labels)


class MeanCrossEntropy(PackedModel):
    reason, line = "TOKEN_MIXING", "F.cross_entropy"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(*flat(logits, labels))


class MeanCrossEntropyOverClassDim(PackedModel):
    reason, line = "TOKEN_MIXING", "F.cross_entropy"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(logits.mT, labels)


class MeanOfTokenLosses(PackedModel):
    reason, line = "TOKEN_MIXING", "each.mean()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        each = F.cross_entropy(*flat(logits, labels), reduction="none")
        return each.mean()


class DividedByTokenCount(PackedModel):
    reason, line = "POSITION_GENERATOR", "labels.numel()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        total = F.cross_entropy(*flat(logits, labels), reduction="sum")
        return total / labels.numel()


class DividedByLocalTargets(PackedModel):
    reason, line = "TOKEN_MIXING", "total / targets"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        total = F.cross_entropy(*flat(logits, labels), reduction="sum")
        targets = (labels != -100).sum()
        return total / targets


class DividedByClampedTargets(PackedModel):
    reason, line = "TOKEN_MIXING", "clamp"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        keep = (labels != -100).flatten()
        each = F.cross_entropy(*flat(logits, labels), reduction="none") * keep
        return each.sum() / keep.sum().clamp(min=1)


class DividedPerRow(PackedModel):
    reason, line, rows = "TOKEN_MIXING", "each.sum(1) /", 2

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        each = F.cross_entropy(logits.mT, labels, reduction="none")
        return (each.sum(1) / (labels != -100).sum(1)).mean()


class Perplexity(PackedModel):
    reason, line = "TOKEN_MIXING", "torch.exp"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return torch.exp(super().loss(logits, labels, num_items))


class WeightPenalty(PackedModel):
    reason, line = "TOKEN_MIXING", "self.head.weight"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items) + 0.1 * self.head.weight.square().sum()


class WeightPenaltyApart(PackedModel):
    reason, line = "TOKEN_MIXING", "self.head.weight"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items), 0.1 * self.head.weight.square().sum()


class PenaltyWithPadding(PackedModel):
    """Rows that fill up a rank would count in the sum: batches that have such rows are refused when they come."""

    reason, line = "padding", "logsumexp"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items) + logits.logsumexp(-1).square().sum() / num_items


class Accuracy(PackedModel):
    reason, line = "TOKEN_MIXING", "logits.argmax(-1) == labels"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items), (logits.argmax(-1) == labels).float().mean()


class NormOfEverything(PackedModel):
    reason, line = "TOKEN_MIXING", "logits.norm()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits.norm()


class SquareRootOfSum(PackedModel):
    reason, line = "TOKEN_MIXING", "sqrt"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items).sqrt()


class LossTimesItself(PackedModel):
    reason, line = "TOKEN_MIXING", "part * part.detach()"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        part = super().loss(logits, labels, num_items)
        return part * part.detach()


class LabelSmoothing(PackedModel):
    reason, line = "TOKEN_MIXING", "label_smoothing"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(*flat(logits, labels), label_smoothing=0.1)


class MeanSquares(PackedModel):
    reason, line = "TOKEN_MIXING", "F.mse_loss"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.mse_loss(logits[..., 0], labels.float())


class MeanBinary(PackedModel):
    reason, line = "TOKEN_MIXING", "F.binary_cross_entropy_with_logits"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.binary_cross_entropy_with_logits(logits[..., 0], (labels > 3).float())


class KullbackMean(PackedModel):
    reason, line = "TOKEN_MIXING", "F.kl_div"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.kl_div(logits.log_softmax(-1), logits.detach().softmax(-1), reduction="mean")


class OtherIgnoredLabel(PackedModel):
    """Rows that fill up a rank carry -100, which this loss takes for a target."""

    reason, line = "padding", "ignore_index=0"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(*flat(logits, labels), ignore_index=0, reduction="sum") / num_items


class LoadBalance(PackedModel):
    reason, line = "TOKEN_MIXING", "probabilities.mean"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        probabilities = logits.softmax(-1).flatten(0, 1)
        share = probabilities.mean(0)
        return super().loss(logits, labels, num_items) + share.square().sum()


class MaskedPick(PackedModel):
    reason, line = "TOKEN_MIXING", "where(keep.flatten())"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        keep = labels != -100
        rows = torch.where(keep.flatten())[0]
        return logits.flatten(0, 1)[rows].sum() / num_items


class TokenLosses(PackedModel):
    """Right as it is: one loss per token, weighed and summed; padding rows count 0."""

    reason, line, rows = None, "", 2

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        each = F.cross_entropy(*flat(logits.float(), labels), reduction="none").view_as(labels)
        extra = torch.where(labels != -100, logits.logsumexp(-1).square(), 0.0)
        return ((each * (1 + 0.1 * (labels > 2))).sum() + 1e-2 * extra.sum()) / num_items


class GatheredLogProbabilities(PackedModel):
    """Right as it is: log probability of each label by gather."""

    reason, line = None, ""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        keep = labels != -100
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -log_p.masked_fill(~keep, 0.0).sum() / num_items
