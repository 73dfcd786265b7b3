"""Sums over tokens inside of an op, where no operand can be changed (`resolve/fill_sums.py`): fill is left out of
the sum.

    F.binary_cross_entropy_with_logits(x, y, reduction="sum")     where(has_token, the losses, 0).sum()

Each function names what an op gives while `NodeFacts.without_fill` is set: then a sum that takes in fill is refused as
it is (`reductions.sum_over_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes, broadcast, checked
from cp_rewrite.passes.locality.claims.tensor_state import Partial, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States, given_dims
from cp_rewrite.passes.locality.rules.spread import can_spread
from cp_rewrite.passes.values.resolution import Ranks, Whole

from .wholes import OverTokens, elementwise_loss


def summed(call: Call) -> tuple[States, Whole]:
    """sum, nansum, count_nonzero."""
    rows = call.rows(call.first)
    if rows is None or rows.token_dim not in given_dims(call):
        raise Mixes(f"{call.name} of something else than rows of tokens")
    return _without_fill(call, rows, SumWithoutFill(rows.dims))


def loss(call: Call) -> tuple[States, Whole]:
    """mse_loss, binary_cross_entropy and the like, with a mean or a sum."""
    if call.arg("reduction") == 1:
        return elementwise_loss(call)
    rows = Rows(checked(broadcast([call.entries(x) for x in call.tensors])))
    return _without_fill(call, rows, LossWithoutFill(rows.dims))


def _without_fill(call: Call, rows: Rows, whole: Whole) -> tuple[States, Whole]:
    if not call.facts.without_fill or not can_spread(rows):
        raise Mixes(f"{call.name} takes in rows without a token")
    return Partial(), whole


@dataclass(frozen=True)
class SumWithoutFill(OverTokens):
    why = "leaves out rows that fill a rank up"

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        return func(**{**args, "self": self.keep(ranks, args["self"], 0)})


@dataclass(frozen=True)
class LossWithoutFill(SumWithoutFill):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        return self.keep(ranks, func(**{**args, "reduction": 0}), 0).sum()
