"""Ops over tokens, run over the tokens of all ranks: local rows without a token are left out, parts are put together.

    mean      sum of parts / all tokens
    var, std  parts of squared distances from the mean of all
    amax      the largest of parts
    prod      the product of parts

Each function names what an op gives where its first tensor has its tokens in a dim that it reduces. The classes run it:
they are called with `Ranks`, the op and its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import B, Dims, Mixes, T, fewer, with_fewer
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Partial, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.picked.largest import LargestPlace
from cp_rewrite.passes.locality.rules.rule import States, given_dims
from cp_rewrite.passes.locality.rules.spread import can_spread, has_row, reads_of
from cp_rewrite.passes.values.resolution import OfSums, Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import PlanInput

_aten: Any = torch.ops.aten


def reduced(call: Call) -> tuple[States, RunOverRanks]:
    """mean, var, amax and the like, over tokens."""
    runs = _REDUCED.get(call.name)
    if runs is None:
        raise Mixes(f"{call.name} over tokens is not put together from parts")
    rows = rows_reduced(call)
    if call.name in ("max", "min") and len(call.outs) > 1:
        if call.facts.has_gradient(call.first):
            raise Mixes("which of equal entries gets the gradient depends on their order")
        if call.arg("dim") is None or rows.dims[call.arg("dim")] not in ((T,), (B, T)):
            raise Mixes(f"{call.name} over something else than tokens")
        return WHOLE, LargestWithPlace(rows.dims)
    if call.name in ("any", "all"):
        return WHOLE, AnyOrAll(rows.dims)
    power = call.arg("ord", "p")
    numbers = call.name == "prod" or call.first.dtype not in (torch.bool, torch.uint8)
    if not numbers or not (power is None or 1 <= power or power == -torch.inf):
        raise Mixes(f"{call.name} of such values is not put together from parts")
    return WHOLE, runs(rows.dims)


def rows_reduced(call: Call) -> Rows:
    rows, dims = call.rows(call.first), given_dims(call)
    if rows is None or rows.token_dim not in dims or not can_spread(rows):
        raise Mixes(f"{call.name} of something else than rows of tokens")
    if any(call.state(x) is not REPLICATED for x in call.tensors[1:]):
        raise Mixes(f"{call.name} by tokens")
    return rows


def bincount(call: Call) -> tuple[States, RunOverRanks]:
    """Of whole numbers below `minlength`, one or more for each token: a part of the counts of all."""
    rows = call.rows(call.first)
    if rows is None or not can_spread(rows) or not call.arg("minlength") or call.arg("weights") is not None:
        raise Mixes("bincount without minlength has as many entries as the shard's largest number asks for")
    return Partial(), BinCount(rows.dims)


def histc(call: Call) -> tuple[States, RunOverRanks]:
    """Between bounds that are given: a part of the counts of all."""
    rows = call.rows(call.first)
    if rows is None or not can_spread(rows) or not call.arg("min") < call.arg("max"):
        raise Mixes("histc without bounds counts between the shard's least number and its largest")
    return Partial(), Histogram(rows.dims)


@dataclass(frozen=True)
class OverTokens:
    """dims: of the tensor whose tokens are reduced."""

    dims: Dims

    def keep(self, ranks: Ranks, x: Tensor, other: float) -> Tensor:
        """`x` with another value in rows without a token."""
        number = x.new_full((), other) if x.is_floating_point() else other
        return torch.where(has_row(ranks, self.dims), x, number)

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return reads_of(self.dims)

    def count(self, ranks: Ranks, x: Tensor, dims: Sequence[int] | None) -> Tensor:
        """() how many entries these dims of all ranks' `x` have."""
        entries: Any = 1
        for dim in _dims(x, dims):
            for factor in with_fewer(self.dims, 0)[dim] or (x.shape[dim],):
                entries = entries * (1 if factor is T else ranks.has_token.shape[0] if factor is B else factor)
        return (ranks.row_tokens.select(0, 0) - fewer(self.dims)) * entries


def _dims(x: Tensor, dims: Any) -> list[int]:
    given = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
    return [dim % x.ndim for dim in given]


def _given(args: dict[str, Any]) -> list[int]:
    return _dims(args["self"], args.get("dim"))


def wide(x: Tensor) -> Tensor:
    """Sums of 16-bit floats run in fp32, as torch's own do inside."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True)
class Mean(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x, dims = args["self"], _given(args)
        dtype = args.get("dtype") or x.dtype
        return self.mean(ranks, wide(x.to(dtype)), dims, bool(args.get("keepdim"))).to(dtype)

    def mean(self, ranks: Ranks, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        total = ranks.sum(self.keep(ranks, x, 0).sum(dims, keepdim=keepdim))
        return total / self.count(ranks, x, dims)

    def squares(self, ranks: Ranks, x: Tensor, mean: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        """The sum of squared distances from the mean, which has the reduced dims."""
        # The distances add up to 0 over all ranks: no gradient of the sum goes by way of the mean.
        away = x - mean.detach()
        return ranks.sum(self.keep(ranks, away * away, 0).sum(dims, keepdim=keepdim))


@dataclass(frozen=True)
class Variance(Mean):
    """var, std; and with the mean, var_mean and std_mean."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Any:
        x, dims, keepdim = args["self"], _given(args), bool(args.get("keepdim"))
        x_wide, name = wide(x), func._schema.name
        correction = args["correction"] if args.get("correction") is not None else int(args.get("unbiased", True))
        mean, count = self.mean(ranks, x_wide, dims, True), self.count(ranks, x, dims)
        found = self.squares(ranks, x_wide, mean, dims, keepdim) / (count - correction).clamp(min=0)
        found = (_root(found) if "std" in name else found).to(x.dtype)
        return (found, (mean if keepdim else mean.squeeze(dims)).to(x.dtype)) if "mean" in name else found


