"""What makes an operand another claim true than it has: one table, and how an op may read its operands by it.

    op                            operands                    read as, the cheapest first
    x.square().sum()              Rows                        0 in rows without a token
    x.sum() + weight.norm()       Partial, REPLICATED         both Partial: each rank adds an equal part of the norm
    mean / 2 + weight.norm()      WHOLE, REPLICATED           both WHOLE: the gradient of the norm is shared out
    count / count                 Partial, Partial            summed over ranks, once for each
    h - mean                      Rows, Partial or WHOLE      REPLICATED: summed, and its gradient is summed too

Which of them an op takes, its ways say (`ways.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.graph.writes import written_nodes
from cp_rewrite.passes.locality.claims.dims import Dims
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Number, Partial, Rows, TensorState
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.spread import can_spread, has_row, reads_of
from cp_rewrite.passes.values.resolution import Conversion, OfSums, Ranks
from cp_rewrite.planning.plan_input import HAS_TOKEN, ROW_TOKENS, PlanInput

PART = Partial()
CONVERSIONS: Mapping[tuple[TensorState, TensorState], tuple[OfSums, ...]] = {
    (PART, WHOLE): (OfSums.SUM,),
    (PART, REPLICATED): (OfSums.SUM, OfSums.SUM_GRADIENT),
    (WHOLE, REPLICATED): (OfSums.SUM_GRADIENT,),
    (REPLICATED, WHOLE): (OfSums.SHARE_OUT,),
    (REPLICATED, PART): (OfSums.DIVIDE,),
}
"""(claim, the one that is needed) -> what is done to the tensor. `FillRows` is the one of rows of tokens."""


@dataclass(frozen=True)
class FillRows:
    """Puts a number into the rows without a token of a tensor with these dims."""

    dims: Dims
    number: Number
    local: ClassVar[bool] = True
    why: ClassVar[str] = "rows that fill a rank up are left out of this sum"

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        more = reads_of(self.dims)
        return (HAS_TOKEN, *more, *([ROW_TOKENS] * bool(more)))

    def __call__(self, x: Tensor, ranks: Ranks) -> Tensor:
        return torch.where(has_row(ranks, self.dims), x, self.number)


@dataclass(frozen=True)
class Reading:
    """How an op reads its operands. claims: those that are other than they are, by `id`. conversions: what makes them
    true."""

    claims: Mapping[int, TensorState] = field(default_factory=dict[int, TensorState])
    conversions: Mapping[int, tuple[Conversion, ...]] = field(default_factory=dict[int, tuple[Conversion, ...]])

    def of(self, call: Call) -> tuple[tuple[int, tuple[Conversion, ...]], ...]:
        """(place among the op's tensors, its conversions)."""
        return tuple((i, self.conversions[id(x)]) for i, x in enumerate(call.tensors) if id(x) in self.conversions)


AS_IT_IS = Reading()


def sums_converted(call: Call) -> Iterator[Reading]:
    """An op's sums over tokens, and what all ranks have, as claims that it may take, the cheapest first."""
    parts = [x for x in call.tensors if call.state(x) == PART]
    wholes = [x for x in call.tensors if call.state(x) == WHOLE]
    own = [x for x in call.tensors if call.state(x) is REPLICATED]
    terms = call.name in ("add", "sub") and all(x.is_floating_point() for x in call.tensors)
    terms = terms and not any(_outlives_call(call, x) for x in call.written)
    if parts and own and terms and _entries(own) <= _entries(parts):
        yield _converted(call, (own, PART))
    if parts:
        yield _converted(call, (parts, WHOLE))
    own = [x for x in own if call.facts.has_gradient(x)]
    if (parts or wholes) and own and _entries(own) <= _entries([*parts, *wholes]):
        yield _converted(call, (parts, WHOLE), (own, WHOLE))
    if parts or wholes:
        yield _converted(call, (parts, REPLICATED), (wholes, REPLICATED))


def rows_filled(call: Call) -> Iterator[Reading]:
    """An op's rows of tokens with a number in those without a token: one operand, or all of them."""
    if call.facts.in_function or call.written or (call.facts.node and written_nodes(call.facts.node)):
        return  # no plan is there; or it would be written into a copy
    rows = {id(x): (x, state) for x in call.tensors if (state := call.rows(x)) and can_spread(state)}
    found = sorted(rows.values(), key=lambda each: _entries([each[0]]))
    for x, state in found:
        yield _filled([(x, state)], 0)
        ignored = call.arg("ignore_index")
        if isinstance(ignored, int) and not x.is_floating_point():
            yield _filled([(x, state)], ignored)
    if len(found) > 1:
        yield _filled(found, 0)


def _filled(rows: Iterable[tuple[Tensor, Rows]], number: int) -> Reading:
    claims = {id(x): replace(state, fill=number) for x, state in rows}
    return Reading(
        claims,
        {id(x): (FillRows(s.dims, bool(number) if x.dtype == torch.bool else number),) for x, s in rows},
    )


def _outlives_call(call: Call, x: Tensor) -> bool:
    """Whether a tensor is a buffer, or another input of the graph."""
    source = call.facts.sources.get(id(x))
    return source is not None and source.op in ("placeholder", "get_attr")


def _converted(call: Call, *groups: tuple[Sequence[Tensor], TensorState]) -> Reading:
    """Tensors of each group with another claim; gradients are converted only where there are some."""
    claims: dict[int, TensorState] = {}
    conversions: dict[int, tuple[Conversion, ...]] = {}
    for tensors, claim in groups:
        for x in tensors:
            gradient = call.facts.has_gradient(x)
            claims[id(x)] = REPLICATED if claim == WHOLE and not gradient else claim
            found = CONVERSIONS[call.state(x), claim]
            conversions[id(x)] = tuple(c for c in found if gradient or c is not OfSums.SUM_GRADIENT)
    return Reading(claims, conversions)


def _entries(tensors: Sequence[Tensor]) -> int:
    """Of the largest; many, where that depends on the batch."""
    counts: list[Any] = [x.numel() for x in tensors]
    return max((count if isinstance(count, int) else 1 << 60 for count in counts), default=0)
