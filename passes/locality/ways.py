"""The way that an op goes, and how it reads its operands for that.

    for each reading of the operands     as they are; by conversions, the cheapest first
        for each way of the op's rule    alone, as a move of rows, over the tokens of all ranks (`rules/table.py`)

The first that holds is taken. A way that takes in rows without a token holds for want of a better one.
Ways say what they give of a `Call`, and change nothing: what came of it is noted once it is taken.

`CONVERSIONS` is the table of what makes another claim true of an operand than it has. How an op may read its operands
by it (`sums_converted`, `rows_filled`):

    op                            operands                    read as, the cheapest first
    x.square().sum()              Rows                        0 in rows without a token
    x.sum() + weight.norm()       Partial, REPLICATED         both Partial: each rank adds an equal part of the norm
    mean / 2 + weight.norm()      WHOLE, REPLICATED           both WHOLE: the gradient of the norm is shared out
    count / count                 Partial, Partial            summed over ranks, once for each
    h - mean                      Rows, Partial or WHOLE      REPLICATED: summed, and its gradient is summed too

`Ways` picks the way. Behind it stands what results then are where padding holds something else than on one process
(`with_padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.graph.nodes import written_nodes
from cp_rewrite.passes.values.edits import Conversion, OfSums, Ranks, RunOverRanks, Step
from cp_rewrite.planning.plan_input import HAS_TOKEN, IN_DOCUMENT, ROW_TOKENS, PlanInput
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding

from .call import Call, check_gradients, check_sizes, mixes_parts
from .claims import (
    REPLICATED,
    UNKNOWN,
    WHOLE,
    Deferred,
    Dims,
    GroupSizes,
    Mixes,
    Moved,
    Number,
    Partial,
    Rows,
    TensorState,
)
from .rules.experts import owned_elsewhere
from .rules.picked import LookedUp
from .rules.rule import (
    Alone,
    MovesRows,
    OverRanks,
    Rule,
    States,
    Takes,
    Way,
    can_spread,
    drawn,
    has_row,
    reads_of,
    vouched_name,
    vouched_state,
)
from .rules.table import find_rule

PART = Partial()
CONVERSIONS: Mapping[tuple[TensorState, TensorState], tuple[OfSums, ...]] = {
    (PART, WHOLE): (OfSums.SUM,),
    (PART, REPLICATED): (OfSums.SUM, OfSums.SUM_GRADIENT),
    (WHOLE, REPLICATED): (OfSums.SUM_GRADIENT,),
    (REPLICATED, WHOLE): (OfSums.SHARE_OUT,),
    (REPLICATED, PART): (OfSums.DIVIDE,),
}
"""(claim, the one that is needed) -> what is done to the tensor. `FillRows` is the one of rows of tokens."""


def conversions_of(state: TensorState, claim: TensorState, gradient: bool) -> tuple[OfSums, ...]:
    """Conversions that make another claim true of a tensor; its gradient is converted only where it has one."""
    found = CONVERSIONS[state, claim]
    return tuple(each for each in found if gradient or each is not OfSums.SUM_GRADIENT)


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
    """How an op reads its operands. claims: of those that it reads as something else, by `id`. conversions: what makes
    these claims true."""

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
    """True if a tensor is a buffer, or another input of the graph."""
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
            conversions[id(x)] = conversions_of(call.state(x), claim, gradient)
    return Reading(claims, conversions)


def _entries(tensors: Sequence[Tensor]) -> int:
    """The number of elements of the largest tensor; many, where that depends on the batch."""
    counts: list[Any] = [x.numel() for x in tensors]
    return max((count if isinstance(count, int) else 1 << 60 for count in counts), default=0)


@dataclass(frozen=True)
class Taken:
    """A way that holds.

    Args:
        call: the op as it was read, with what the way gave rise to. states: of its results.
        way, reading: how. run: what runs in the op's place; None: the op itself.
        why: why the op is not taken as it is.
    """

    call: Call
    states: list[TensorState]
    way: Way
    reading: Reading
    run: RunOverRanks | None = None
    why: Mixes | None = None

    def step(self, place: int) -> Step | None:
        """The change of the op, which stands at this place of its node; None: it stays as it is."""
        if self.run is None and self.reading is AS_IT_IS:
            return None
        why = self.why or Mixes(FillRows.why)
        writes = any(id(x) in self.reading.conversions for x in self.call.written)
        return Step(place, self.call.name, self.reading.of(self.call), self.run, writes, why.reason, why.detail)


class Ways:
    """Picks ways. sharding: which ops the user vouches for, whether ops may run over the tokens of all ranks, and
    whether ranks may draw random numbers of their own."""

    def __init__(self, sharding: Sharding) -> None:
        self.vouched, self.resolves = frozenset(sharding.local_ops), sharding.resolve
        self.draws = sharding.random == "per_rank"

    def pick(self, call: Call) -> Taken | Mixes:
        """The way that an op goes; else why it can't go the first of them."""
        if (refused := owned_elsewhere(call)) is not None:
            return refused
        ways = self._ways(call)
        found, why = self._first(call, [AS_IT_IS], ways, None)
        if found is None:
            readings = sums_converted(call) if self.resolves else ()
            return self._first(call, readings, ways, why)[0] or why
        if found.call.events.sums_fill:
            better, _ = self._first(call, rows_filled(call), ways, None)
            return better if better and not better.call.events.sums_fill else found
        return found

    def _ways(self, call: Call) -> Sequence[Way]:
        """Ways that are open to an op here."""
        ways = (find_rule(call.func) or NO_RULE).ways
        if any(isinstance(call.state(x), Moved) for x in call.tensors):
            return [way for way in ways if isinstance(way, MovesRows)] or [MovesRows(_no_move)]
        out = "out" in call.kwargs or vouched_name(call.func) in self.vouched
        shut = () if call.facts.moves else (MovesRows,)
        return [w for w in ways if not isinstance(w, shut if self.resolves and not out else (*shut, OverRanks))]

    def _first(
        self, call: Call, readings: Iterable[Reading], ways: Sequence[Way], why: Mixes | None
    ) -> tuple[Taken | None, Mixes]:
        """The first way that holds and leaves out rows without a token, else the first that holds; and why the first of
        all does not, or `why`."""
        with_fill: Taken | None = None
        for reading in readings:
            for way in ways:
                tried = self._tried(call.reading(reading.claims), way, reading, why)
                if isinstance(tried, Mixes):
                    why = why or tried
                elif not tried.call.events.sums_fill:
                    return tried, why or Mixes("")
                else:
                    with_fill = with_fill or tried
        return with_fill, why or Mixes("")

    def _tried(self, call: Call, way: Way, reading: Reading, why: Mixes | None) -> Taken | Mixes:
        if isinstance(way, MovesRows) and reading is not AS_IT_IS:
            return Mixes("moves rows as they are alone")
        try:
            if isinstance(way, MovesRows):
                call.events.moved = True
                return Taken(call, [way.gives(call)], way, reading)
            new, run = (self._alone(call, way), None) if isinstance(way, Alone) else _over_ranks(call, way)
            states = _listed(call, new)
            for tensor, state in zip(call.outs, states, strict=True):
                check_sizes(call, tensor, state)
        except Mixes as mixes:
            return mixes
        return Taken(call, states, way, reading, run, why)

    def _alone(self, call: Call, way: Alone) -> States:
        """The states of an op's results on a rank's own tokens, where its operands are what the way takes."""
        states, takes = [call.state(tensor) for tensor in call.tensors], way.takes
        if UNKNOWN in states:
            return UNKNOWN
        if any(isinstance(state, GroupSizes) for state in states) and Takes.GROUPS not in takes:
            raise Mixes(f"{call.name} uses how many tokens of the shard have a value")
        deferred = next((state for state in states if isinstance(state, Deferred)), None)
        if deferred is not None:
            return _after_deferred(call, deferred)
        attention = "scaled_dot_product" in call.name
        if attention and not all(state in (REPLICATED, WHOLE) for state in states):
            raise Mixes(f"{call.name} is attention whose mask was not proven: call it by itself, with the mask")
        drops = not attention or call.bound.get("dropout_p", 0.0) != 0.0
        if torch.Tag.nondeterministic_seeded in call.func.tags and drops:
            return self._drawn(call)
        cut = any(state is not REPLICATED for state in states)
        vouched = cut and vouched_name(call.func) in self.vouched
        if not vouched and Takes.SIZES not in takes:
            call.check_numbers()
        if not cut and (Takes.UNCUT not in takes or "out" in call.kwargs):
            call.check_numbers()
            return REPLICATED
        if Takes.UNCUT not in takes and all(state in (REPLICATED, WHOLE) for state in states):
            call.check_numbers()
            check_gradients(call)
            return WHOLE
        if Takes.SUMS not in takes and any(isinstance(state, Partial) for state in states):
            raise mixes_parts(call)

        def give(call: Call) -> Sequence[TensorState]:
            return [vouched_state(call, out) for out in call.outs] if vouched else _listed(call, _apply(way, call))

        new = give(call)
        if vouched or Takes.POSITIONS not in takes:
            use_lost_positions(call, new)
        return with_padding(call, new, give)

    def _drawn(self, call: Call) -> States:
        """Random numbers: for each token its own, if that is what the user asks for."""
        if not self.draws:
            detail = (
                f"{call.name} draws other random numbers on a shard: set dropout to 0, or let ranks draw their own "
            )
            raise Mixes(detail + "for their tokens, Sharding(random='per_rank')", Reason.DROPOUT)
        return drawn(call)


