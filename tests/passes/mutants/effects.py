"""Random numbers, writes in place, batches, and ops that nothing is known about."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.helpers.packed_model import WIDTH, PackedModel


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