@dataclass(frozen=True)
class Norm(OverTokens):
    """Of any power from 1 on: sum(|x| ** p) ** (1 / p); of inf and -inf the largest and the least of |x|."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x, power = args["self"], args.get("ord", args.get("p"))
        size, power = x.to(args.get("dtype") or x.dtype).abs(), 2 if power is None else power
        dtype, size = size.dtype, wide(size)
        if abs(power) == torch.inf:
            extreme = _aten.amax.default if power > 0 else _aten.amin.default
            return Largest(self.dims)(ranks, extreme, {**args, "self": size}).to(dtype)
        parts = (self.keep(ranks, size, 0) ** power).sum(_given(args), keepdim=bool(args.get("keepdim")))
        return _root(ranks.sum(parts), power).to(dtype)


def _root(x: Tensor, power: float = 2) -> Tensor:
    """The root; its gradient at 0 is 0, as that of torch's std and norm."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** (1 / power))


@dataclass(frozen=True)
class Largest(OverTokens):
    """amax, max; and amin, min as the largest of -x."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Any:
        x, dims, keepdim = args["self"], _given(args), bool(args.get("keepdim"))
        sign = -1 if "min" in func._schema.name else 1
        least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        kept = self.keep(ranks, sign * x, least)
        part = kept.amax(dims, keepdim=keepdim)
        equal = kept == kept.amax(dims, keepdim=True)
        return sign * ranks.largest(part, equal.sum(dims, keepdim=keepdim))


@dataclass(frozen=True)
class LargestWithPlace(OverTokens):
    """max and min of one dim, of numbers without a gradient."""

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return LargestPlace.reads

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        amax = _aten.amin.default if "min" in func._schema.name else _aten.amax.default
        place = LargestPlace(self.dims, _dims(args["self"], args["dim"])[0])
        values = Largest(self.dims)(ranks, amax, args)
        return values, place(ranks, _aten.argmin.default if "min" in func._schema.name else _aten.argmax.default, args)


@dataclass(frozen=True)
class AnyOrAll(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x, of_all = args["self"] != 0, func._schema.name == "aten::all"
        found = self.keep(ranks, ~x if of_all else x, 0)
        for dim in sorted(_given(args), reverse=True):
            found = found.any(dim, keepdim=bool(args.get("keepdim")))
        whole = ranks.most(found.to(torch.int32)) > 0
        return (~whole if of_all else whole).to(torch.uint8 if args["self"].dtype is torch.uint8 else torch.bool)


@dataclass(frozen=True)
class LeastAndLargest(OverTokens):
    """aminmax."""

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
        found = Largest(self.dims)
        return found(ranks, _aten.amin.default, args), found(ranks, _aten.amax.default, args)


@dataclass(frozen=True)
class Product(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        dtype = args.get("dtype") or (x.dtype if x.is_floating_point() else torch.int64)
        part: Tensor = func(**{**args, "self": self.keep(ranks, wide(x.to(dtype)), 1), "dtype": None})
        product, *others = ranks.rows_of_ranks(part.reshape(1, -1)).unbind(0)
        for other in others:  # not by prod, whose gradient divides
            product = product * other
        return OfSums.SHARE_OUT(product.view(part.shape), ranks).to(dtype)


@dataclass(frozen=True)
class LogSumExp(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x = args["self"]
        return self.total(ranks, wide(x), _given(args), bool(args.get("keepdim"))).to(x.dtype)

    def total(self, ranks: Ranks, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        part = self.keep(ranks, x, -torch.inf).logsumexp(dims, keepdim=keepdim)
        largest = ranks.largest(part.detach(), torch.ones_like(part))
        largest = torch.where(largest.isfinite(), largest, 0.0)  # of nothing but -inf: exp gives 0, not nan
        total = ranks.sum((part - largest).exp())
        return torch.where(total == 0, -torch.inf, torch.where(total == 0, 1.0, total).log()) + largest


@dataclass(frozen=True)
class BinCount(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        x: Tensor = args["self"]
        ones = self.keep(ranks, torch.ones_like(x, dtype=torch.int64), 0)
        return x.new_zeros(args["minlength"], dtype=torch.int64).scatter_add(0, x.to(torch.int64), ones)


class Histogram(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        return func(**{**args, "self": self.keep(ranks, args["self"], args["max"] + 1)})


_REDUCED: dict[str, Any] = {
    "mean": Mean,
    "var": Variance,
    "std": Variance,
    "var_mean": Variance,
    "std_mean": Variance,
    "amax": Largest,
    "amin": Largest,
    "max": Largest,
    "min": Largest,
    "logsumexp": LogSumExp,
    "aminmax": LeastAndLargest,
    "prod": Product,
    "any": AnyOrAll,
    "all": AnyOrAll,
    "norm": Norm,
    "linalg_vector_norm": Norm,
}