def _over_ranks(call: Call, way: OverRanks) -> tuple[States, RunOverRanks]:
    new, run = way.gives(call)
    new = _listed(call, new)
    if not isinstance(run, LookedUp):
        use_lost_positions(call, new)
    if IN_DOCUMENT not in getattr(run, "reads", ()):  # such a one checks the batch's
        new = whole_with_padding(call, new)
    return new, run


def _no_rule(call: Call) -> States:
    raise Mixes(f"{vouched_name(call.func)} has no rule", Reason.NO_LOCALITY_RULE)


def _no_move(call: Call) -> Moved:
    raise Mixes(f"{call.name} of tokens in other places")


NO_RULE = Rule("", (Alone(_no_rule),))


def _apply(way: Alone, call: Call) -> States:
    if "out" in call.kwargs:
        raise Mixes(f"{vouched_name(call.func)} with out= has no rule", Reason.NO_LOCALITY_RULE)
    return way.gives(call)


def _listed(call: Call, new: States) -> list[TensorState]:
    """A state for each result."""
    return list(new) if isinstance(new, Sequence) else [new] * len(call.outs)


def _after_deferred(call: Call, deferred: Deferred) -> TensorState:
    """The state of an op on a value that is another one on a shard: it may be asserted, and prepared for that."""
    if call.name in ("_assert_async", "_functional_assert_async"):
        return REPLICATED
    if call.name in ("logical_not", "bitwise_not", "logical_and", "bitwise_and", "clone", "detach", "alias"):
        return deferred
    raise Mixes(deferred.detail)


