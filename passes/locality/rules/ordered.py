"""Tokens by their value: the first of the largest, the k largest, the k-th, the middle one, all of them in order.

    tokens of rank 0, rank 1      3 8 1, 9 2 4
    topk(2)                       candidates of each rank (value, place): 8 1, 3 0 and 9 3, 4 5; found: 9 3, 8 1;
                                  the values are then picked at their places
    sort                          every rank gets the tokens of all, and keeps of their order what stands at the
                                  places of its own tokens: 1 2 3, 4 8 9
    kthvalue, median              the same, and the one at that place is picked

`quantile` is a sort of which torch gathers two entries. Of equal entries torch promises no order; here the first in the
row comes first, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import WHOLE, B, Dims, Mixes, Rows, T, of_row
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
    return -ranks.most(-_places(ranks, chosen, dims).amin(reduced, keepdim=keepdim))


def _index(ranks: Ranks, dims: Dims) -> Tensor:
    """int64: the place in the whole row of each token, broadcasts against a tensor with these dims."""
    return spread(ranks.joined_index if (B, T) in dims else ranks.token_index, dims)


def _places(ranks: Ranks, chosen: Tensor, dims: Dims) -> Tensor:
    """int64: the places in the whole row of tokens that are `chosen`; `_NOWHERE` of others."""
    return torch.where(chosen, _index(ranks, dims), _NOWHERE)


@dataclass(frozen=True)
class _ByValue(Picked):
    """Tokens of all ranks in the order of their values."""

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return (TOKEN_ROWS, TOKEN_INDEX)

    def own(self, ranks: Ranks, x: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's entries, tokens in dim 0, and their places in the whole row."""
        places = _places(ranks, spread(ranks.has_token, self.dims), self.dims).expand(x.shape)
        return x.movedim(self.dim, 0), places.movedim(self.dim, 0)


def topk(call: Call) -> tuple[States, RunOverRanks]:
    """The k largest of all ranks, where k is a plain number."""
    rows, dim = rows_along(call, call.arg("dim"))
    if not isinstance(call.arg("k"), int):
        raise Mixes("topk of as many tokens as the shard happens to have")
    call.use_positions(call.first)
    return WHOLE, TopK(rows.dims, False, dim)


class TopK(_ByValue):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x, k, largest = args["self"], args["k"], bool(args["largest"])
        found = (_of_ranks(ranks, each) for each in _first(k, largest, *self.own(ranks, x.detach())))
        place = _first(k, largest, *found)[1].movedim(0, self.dim)
        return self.gathered(ranks, x, place, place.shape), place


def sort(call: Call) -> tuple[States, RunOverRanks]:
    """sort, argsort: the token at place i of the row gets the i-th."""
    rows, dim = rows_along(call, call.arg("dim"))
    call.use_positions(call.first)
    call.events.sums_padding |= rows.attended
    return Rows(rows.dims), Sorted(rows.dims, False, dim)


class Sorted(_ByValue):
    why: ClassVar[str] = "over the row: every rank gets the tokens of all"

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return (TOKEN_INDEX,)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Any:
        x: Tensor = args["self"]
        rows, places = (_of_ranks(ranks, each) for each in self.own(ranks, x))
        order = _order(bool(args["descending"]), rows.detach(), places)
        at = _index(ranks, self.dims).expand(x.shape).movedim(self.dim, 0)
        order = order.gather(0, at.clamp(0, order.shape[0] - 1))
        values, places = (each.gather(0, order).movedim(0, self.dim) for each in (rows, places))
        return places if "argsort" in func._schema.name else (values, places)


def kth(call: Call) -> tuple[States, RunOverRanks]:
    """kthvalue, median, nanmedian: of tokens, or of all entries."""
    k = None if call.arg("k") is None else call.extents.counted(call.arg("k"))
    if call.arg("dim") is None:
        rows = call.rows(call.first)
        if rows is None or not can_spread(rows):
            raise Mixes(f"{call.name} of something else than tokens")
        runs: RunOverRanks = MiddleOfAll(rows.dims)
    else:
        rows, dim = rows_along(call, call.arg("dim"))
        runs = Kth(rows.dims, False, dim, k=k, tokens=call.extents.tokens)
    call.use_positions(call.first)
    call.events.sums_padding |= rows.attended
    return WHOLE, runs


