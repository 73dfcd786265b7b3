"""Token rows reduced by segment: by document, say.

zeros(N).index_add(0, doc_ids, x)       zeros(B, N).scatter_add(1, doc_ids, x)      a rank's own: a part of the sum
zeros(B, N).scatter_reduce(1, doc_ids, x, "mean")                                   sums over ranks / counts
zeros(B, N).scatter_reduce(1, doc_ids, x, "amax")                                   the largest of all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import B, Dims, Mixes, T, has
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Partial, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.locality.rules.spread import can_spread, has_row, reads_of
from cp_rewrite.passes.values.resolution import OfSums, Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import PlanInput

from .wholes import wide


def added(call: Call) -> tuple[States, RunOverRanks]:
    """scatter_add, scatter_reduce with "sum", index_add: token rows added to a tensor that is the same on all ranks."""
    rows = _rows_of_segments(call)
    if call.arg("reduce") not in (None, "sum") or call.arg("include_self") is False:
        raise Mixes(f"{call.name} of other kinds than a sum")
    whole = not call.first.is_floating_point()
    return WHOLE if whole else Partial(), Added(rows.dims, "src" if "src" in call.bound else "source")


def reduced(call: Call) -> tuple[States, RunOverRanks]:
    """scatter_reduce with "mean", "amax" and "amin"."""
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


@dataclass(frozen=True)
class _Segments:
    """dims: of the rows."""

    dims: Dims

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return reads_of(self.dims)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        base: Tensor = args["self"]
        held = has_row(ranks, self.dims).expand(args["src"].shape)
        shared = OfSums.SHARE_OUT(base, ranks) if base.is_floating_point() else base

        def total(x: Tensor) -> Tensor:
            """Of rows with a token, by segment, over all ranks."""
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
class Added:
    """dims: of the rows. name: of the argument that holds them."""

    dims: Dims
    name: str

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return reads_of(self.dims)

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
