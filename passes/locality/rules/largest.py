"""The place in the whole row of the first of the largest entries, as argmax gives it, and the k largest, as topk does:
each rank's k largest are candidates.

    tokens of rank 0, rank 1      3 8 1, 9 2 4      k = 2
    candidates (value, place)     8 1, 3 0          9 3, 4 5
    found                         9 3, 8 1          the values are then picked at their places

Of equal entries torch promises no order; here the first in the row comes first, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import WHOLE, B, Dims, Mixes, T
from cp_rewrite.passes.values.edits import Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import TOKEN_INDEX, TOKEN_ROWS, PlanInput

from .picked import Picked
from .rule import States, can_spread, rows_along, spread

_NOWHERE = torch.iinfo(torch.int64).max


def largest_place(call: Call) -> tuple[States, RunOverRanks]:
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


def topk(call: Call) -> tuple[States, RunOverRanks]:
    """As many as there are for any number of tokens."""
    rows, dim = rows_along(call, call.arg("dim"))
    if not isinstance(call.arg("k"), int):
        raise Mixes("topk of as many tokens as the shard happens to have")
    call.use_positions(call.first)
    return WHOLE, TopK(rows.dims, False, dim)


@dataclass(frozen=True)
class TopK(Picked):
    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return (TOKEN_ROWS, TOKEN_INDEX)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x, k, largest = args["self"], args["k"], bool(args["largest"])
        index_BT = ranks.joined_index if self.is_flat else ranks.token_index
        places = torch.where(spread(ranks.has_token, self.dims), spread(index_BT, self.dims), _NOWHERE)
        own = x.detach().movedim(self.dim, 0)
        own, places = _first(k, largest, own, places.expand(x.shape).movedim(self.dim, 0))
        own, places = (ranks.rows_of_ranks(each.reshape(1, -1)).view(-1, *each.shape[1:]) for each in (own, places))
        place = _first(k, largest, own, places)[1].movedim(0, self.dim)
        return self.gathered(ranks, x, place, place.shape), place


def _first(k: int, largest: bool, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The k first entries of dim 0 and their places, by value, then by place; without a place last."""
    if x.is_floating_point():  # nan is larger than all
        last = -torch.inf if largest else torch.nan
    else:
        last = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    by_place = places.argsort(dim=0, stable=True)
    x, places = x.gather(0, by_place), places.gather(0, by_place)
    x = torch.where(places == _NOWHERE, x.new_full((), last), x)
    by_value = x.argsort(dim=0, descending=largest, stable=True).narrow(0, 0, k)
    return x.gather(0, by_value), places.gather(0, by_value)
