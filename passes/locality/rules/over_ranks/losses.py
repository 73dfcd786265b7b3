"""Losses over the tokens of all ranks: means of them, and sums without the rows that fill a rank up.

nll_loss    sum of parts of losses / sum of parts of weights
mse_loss    sum of parts of losses / all tokens; a sum over tokens is a part
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes, broadcast, checked
from cp_rewrite.passes.locality.claims.tensor_state import WHOLE, Partial, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.losses import nll_rows
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.locality.rules.spread import can_spread
from cp_rewrite.passes.values.resolution import Ranks, Whole

from .wholes import Mean, OverTokens, wide


def mean_loss(call: Call) -> tuple[States, Whole]:
    """mse_loss and the like with reduction="mean": a loss per token, and their mean."""
    if call.arg("reduction") != 1:
        raise Mixes("takes no mean")
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    if not can_spread(rows):
        raise Mixes("loss of rows that are sorted")
    return WHOLE, MeanLoss(rows.dims)


def summed_loss(call: Call) -> tuple[States, Whole]:
    """mse_loss, binary_cross_entropy and the like with reduction="sum", where losses of fill are not 0."""
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    if call.arg("reduction") != 2 or not can_spread(rows):
        raise Mixes("takes no sum, or one of rows that are sorted")
    return Partial(), SummedLoss(rows.dims)


def nll_loss(call: Call) -> tuple[States, Whole]:
    """cross_entropy with reduction="mean". Targets of rows without a token are ignored."""
    rows, _ = nll_rows(call)
    if call.arg("reduction") != 1 or not can_spread(rows):
        raise Mixes("takes no mean of losses, or one of rows that are sorted")
    return [WHOLE, WHOLE], MeanNLL(rows.dims)


@dataclass(frozen=True)
class MeanLoss(Mean):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        losses: Tensor = func(**{**args, "reduction": 0})
        return self.mean(ranks, wide(losses), list(range(losses.ndim)), False).to(losses.dtype)


@dataclass(frozen=True)
class SummedLoss(OverTokens):
    why: ClassVar[str] = "leaves out rows that fill a rank up"
    local: ClassVar[bool] = True

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        return self.keep(ranks, func(**{**args, "reduction": 0}), 0).sum()


@dataclass(frozen=True)
class MeanNLL(OverTokens):
    """The sum of losses over the sum of the targets' weights."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        target = self.keep(ranks, args["target"], args["ignore_index"])
        losses, weights = func(**{**args, "target": target, "reduction": 2})
        total, count = ranks.sum(torch.stack([losses, weights.to(losses.dtype)])).unbind()
        return total / count, count.detach()
