"""Attention written out by hand, and what it may do between its two products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.packed_model import HEADS, PackedModel


class ScoresByHand(PackedModel):
    """Read as attention."""

    reason, line = None, ""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep, -torch.inf).softmax(-1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return self.weights(q @ k.mT, mask) @ v


class SinkPerHead(ScoresByHand):
    """Read as attention with sinks."""

    reason, line = None, ""

    def extra(self) -> None:
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        column = self.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat([scores.masked_fill(~keep, -torch.inf), column], -1).softmax(-1)[..., :-1]


class SinkPerToken(ScoresByHand):
    reason, line = "KERNEL", "torch.cat"

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return torch.cat([scores.masked_fill(~keep, -torch.inf), scores[..., :1]], -1).softmax(-1)[..., :-1]


class MaskedWeights(ScoresByHand):
    reason, line = "KERNEL", "* keep"

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.softmax(-1) * keep


class MaskedInPlaceUnseen(ScoresByHand):
    """Right as it is: scores are read after what is written into them."""

    reason, line = None, ""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        scores.masked_fill_(~keep, -torch.inf)
        return scores.softmax(-1)


class MaskOfScores(ScoresByHand):
    reason, line = "KERNEL", "q @ k.mT"

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return (scores.masked_fill(~keep, -torch.inf) + scores.detach()).softmax(-1)


class NormOverQueries(ScoresByHand):
    reason, line = "KERNEL", "softmax(-2)"

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep, -torch.inf).softmax(-2)


class BiasByDistance(ScoresByHand):
    reason, line = "MASK_NOT_PACKED", "i[:, None]"

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        i = torch.arange(scores.shape[-1], device=scores.device)
        return (scores + (i[None, :] - i[:, None]) * 0.1).masked_fill(~keep, -torch.inf).softmax(-1)


class ScoresAddedToThemselves(ScoresByHand):
    """As if they were the mask."""

    reason, line = "KERNEL", "q @ k.mT"

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return (scores + scores).masked_fill(~keep, -torch.inf).softmax(-1)
