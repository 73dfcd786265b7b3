"""Positions or the token count, made inside the model, describe the shard."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.packed_model import WIDTH, PackedModel


class PositionsFromArange(PackedModel):
    """Made right: arange becomes the rows' places in the global row."""

    reason, line = None, ""

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return torch.arange(h.shape[1], device=h.device)[None, :, None].float()


class LearnedPositions(PackedModel):
    """Made right: a learned embedding of arange."""

    reason, line = None, ""

    def extra(self) -> None:
        self.places = nn.Embedding(64, WIDTH)

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        places = torch.arange(0, input_ids.size(1), dtype=torch.long, device=input_ids.device)
        return self.embed(input_ids) + self.places(places)


class ShiftedArange(PackedModel):
    """Made right: arange with an offset and a scale after it."""

    reason, line = None, ""

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return ((torch.arange(h.shape[1]) + 2) * 0.5)[None, :, None]


class TableOfPositions(PackedModel):
    """Made right: the first T rows of a table become the rows of the global positions."""

    reason, line = None, ""

    def extra(self) -> None:
        self.places = nn.Parameter(torch.randn(64, WIDTH))

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embed(input_ids) + self.places[: input_ids.shape[1]]


class CachedAngles(PackedModel):
    """Made right, too."""

    reason, line = None, ""

    def extra(self) -> None:
        self.register_buffer("table", torch.arange(64.0)[None, :, None])

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return self.table[:, : h.shape[1]]  # type: ignore[index]


class PositionsFromCumSum(PackedModel):
    reason, line = "TOKEN_MIXING", "cumsum"

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return (torch.ones_like(position_ids).cumsum(1) - 1)[..., None].float()


class PositionsFromDocuments(PackedModel):
    reason, line = "TOKEN_MIXING", "doc_ids.diff"

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, **rest: Tensor
    ) -> Tensor:
        start = F.pad(doc_ids.diff(dim=1) != 0, (1, 0), value=True)
        index = torch.arange(doc_ids.shape[1])[None]
        position_ids = index - (index * start).cummax(1).values
        return super().forward(input_ids, position_ids, doc_ids, **rest)


class PositionsFromPadding(PackedModel):
    reason, line = "TOKEN_MIXING", "cumsum"

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        places = (input_ids != 0).long().cumsum(-1)
        return self.embed(input_ids) + places[..., None]


class LinSpace(PackedModel):
    reason, line, bakes_size = "POSITION_GENERATOR", "angles", True

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return torch.linspace(0, 1, h.shape[1])[None, :, None]


class ReversedArange(PackedModel):
    reason, line = "POSITION_GENERATOR", "h.shape[1] - 1 -"

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return (h.shape[1] - 1 - torch.arange(h.shape[1]))[None, :, None].float()


class TableFromOne(PackedModel):
    reason, line = "POSITION_GENERATOR", "self.places[1 :"

    def extra(self) -> None:
        self.places = nn.Parameter(torch.randn(64, WIDTH))

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embed(input_ids) + self.places[1 : input_ids.shape[1] + 1]


class ArangeFromOne(PackedModel):
    reason, line = "POSITION_GENERATOR", "places.float()"

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        places = torch.arange(1, h.shape[1] + 1)[None, :, None]
        return places.float()


class RelativePlace(PackedModel):
    reason, line = "POSITION_GENERATOR", "/ h.shape[1]"

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return (position_ids / h.shape[1])[..., None]


class LengthScale(PackedModel):
    reason, line = "POSITION_GENERATOR", "h.shape[1] ** -0.5"

    def mix(self, h: Tensor) -> Tensor:
        return h * h.shape[1] ** -0.5


class GammaLengthScale(PackedModel):
    """Torch itself refuses to capture this with a dynamic token dim: the function makes the size a constant."""

    reason, line, bakes_size = "POSITION_GENERATOR", "math.gamma", True

    def mix(self, h: Tensor) -> Tensor:
        return h * math.gamma(h.shape[1])


class FilledWithLength(PackedModel):
    reason, line = "POSITION_GENERATOR", "torch.full"

    def mix(self, h: Tensor) -> Tensor:
        return h / torch.full((), h.shape[1])


class LengthDependentBase(PackedModel):
    reason, line = "POSITION_GENERATOR", "base"

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        base = 10000.0 * h.shape[1] / 8
        frequency = 1.0 / torch.full((1,), 1.0).mul(base)
        return position_ids[..., None] * frequency


class ArangeIndexesTokens(PackedModel):
    """Right as it is: arange only walks the rows of the shard, and must not become global."""

    reason, line = None, ""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        log_p, target = logits.log_softmax(-1).flatten(0, 1), labels.flatten()
        each = -log_p[torch.arange(len(target)), target.clamp(min=0)]
        return (each * (target != -100)).sum() / num_items


class ArangeIndexesAndCounts(PackedModel):
    reason, line = "POSITION_GENERATOR", "torch.arange"

    def mix(self, h: Tensor) -> Tensor:
        index = torch.arange(h.shape[1])
        return h[:, index] + index[:, None]


class FlatArange(PackedModel):
    reason, line, rows = "POSITION_GENERATOR", "places.view", 2

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.numel())
        return self.embed(input_ids) + places.view(input_ids.shape)[..., None]


class PositionsInPlace(PackedModel):
    reason, line = "POSITION_GENERATOR", "places.add_"

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        places.add_(1)
        return self.embed(input_ids) + places[:, None]


class RepeatedArange(PackedModel):
    """Made right: positions repeated for each row of the batch."""

    reason, line, rows = None, "", 2

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return torch.arange(h.shape[1]).unsqueeze(0).repeat(h.shape[0], 1)[..., None].float()


class UnboundArange(PackedModel):
    """Made right: positions through a padding and a split of features."""

    reason, line = None, ""

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        padded = F.pad(torch.arange(h.shape[1])[:, None], (1, 0))
        return padded.unbind(1)[1][None, :, None].float()


class WalkBackwards(PackedModel):
    reason, line = "TOKEN_MIXING", "h[:, torch.arange"

    def mix(self, h: Tensor) -> Tensor:
        return h + h[:, torch.arange(h.shape[1] - 1, -1, -1)]