@dataclass(frozen=True)
class Kth(_ByValue):
    """k: counted from 1, a number or an expression in the symbol `tokens`; None: the middle."""

    k: Any = None
    tokens: Any = None

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x: Tensor = args["self"]
        rows, places = (_of_ranks(ranks, each) for each in self.own(ranks, x.detach()))
        if self.k is None:
            at = _middle(rows, places != _NOWHERE, "nan" in func._schema.name)
        else:
            at = torch.as_tensor(of_row(self.k, self.tokens, ranks.row_tokens), device=x.device) - 1
        order = _order(False, rows, places).gather(0, at.expand(1, *rows.shape[1:]))
        place = places.gather(0, order).movedim(0, self.dim)
        value = self.gathered(ranks, x, place, place.shape)
        return (value, place) if args["keepdim"] else (value.squeeze(self.dim), place.squeeze(self.dim))


@dataclass(frozen=True)
class MiddleOfAll:
    """The middle one of all entries; the gradient goes to those that are equal to it, in equal parts. dims: of the
    tensor."""

    dims: Dims
    why: ClassVar[str] = Sorted.why

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        there = spread(ranks.has_token, self.dims).expand(x.shape)
        places = torch.where(there, 0, _NOWHERE)
        rows, places = (_of_ranks(ranks, each.reshape(-1)) for each in (x.detach(), places))
        order = _order(False, rows, places)
        middle = _middle(rows, places != _NOWHERE, "nan" in func._schema.name)
        found = rows.gather(0, order.gather(0, middle)).squeeze(0)
        if not x.is_floating_point():
            return found
        equal = there & (x == found) & x.isfinite()
        gradient = torch.where(equal, x - x.detach(), x.new_zeros(())).sum()  # 0
        return found + ranks.sum(gradient) / ranks.sum(equal.sum()).clamp(min=1)


def _of_ranks(ranks: Ranks, x: Tensor) -> Tensor:
    """Entries of all ranks, one rank's behind another's in dim 0."""
    number = x.to(torch.uint8) if x.dtype == torch.bool else x
    return ranks.rows_of_ranks(number.reshape(-1).contiguous().view(1, -1)).view(-1, *x.shape[1:]).to(x.dtype)


def _middle(x: Tensor, there: Tensor, skips_nan: bool) -> Tensor:
    """(1, …) the place of the median in the order of the entries of dim 0 that are there, of which nan comes last."""
    count = there.sum(0, keepdim=True)
    nans = (x.isnan() & there).sum(0, keepdim=True)
    if skips_nan:
        return (count - nans - 1).clamp(min=0) // 2
    return torch.where(nans > 0, count - 1, (count - 1) // 2)


def _first(k: int, largest: bool, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The k first entries of dim 0 and their places."""
    order = _order(largest, x, places).narrow(0, 0, k)
    return x.gather(0, order), places.gather(0, order)


def _order(descending: bool, x: Tensor, places: Tensor) -> Tensor:
    """Indices of dim 0, by value, then by place; of entries without a place last."""
    by_place = places.argsort(dim=0, stable=True)
    x = x.masked_fill(places == _NOWHERE, _last(x, descending)).gather(0, by_place)
    return by_place.gather(0, x.argsort(dim=0, descending=descending, stable=True))


def _last(x: Tensor, descending: bool) -> float | bool:
    """The number behind all others."""
    if x.is_floating_point():  # nan is larger than all
        return -torch.inf if descending else torch.nan
    if x.dtype == torch.bool:
        return not descending
    return torch.iinfo(x.dtype).min if descending else torch.iinfo(x.dtype).max
