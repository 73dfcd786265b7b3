"""Something outside attention mixes tokens, or draws numbers, or is not known to leave them alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.packed_model import WIDTH, PackedModel


class ShiftHidden(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, :-1]"

    def mix(self, h: Tensor) -> Tensor:
        return h + torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)


class TokenShiftByPad(PackedModel):
    reason, line = "TOKEN_MIXING", "F.pad"

    def mix(self, h: Tensor) -> Tensor:
        return h + F.pad(h, (0, 0, 1, -1))


class Roll(PackedModel):
    reason, line = "TOKEN_MIXING", "h.roll"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.roll(1, dims=1)


class RollEverything(PackedModel):
    reason, line = "TOKEN_MIXING", "torch.roll"

    def mix(self, h: Tensor) -> Tensor:
        return torch.roll(h, WIDTH)


class Flip(PackedModel):
    reason, line = "TOKEN_MIXING", "h.flip"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.flip(1)


class CumSum(PackedModel):
    reason, line = "TOKEN_MIXING", "h.cumsum"

    def mix(self, h: Tensor) -> Tensor:
        return h + 0.1 * h.cumsum(1)


class CumMax(PackedModel):
    reason, line = "TOKEN_MIXING", "h.cummax"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.cummax(1).values


class Diff(PackedModel):
    reason, line = "TOKEN_MIXING", "h.diff"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.diff(dim=1, prepend=h[:, :1])


class CausalConv(PackedModel):
    reason, line = "TOKEN_MIXING", "self.conv"

    def extra(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h + self.conv(h.mT)[..., : h.shape[1]].mT


class SameConv(PackedModel):
    reason, line = "TOKEN_MIXING", "self.conv"

    def extra(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def mix(self, h: Tensor) -> Tensor:
        return h + self.conv(h.mT).mT


class AveragePool(PackedModel):
    reason, line = "TOKEN_MIXING", "F.avg_pool1d"

    def mix(self, h: Tensor) -> Tensor:
        return h + F.avg_pool1d(h.mT, 3, 1, 1).mT


class MaxPool(PackedModel):
    reason, line, bakes_size = "TOKEN_MIXING", "F.max_pool1d", True

    def mix(self, h: Tensor) -> Tensor:
        return h + F.max_pool1d(h.mT, 3, 1, 1).mT


class BatchNorm(PackedModel):
    reason, line = "TOKEN_MIXING", "self.bn"

    def extra(self) -> None:
        self.bn = nn.BatchNorm1d(WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.bn(h.flatten(0, 1)).view_as(h)


class InstanceNorm(PackedModel):
    reason, line = "TOKEN_MIXING", "F.instance_norm"

    def mix(self, h: Tensor) -> Tensor:
        return F.instance_norm(h.mT).mT


class GroupNormOverTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "F.group_norm"

    def mix(self, h: Tensor) -> Tensor:
        return F.group_norm(h.mT, 2).mT


class NormOverTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.std"

    def mix(self, h: Tensor) -> Tensor:
        return h / h.std(dim=1, keepdim=True)


class SoftmaxOverTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.softmax"

    def mix(self, h: Tensor) -> Tensor:
        return h * h.softmax(1)


class MeanPool(PackedModel):
    reason, line = "TOKEN_MIXING", "h.mean"

    def mix(self, h: Tensor) -> Tensor:
        return h + h.mean(1, keepdim=True)


class MaxOverTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.amax"

    def mix(self, h: Tensor) -> Tensor:
        return h - h.amax(1, keepdim=True)


class SumOverTokensPutBack(PackedModel):
    reason, line = "TOKEN_MIXING", "h + s"

    def mix(self, h: Tensor) -> Tensor:
        s = h.sum(1, keepdim=True)
        return h + s


class PerTensorScale(PackedModel):
    reason, line = "TOKEN_MIXING", "h.abs().max()"

    def mix(self, h: Tensor) -> Tensor:
        return h / h.abs().max()


class DynamicGate(PackedModel):
    reason, line = "TOKEN_MIXING", "h.mean()"

    def mix(self, h: Tensor) -> Tensor:
        return torch.where(h.mean() > 0, h, -h)


class FirstToken(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, :1]"

    def mix(self, h: Tensor) -> Tensor:
        return h + h[:, :1]


class LastTokenLogits(PackedModel):
    reason, line = "TOKEN_MIXING", "logits[:, -1]"

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits[:, -1]


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


class SortTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "h.sort"

    def mix(self, h: Tensor) -> Tensor:
        return h.sort(1).values


class KeepBestTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "topk"

    def mix(self, h: Tensor) -> Tensor:
        best = h.norm(dim=-1).topk(3, dim=1).values
        return h * best.mean()


class LinearAttention(PackedModel):
    reason, line = "TOKEN_MIXING", "torch.einsum"

    def mix(self, h: Tensor) -> Tensor:
        state = torch.einsum("btd,bte->bde", h, h)
        return h + h @ state


class ManualAttention(PackedModel):
    reason, line = "TOKEN_MIXING", "h @ h.mT"

    def mix(self, h: Tensor) -> Tensor:
        return (h @ h.mT).softmax(-1) @ h


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


class ResidualDropout(PackedModel):
    reason, line = "DROPOUT", "F.dropout"

    def mix(self, h: Tensor) -> Tensor:
        return h + F.dropout(h, 0.1)


class Noise(PackedModel):
    reason, line = "DROPOUT", "rand_like"

    def mix(self, h: Tensor) -> Tensor:
        return h + 0.01 * torch.rand_like(h)


class MeanOverBatch(PackedModel):
    reason, line, rows = "TOKEN_MIXING", "h.mean(0", 2

    def mix(self, h: Tensor) -> Tensor:
        return h + h.mean(0, keepdim=True)


class OtherRowOfBatch(PackedModel):
    reason, line, rows = "TOKEN_MIXING", "h[0]", 2

    def mix(self, h: Tensor) -> Tensor:
        return h + h[0]


class FlipBatch(PackedModel):
    reason, line, rows = "TOKEN_MIXING", "h.flip(0)", 2

    def mix(self, h: Tensor) -> Tensor:
        return h + h.flip(0)


class WriteFirstToken(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, 0] = 0"

    def mix(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0] = 0
        return h


class AddShiftedInPlace(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, 1:] +="

    def mix(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 1:] += h[:, :-1].clone()
        return h


class CumSumInPlace(PackedModel):
    reason, line = "TOKEN_MIXING", "cumsum_"

    def mix(self, h: Tensor) -> Tensor:
        h = h.clone()
        h.cumsum_(1)
        return h


class WriteIntoView(PackedModel):
    reason, line = "TOKEN_MIXING", "select(1, 0)"

    def mix(self, h: Tensor) -> Tensor:
        h = h.clone()
        first = h.select(1, 0)
        first.mul_(0.5)
        return h


class RouteByIndexAdd(PackedModel):
    reason, line = "TOKEN_MIXING", "index_add"

    def mix(self, h: Tensor) -> Tensor:
        expert = (h[..., 0] > 0).long().flatten()
        sums = torch.zeros(2, WIDTH).index_add(0, expert, h.flatten(0, 1))
        return h + sums.mean(0)


class CapacityRouting(PackedModel):
    reason, line = "TOKEN_MIXING", "cumsum"

    def mix(self, h: Tensor) -> Tensor:
        chosen = F.one_hot((h[..., 0] > 0).long().flatten(), 2)
        place = chosen.cumsum(0) * chosen
        return h * (place.sum(-1) < 4).view(h.shape[:2]).unsqueeze(-1)


class CustomOp(PackedModel):
    reason, line = "NO_LOCALITY_RULE", "mutants.smooth"

    def mix(self, h: Tensor) -> Tensor:
        return torch.ops.mutants.smooth(h)


@torch.library.custom_op("mutants::smooth", mutates_args=())
def smooth(x: Tensor) -> Tensor:
    """An op whose name says nothing about tokens."""
    return x + x.roll(1, 1)


@smooth.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class InCheckpoint(PackedModel):
    reason, line = "TOKEN_MIXING", "h.roll"

    def mix(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: h + h.roll(1, 1), h, use_reentrant=False)  # type: ignore[return-value]


class FrequencyScaledEmbedding(PackedModel):
    reason, line = "TOKEN_MIXING", "scale_grad_by_freq"

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embed.weight, scale_grad_by_freq=True)


class RenormalisedEmbedding(PackedModel):
    reason, line = "NO_LOCALITY_RULE", "max_norm"

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embed.weight, max_norm=1.0)


class LookUpTokens(PackedModel):
    reason, line = "TOKEN_MIXING", "F.embedding"

    def mix(self, h: Tensor) -> Tensor:
        return h + F.embedding((h[..., 0] > 0).long(), h[0])


class AttentionTwice(PackedModel):
    """Its second attention sees all tokens of the row, packed or not: that is a mask too, and it is kept."""

    reason, line = None, ""

    def mix(self, h: Tensor) -> Tensor:
        x = h.unflatten(-1, (2, -1)).transpose(1, 2)
        return h + F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


class FlattenedFeedForward(PackedModel):
    """Right as it is: tokens in one dim with the batch, in place, chunked over features."""

    reason, line, rows = None, "", 2

    def mix(self, h: Tensor) -> Tensor:
        x = self.out(h.view(-1, WIDTH))
        gate = x[:, : WIDTH // 2] * 1
        gate.add_(x[:, WIDTH // 2 :])[:, :3] *= 2
        return h + torch.cat([gate, gate], dim=-1).view_as(h)
