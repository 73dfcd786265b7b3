"""What each token gets of a number over all tokens of the row: softmax and log_softmax over tokens.

    x.softmax(1)    exp(x - logsumexp of all ranks)

The number is whole, and tokens of all ranks read it: its gradient is summed over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.tensor_state import Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.values.resolution import OfSums, Ranks, Whole

from .wholes import LogSumExp, rows_reduced, wide


def softmax(call: Call) -> tuple[States, Whole]:
    """_softmax, _log_softmax: every token takes in all others, those of no document too."""
    rows = rows_reduced(call)
    call.use_positions(call.first)
    call.events.sums_padding |= rows.attended
    return Rows(rows.dims), Softmax(rows.dims, call.outs[0].dtype)


@dataclass(frozen=True)
class Softmax(LogSumExp):
    """dtype: of the result."""

    dtype: torch.dtype

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x, name = wide(args["self"]), func._schema.name
        total = OfSums.SUM_GRADIENT(self.total(ranks, x, [args["dim"] % x.ndim], True), ranks)
        logs = x - total
        found = logs if "log" in name else logs.exp()
        if "safe" in name:  # 0 where all are -inf
            found = torch.where(total == -torch.inf, 0.0, found)
        return found.to(self.dtype)
