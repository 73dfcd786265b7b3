"""Ops over tokens, run over the tokens of all ranks: local rows without a token are left out, parts are put together.

    counted                  numbers that a graph makes from its token count, as values: those of the whole row
    reduced, rows_reduced,   reductions: parts of all ranks
    bincount, histc
        mean                 sum of parts / all tokens
        var, std             parts of squared distances from the mean of all
        amax                 the largest of parts
        prod                 the product of parts
    softmax, batch_norm      results of each token by a number over all tokens of the row
    added,                   token rows reduced by segment: by document, say
    reduced_by_segment

Each function names what an op gives where its first tensor has its tokens in a dim that it reduces. The classes run it:
they are called with `Ranks`, the op and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import (
    REPLICATED,
    WHOLE,
    B,
    Dims,
    Mixes,
    Partial,
    Rows,
    T,
    TensorState,
    fewer,
    has,
    of_row,
    plain,
    with_fewer,
)
from cp_rewrite.passes.values.edits import OfSums, Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import PlanInput

from .elementwise import pointwise
from .ordered import LargestPlace
from .rule import States, can_spread, given_dims, has_row, reads_of
from .shapes import of_one_number


def counted(call: Call) -> tuple[States, RunOverRanks]:
    """An op that takes numbers made from the token count (T - 1, T // 2, 1 / T, max(T, 8)), or comparisons of them, as
    values: not as sizes or places.

        x.sum() / x.shape[1]      index == x.shape[1] - 1      x.shape[1] - index      index.clamp(max=x.shape[1] - 1)
        torch.where(torch.tensor(x.shape[1] > 48), a, b)       torch.full((1,), x.shape[1])
    """
    found = {name: value for name, value in call.numbers.items() if call.extents.counts_tokens(value)}
    if not found or (call.written and call.name != "fill"):
        raise Mixes(f"{call.name} takes a number made from the token count")
    found = {name: call.extents.counted(value) for name, value in found.items()}
    makes = call.name in ("fill", "full_like") or not call.tensors or call.name == "new_full"
    if not makes:
        _with_numbers(call.func, [*found])
    states = of_one_number(call) if makes else pointwise(call)
    if isinstance(states, Rows) and call.name == "masked_fill":
        states = plain(states)
    runs = Filled if makes else WithCount
    return states, runs(call.extents.tokens, tuple(found.items()), call.outs[0].dtype)


@dataclass(frozen=True)
class _OfCount:
    """tokens: the symbol that numbers, by argument, are expressions in. dtype: of the result."""

    tokens: Any
    numbers: tuple[tuple[str, Any], ...]
    dtype: torch.dtype

    def given(self, ranks: Ranks, floats: torch.dtype) -> dict[str, Tensor]:
        """The numbers as tensors of no dims, those that are floats in this dtype."""
        found = {name: torch.as_tensor(of_row(expr, self.tokens, ranks.row_tokens)) for name, expr in self.numbers}
        return {name: x.to(floats) if x.is_floating_point() else x for name, x in found.items()}


class Filled(_OfCount):
    """A tensor of one number made from the token count."""

    def __call__(self, ranks: Ranks, func: Any, args: Mapping[str, Any]) -> Tensor:
        ((name, number),) = self.given(ranks, torch.float64).items()
        out: Tensor = func(**{**args, name: torch.zeros((), dtype=self.dtype).item()})  # `full` takes its dtype of it
        return out.copy_(number)


class WithCount(_OfCount):
    """An op of tensors and numbers made from the token count, entry by entry."""

    def __call__(self, ranks: Ranks, func: Any, args: Mapping[str, Any]) -> Tensor:
        # 16 bits hold few numbers of tokens.
        args = {name: wide(x) if isinstance(x, Tensor) else x for name, x in args.items()}
        dtypes = [x.dtype for x in args.values() if isinstance(x, Tensor) and x.is_floating_point()]
        args |= self.given(ranks, dtypes[0] if dtypes else torch.get_default_dtype())
        found: Tensor = _with_numbers(func, [name for name, _ in self.numbers])(**args)
        return found.to(self.dtype)


def _tensor_or_none(x: Any, device: torch.device) -> Tensor | None:
    return None if x is None else torch.as_tensor(x, device=device)


def _with_numbers(func: Any, names: Sequence[str]) -> Callable[..., Tensor]:
    """An op, by its arguments' names, that takes tensors in the place of these numbers.

    Raises:
        Mixes: there is none.
    """
    name = func._schema.name.removeprefix("aten::")
    if name in _WITH_NUMBERS:
        return _WITH_NUMBERS[name]
    overloads = [getattr(func.overloadpacket, key) for key in func.overloadpacket.overloads()]
    for other in overloads:
        kinds = {a.name: str(a.type) for a in other._schema.arguments}
        given = {a.name for a in func._schema.arguments}
        if given == kinds.keys() and all("Tensor" in kinds[name] for name in names):
            found: Callable[..., Tensor] = other
            return found
    raise Mixes(f"{name} takes a number made from the token count")


_WITH_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "add": lambda self, other, alpha: self + other * alpha,
    "sub": lambda self, other, alpha: self - other * alpha,
    "rsub": lambda self, other, alpha: other - self * alpha,
    "clamp": lambda self, min, max: self.clamp(*(_tensor_or_none(x, self.device) for x in (min, max))),
    "addcmul": lambda self, tensor1, tensor2, value: self + value * tensor1 * tensor2,
    "addcdiv": lambda self, tensor1, tensor2, value: self + value * tensor1 / tensor2,
    "lerp": lambda self, end, weight: self + weight * (end - self),
    "masked_fill": lambda self, mask, value: torch.where(mask, value.to(self.dtype), self),
}
"""Ops that have no form of the same arguments which takes tensors."""


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
    """Counts of whole numbers below `minlength`, one or more for each token: a part of the counts of all."""
    rows = call.rows(call.first)
    if rows is None or not can_spread(rows) or not call.arg("minlength") or call.arg("weights") is not None:
        raise Mixes("bincount without minlength has as many entries as the shard's largest number asks for")
    return Partial(), BinCount(rows.dims)


def histc(call: Call) -> tuple[States, RunOverRanks]:
    """Counts between bounds that are given: a part of the counts of all."""
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
    """`x`, 16-bit floats in fp32: their sums run so, as torch's own do inside."""
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
    """The norm of any power from 1 on: sum(|x| ** p) ** (1 / p); of inf and -inf the largest and the least of |x|."""

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
    """softmax, log_softmax: exp(x - logsumexp of all ranks), or its logarithm.

    The number is whole, and tokens of all ranks read it: its gradient is summed over them. dtype: of the result.
    """

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
    """(x - mean) / sqrt(var), of the tokens of all ranks; running statistics are of these, too."""

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


def added(call: Call) -> tuple[States, RunOverRanks]:
    """scatter_add, scatter_reduce with "sum", index_add: token rows added to a tensor that is the same on all ranks.
    What a rank adds is a part of the sum.

        zeros(N).index_add(0, doc_ids, x)       zeros(B, N).scatter_add(1, doc_ids, x)
    """
    rows = _rows_of_segments(call)
    if call.arg("reduce") not in (None, "sum") or call.arg("include_self") is False:
        raise Mixes(f"{call.name} of other kinds than a sum")
    whole = not call.first.is_floating_point()
    return WHOLE if whole else Partial(), Added(rows.dims, "src" if "src" in call.bound else "source")


def reduced_by_segment(call: Call) -> tuple[States, RunOverRanks]:
    """scatter_reduce with "mean", "amax" and "amin".

    zeros(B, N).scatter_reduce(1, doc_ids, x, "mean")       sums over ranks / counts
    zeros(B, N).scatter_reduce(1, doc_ids, x, "amax")       the largest of all ranks
    """
    rows, kind = _rows_of_segments(call), call.arg("reduce")
    floats = call.first.is_floating_point()
    if kind not in ("mean", "amax", "amin") or (kind == "mean" and not floats):
        raise Mixes(f"{call.name} of another kind than a mean or the largest")
    return WHOLE, (MeanOfSegments if kind == "mean" else LargestOfSegments)(rows.dims)


def _rows_of_segments(call: Call) -> Rows:
    """The token rows that are reduced in a tensor that is the same on all ranks, along their tokens."""
    x, index, source = call.first, call.arg("index"), call.arg("src", "source")
    rows, dim = call.rows(source), call.arg("dim") % max(x.ndim, 1)
    if call.state(x) is not REPLICATED or rows is None or not can_spread(rows):
        raise Mixes(f"{call.name} of something else than token rows")
    if any(entry not in (None, (B,)) for i, entry in enumerate(rows.dims) if i != dim) or not has(rows.dims[dim], T):
        raise Mixes(f"{call.name} along another dim than that of the tokens")
    mine = call.entries(source)
    if call.entries(index) != ([mine[dim]] if call.name == "index_add" else mine):
        raise Mixes(f"{call.name} of rows that are not cut like their indices")
    call.use_positions(source, index)
    return rows


class _Segments(OverTokens):
    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        base: Tensor = args["self"]
        held = has_row(ranks, self.dims).expand(args["src"].shape)
        shared = OfSums.SHARE_OUT(base, ranks) if base.is_floating_point() else base

        def total(x: Tensor) -> Tensor:
            """The sum of rows with a token, by segment, over all ranks."""
            kept = torch.where(held, x, x.new_zeros(()))
            return ranks.sum(base.new_zeros(base.shape, dtype=x.dtype).scatter_add(args["dim"], args["index"], kept))

        found = self.reduce(ranks, args, shared, total).to(base.dtype)
        return base.copy_(found) if func._schema.is_mutable else found

    def reduce(self, ranks: Ranks, args: dict[str, Any], base: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        raise NotImplementedError


class MeanOfSegments(_Segments):
    def reduce(self, ranks: Ranks, args: dict[str, Any], base: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        rows = wide(args["src"])
        count = total(torch.ones_like(rows))
        if args["include_self"]:
            return (base + total(rows)) / (1 + count)
        return torch.where(count == 0, base, total(rows) / count.clamp(min=1))


class LargestOfSegments(_Segments):
    """Equal entries share the gradient, as torch has it: the base among them, whether it is included or not."""

    def reduce(self, ranks: Ranks, args: dict[str, Any], base: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        rows, dim, index = args["src"], args["dim"], args["index"]
        sign = -1 if args["reduce"] == "amin" else 1
        least = -torch.inf if rows.is_floating_point() else torch.iinfo(rows.dtype).min
        held = has_row(ranks, self.dims)
        kept = torch.where(held, sign * rows.detach(), rows.new_full((), least))
        own = base.new_full(base.shape, least).scatter_reduce(dim, index, kept, "amax")
        largest, before = ranks.most(own), sign * base.detach()
        counted = total(torch.ones_like(rows, dtype=torch.int64)) > 0
        largest = torch.maximum(largest, before) if args["include_self"] else torch.where(counted, largest, before)
        if not rows.is_floating_point():
            return sign * largest
        equal, of_base = kept == largest.gather(dim, index), before == largest
        count = total(equal.to(rows.dtype)) + of_base
        given = of_base if args["include_self"] else of_base & ~counted
        linear = (total(torch.where(equal, rows, 0.0)) + torch.where(given, base, 0.0)) / count
        return torch.where(largest.isfinite(), sign * largest + (linear - linear.detach()), sign * largest)


@dataclass(frozen=True)
class Added(OverTokens):
    """name: of the argument that holds the rows."""

    name: str

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        base, rows = args["self"], args[self.name]
        kept = torch.where(has_row(ranks, self.dims), rows, rows.new_zeros(()))
        written = func._schema.is_mutable
        if base.is_floating_point():
            base = base.div_(ranks.world_size) if written else base / ranks.world_size
            return func(**{**args, "self": base, self.name: kept})
        # Whole numbers can't be shared out.
        before = base.clone()
        part = func(**{**args, "self": base, self.name: kept}) - before
        return base.copy_(before + ranks.sum(part)) if written else before + ranks.sum(part)
