"""What each token gets of a number over all tokens of the row.

    x.softmax(1)    exp(x - logsumexp of all ranks)
    batch_norm      (x - mean) / sqrt(var), of the tokens of all ranks; running statistics are of these, too

The number is whole, and tokens of all ranks read it: its gradient is summed over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Rows, TensorState
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.locality.rules.spread import can_spread
from cp_rewrite.passes.values.resolution import OfSums, Ranks, RunOverRanks

from .wholes import LogSumExp, Mean, rows_reduced, wide


def softmax(call: Call) -> tuple[States, RunOverRanks]:
    """_softmax, _log_softmax: every token takes in all others, those of no document too."""
    rows = rows_reduced(call)
    call.use_positions(call.first)
    call.events.sums_padding |= rows.attended
    return Rows(rows.dims), Softmax(rows.dims, call.outs[0].dtype)


def batch_norm(call: Call) -> tuple[States, RunOverRanks]:
    """batch_norm in training: statistics over tokens, with channels in dim 1."""
    rows = call.rows(call.first)
    trains = call.arg("training") or call.name == "_batch_norm_with_update"
    if rows is None or not trains or not can_spread(rows) or rows.dims[1] is not None:
        raise Mixes(f"{call.name} of something else than rows of tokens with channels in dim 1")
    if any(call.state(x) is not REPLICATED for x in call.tensors[1:]):
        raise Mixes(f"{call.name} by tokens")
    call.use_positions(call.first)
    call.events.sums_padding |= rows.attended
    return [Rows(rows.dims), *[WHOLE] * (len(call.outs) - 1)], BatchNorm(rows.dims)


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


@dataclass(frozen=True)
class BatchNorm(Mean):
    written: ClassVar[TensorState] = REPLICATED
    """Running statistics are the same on all ranks."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        x, like = wide(args["input"]), [-1, *[1] * (args["input"].ndim - 2)]
        dims = [dim for dim in range(x.ndim) if dim != 1]
        mean, count = self.mean(ranks, x, dims, False), self.count(ranks, x, dims)
        variance = self.squares(ranks, x, mean.view(like), dims, False) / count
        root = (variance + args["eps"]).rsqrt()
        found = (x - OfSums.SUM_GRADIENT(mean, ranks).view(like)) * OfSums.SUM_GRADIENT(root, ranks).view(like)
        found = found if args["weight"] is None else found * args["weight"].view(like)
        found = found if args["bias"] is None else found + args["bias"].view(like)
        if args.get("running_mean") is not None:
            news = {"running_mean": mean, "running_var": variance * count / (count - 1)}
            for name, new in news.items():
                args[name].copy_(args[name].lerp(new.detach().to(args[name].dtype), args["momentum"]))
        return found.to(args["input"].dtype), mean.detach(), root.detach()
