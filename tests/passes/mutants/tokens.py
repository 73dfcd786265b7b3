"""Something outside attention sums, shifts or normalises over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.packed_model import WIDTH, PackedModel


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


class LinearAttention(PackedModel):
    reason, line = "TOKEN_MIXING", "h @ state"

    def mix(self, h: Tensor) -> Tensor:
        state = torch.einsum("btd,bte->bde", h, h)
        return h + h @ state


class ManualAttention(PackedModel):
    """One head over all tokens of the row: read as attention without a mask."""

    reason, line = None, ""

    def mix(self, h: Tensor) -> Tensor:
        return (h @ h.mT).softmax(-1) @ h


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
