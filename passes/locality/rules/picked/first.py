"""The place in the whole row of the first of the largest entries, as argmax gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import B, Dims, Mixes, T
from cp_rewrite.passes.locality.claims.tensor_state import WHOLE
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.locality.rules.spread import can_spread, spread
from cp_rewrite.passes.values.resolution import Ranks, Whole
from cp_rewrite.planning.plan_input import TOKEN_INDEX, PlanInput

_NOWHERE = torch.iinfo(torch.int64).max


def largest_place(call: Call) -> tuple[States, Whole]:
    """argmax, argmin over tokens."""
    rows, dim = call.rows(call.first), call.arg("dim")
    if rows is None or not can_spread(rows) or (dim is None and call.first.ndim > 1):
        raise Mixes(f"{call.name} of something else than rows of tokens")
    dim = (dim or 0) % call.first.ndim
    if rows.dims[dim] not in ((T,), (B, T)):
        raise Mixes(f"{call.name} over something else than tokens")
    return WHOLE, LargestPlace(rows.dims, dim)


@dataclass(frozen=True)
class LargestPlace:
    """dims: of the tensor. dim: of its tokens."""

    dims: Dims
    dim: int
    reads: ClassVar[tuple[PlanInput, ...]] = (TOKEN_INDEX,)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"].detach()
        x = x.nan_to_num(nan=torch.inf) if x.is_floating_point() else x.to(torch.int64)
        least = -torch.inf if x.is_floating_point() else torch.iinfo(torch.int64).min
        x = -x if "argmin" in func._schema.name else x
        has_token = spread(ranks.has_token, self.dims)
        kept = torch.where(has_token, x, x.new_full((), least))
        equal = (kept == ranks.most(kept.amax(self.dim, keepdim=True))) & has_token
        return first_place(ranks, equal, self.dims, [self.dim], bool(args.get("keepdim")))


def first_place(ranks: Ranks, chosen: Tensor, dims: Dims, reduced: Sequence[int], keepdim: bool) -> Tensor:
    """int64: the first place in the whole row of the tokens that are `chosen`, a tensor with these dims."""
    index_BT = ranks.joined_index if any(dim == (B, T) for dim in dims) else ranks.token_index
    places = torch.where(chosen, spread(index_BT, dims), _NOWHERE)
    return -ranks.most(-places.amin(reduced, keepdim=keepdim))
