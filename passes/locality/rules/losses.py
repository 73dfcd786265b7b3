"""Losses: one per token; summed over the shard's tokens; means, and sums without the rows that fill a rank up, over the
tokens of all ranks.

nll_loss    sum of parts of losses / sum of parts of weights
mse_loss    sum of parts of losses / all tokens; a sum over tokens is a part
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.advice import MEAN_HINT
from cp_rewrite.passes.locality.claims.dims import Mixes, broadcast, checked, merge
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Partial, Rows, TensorState
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.values.resolution import Ranks, RunOverRanks
from cp_rewrite.refusal import Reason

from .elementwise import fill_of, pointwise
from .over_ranks.wholes import Mean, OverTokens, wide
from .reductions import sum_over_tokens
from .rule import States
from .spread import can_spread

_NONE, _MEAN = 0, 1
"""What ATen calls reduction="none" and reduction="mean"."""
_ZERO_OF_EQUALS = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that are 0 where both operands are."""


def nll_loss(call: Call) -> list[TensorState]:
    """Scores (N, C, …), targets (N, …): one loss per target."""
    rows, zero = nll_rows(call)
    return [_reduced(call, rows, zero), Partial()]


def nll_rows(call: Call) -> tuple[Rows, bool]:
    """(the rows of the losses, whether rows without a token are ignored)."""
    scores, target = call.arg("self"), call.arg("target")
    rows = call.rows(scores)
    if rows is None or call.rows(target) is None or call.state(call.arg("weight")) is not REPLICATED:
        raise Mixes("pairs token scores with targets that are not cut like them", Reason.TOKEN_MIXING)
    if scores.ndim > 1:
        call.refuse_axis(rows, 1, "takes classes from")
    entries = call.entries(scores)
    dims = [merge(pair) for pair in zip([entries[0], *entries[2:]], call.entries(target), strict=True)]
    checked(dims)
    targets = call.rows(target)
    zero = targets is not None and targets.fill is not None and targets.fill == call.arg("ignore_index")
    return Rows(checked(dims), fill=0 if zero else None), zero


def elementwise_loss(call: Call) -> TensorState:
    """mse_loss, smooth_l1_loss, binary_cross_entropy and the like, by their `reduction`."""
    if any(not isinstance(call.state(x), Rows) and call.state(x) is not REPLICATED for x in call.tensors):
        return pointwise(call)
    dims = broadcast([call.entries(x) for x in call.tensors])
    zero = call.name in _ZERO_OF_EQUALS and all(fill_of(call, x) == 0 for x in call.tensors)
    return _reduced(call, Rows(checked(dims), fill=0 if zero else None), zero)


def _reduced(call: Call, rows: Rows, zero: bool) -> TensorState:
    """Losses per token, or their sum. `zero`: those of fill are 0."""
    reduction = call.arg("reduction")
    if reduction == _NONE:
        return rows
    if reduction == _MEAN:
        raise Mixes(
            f"{call.name} takes the mean over the shard's tokens, and a mean of means is not the mean: "
            f"use reduction='sum'; {MEAN_HINT}"
        )
    return sum_over_tokens(call, zero)


def token_mean(call: Call) -> list[TensorState]:
    """`cp.token_mean`: its value is global, its gradient this rank's part."""
    total, count = (call.state(call.arg(name)) for name in ("total", "count"))
    if total != Partial() or count != Partial():
        raise Mixes("cp.token_mean takes this rank's sum over tokens and this rank's number of tokens")
    return [WHOLE, REPLICATED]


def mean_loss(call: Call) -> tuple[States, RunOverRanks]:
    """mse_loss and the like with reduction="mean": a loss per token, and their mean."""
    if call.arg("reduction") != 1:
        raise Mixes("takes no mean")
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    if not can_spread(rows):
        raise Mixes("loss of rows that are sorted")
    return WHOLE, MeanLoss(rows.dims)


def summed_loss(call: Call) -> tuple[States, RunOverRanks]:
    """mse_loss, binary_cross_entropy and the like with reduction="sum", where losses of fill are not 0."""
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    if call.arg("reduction") != 2 or not can_spread(rows):
        raise Mixes("takes no sum, or one of rows that are sorted")
    return Partial(), SummedLoss(rows.dims)


def mean_nll(call: Call) -> tuple[States, RunOverRanks]:
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