def use_lost_positions(call: Call, results: Sequence[TensorState]) -> None:
    """Positions and places that no result holds any more went into values, so they count as used."""
    kept = [state for state in results if isinstance(state, Rows)]
    for tensor in call.tensors:
        rows = call.rows(tensor)
        if rows is None or id(tensor) in call.named:
            continue
        if rows.table is not None and all(state.table is not rows.table for state in kept):
            call.events.in_turn.append(rows.table)
        lost = rows.iota is not None and all(state.iota is not rows.iota for state in kept)
        if lost or (rows.shard_rows is not None and all(state.shard_rows is None for state in kept)):
            call.use_positions(tensor)


def with_padding(
    call: Call, new: Sequence[TensorState], again: Callable[[Call], Sequence[TensorState]]
) -> Sequence[TensorState]:
    """A rule's results with what padding holds in them, for which the rule is asked `again`, as if it were fill.

    labels != -100        padding 0
    logits                attended
    logits * that         padding 0: the same on one process, and in a sum
    logits.sum()          refused for batches that have such tokens
    """
    operands = [rows for x in call.tensors if (rows := call.rows(x))]
    attended = any(rows.attended for rows in operands)
    there = new
    if any(rows.fill != rows.padding for rows in operands) or (attended and any(isinstance(s, Partial) for s in new)):
        padded = call.reading(
            {id(x): replace(rows, fill=rows.padding) if (rows := call.rows(x)) else call.state(x) for x in call.tensors}
        )
        there = again(padded)
        call.events.sums_padding |= attended and padded.events.sums_fill
    paddings = [state.fill if isinstance(state, Rows) else None for state in there]
    return [
        replace(state, padding=value, attended=attended and value is None) if isinstance(state, Rows) else state
        for state, value in zip(new, paddings, strict=True)
    ]


def whole_with_padding(call: Call, new: Sequence[TensorState]) -> Sequence[TensorState]:
    """Results over the tokens of all ranks: they take in what padding holds, unless that is ignored or 0 is added of it
    to the entries that it chooses, and no more is known of it."""
    operands = [rows for x in call.tensors if (rows := call.rows(x))]
    attended = any(rows.attended for rows in operands)
    target = call.rows(call.arg("target")) if call.name.startswith("nll_loss") else None
    ignored = target is not None and target.padding is not None and target.padding == call.arg("ignore_index")
    added = call.rows(call.arg("src", "source")) if call.name in ("scatter_add", "index_add") else None
    ignored |= added is not None and added.padding == 0
    ignored |= call.name == "new_full"  # it reads nothing of its operand
    call.events.sums_padding |= (
        attended and not ignored and any(not isinstance(state, Rows | Deferred) for state in new)
    )
    return [Rows(s.dims, attended=attended) if isinstance(s, Rows) else s for s in new]
