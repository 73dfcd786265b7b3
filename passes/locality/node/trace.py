"""Watch the ATen ops that run below one node of a Dynamo graph, and say of each result what is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.batch.active import IN_DOCUMENT
from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import (
    REPLICATED,
    UNKNOWN,
    WHOLE,
    Deferred,
    GroupSizes,
    Moved,
    Partial,
    Rows,
    TensorState,
)
from cp_rewrite.passes.locality.neighbours.moves import follow_source, moved
from cp_rewrite.passes.locality.resolve.attempts import Attempt, attempts
from cp_rewrite.passes.locality.rules.draws import drawn
from cp_rewrite.passes.locality.rules.picked.looked_up import LookedUp
from cp_rewrite.passes.locality.rules.rule import Rule, States, Takes
from cp_rewrite.passes.locality.rules.table import find_rule
from cp_rewrite.passes.locality.rules.vouched import vouched_name, vouched_state
from cp_rewrite.passes.values.resolution import Whole
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import TorchDispatchMode

from .call import COPIES, METADATA, Call, bound_arguments, check_gradients, check_sizes, mixes_parts
from .node_facts import NodeFacts
from .padding import whole_with_padding, with_padding
from .written import join_written, shares_memory, written_state


class Trace(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """While it is active, gives the results of every ATen op their states. It needs a fake tensor mode around it.

    Args:
        extents: sizes of the token and batch axes.
        sharding: which ops the user vouches for, whether ops that are not the same on a shard are made so where a rule
            says how, and whether ranks may draw random numbers of their own.
    """

    def __init__(self, extents: Extents, sharding: Sharding) -> None:
        super().__init__()
        self.facts = NodeFacts(extents, moves=sharding.resolve)
        self.vouched, self.resolves = frozenset(sharding.local_ops), sharding.resolve
        self.draws = sharding.random == "per_rank"
        self.place = 0
        """How many ops the node ran so far, but for `COPIES`."""
        self.uses: Counter[int] = Counter()
        """How many of them take a tensor, by its `id`."""
        self.taken: dict[int, list[Tensor]] = {}
        """The tensors of those with steps, by place."""
        self.written: list[Tensor] = []
        """Tensors that the node wrote into."""
        self.seen: set[str] = set()
        """Names of the ops that the node ran."""

    def start(self, node: fx.Node, states: Sequence[tuple[Tensor, TensorState]], gradients: Sequence[Tensor]) -> None:
        """Watch one node; arguments as of `NodeFacts.start`."""
        self.facts.start(node, states, gradients)
        self.written, self.seen = [], set()
        self.place, self.uses, self.taken = 0, Counter(), {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.name in METADATA:
            return out
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        call = Call(func, args, kwargs, outs, self.facts)
        self.seen.add(func._schema.name)
        self.uses.update(map(id, call.tensors))
        states = self._states(call)
        self.place += call.name not in COPIES
        before = {id(tensor): self.facts.state(tensor) for tensor in call.tensors}
        self.facts.hand_down_gradients(call.tensors, outs)
        for tensor, state in zip(outs, states, strict=True):
            self.facts.set_state(tensor, state)
        if func._schema.is_mutable:
            self._write(call, states, before)
        return out

    def _states(self, call: Call) -> list[TensorState]:
        """The states of an op's results: as it is, or after a step that makes it the same on a shard."""
        before = self.facts.events.copy()
        try:
            if any(isinstance(call.state(x), Moved) for x in call.tensors):
                return self._moved(call)
            states = _checked(call, self._transfer(call))
            follow_source(call)
            return states
        except Mixes as mixes:
            refused = mixes
        if self.facts.moves:
            self.facts.events = before.copy()
            with suppress(Mixes):
                return self._moved(call)
        for attempt in attempts(call, find_rule(call.func)) if self.resolves else ():
            self.facts.events = before.copy()
            try:
                with self.facts.as_if(attempt.states):
                    new, whole = self._attempted(call, attempt)
                    states = _checked(call, new)
            except Mixes:
                continue
            self.facts.events.steps.append(attempt.step(self.place, call, whole, refused))
            self.taken[self.place] = call.tensors
            return states
        self.facts.events = before
        self.facts.refuse(refused.reason, refused.detail)
        return [UNKNOWN] * len(call.outs)

    def _moved(self, call: Call) -> list[TensorState]:
        state = moved(call)
        self.facts.events.moved = True
        return [state]

    def _attempted(self, call: Call, attempt: Attempt) -> tuple[States, Whole | None]:
        if attempt.whole is None:
            return self._transfer(call), None
        if "out" in call.kwargs or vouched_name(call.func) in self.vouched:
            raise Mixes("is not made whole")
        new, whole = attempt.whole(call)
        new = _listed(call, new)
        if not isinstance(whole, LookedUp):
            use_lost_positions(call, new)
        if IN_DOCUMENT not in getattr(whole, "reads", ()):  # such a one checks the batch's
            new = whole_with_padding(call, new)
        return new, whole

    def _transfer(self, call: Call) -> States:
        """The states of an op's results: a rule's answer, where the op's operands are what its rule takes."""
        states = [self.facts.state(tensor) for tensor in call.tensors]
        if UNKNOWN in states:
            return UNKNOWN
        rule = find_rule(call.func)
        takes = rule.takes if rule else Takes.NOTHING
        if any(isinstance(state, GroupSizes) for state in states) and Takes.GROUPS not in takes:
            raise Mixes(f"{call.name} uses how many tokens of the shard have a value")
        deferred = next((state for state in states if isinstance(state, Deferred)), None)
        if deferred is not None:
            return _after_deferred(call, deferred)
        attention = "scaled_dot_product" in call.name
        if attention and not all(state in (REPLICATED, WHOLE) for state in states):
            raise Mixes(f"{call.name} is attention whose mask was not proven: call it by itself, with the mask")
        if torch.Tag.nondeterministic_seeded in call.func.tags and not (attention and _without_dropout(call)):
            return self._drawn(call)
        cut = any(state is not REPLICATED for state in states)
        vouched = cut and vouched_name(call.func) in self.vouched
        if not vouched and Takes.SIZES not in takes:
            call.check_numbers()
        if not cut and (Takes.UNCUT not in takes or "out" in call.kwargs):
            call.check_numbers()
            return REPLICATED
        if Takes.UNCUT not in takes and all(state in (REPLICATED, WHOLE) for state in states):
            check_gradients(call)
            return WHOLE
        if Takes.SUMS not in takes and any(isinstance(state, Partial) for state in states):
            raise mixes_parts(call)

        def give() -> Sequence[TensorState]:
            return [vouched_state(call, out) for out in call.outs] if vouched else _listed(call, _apply(rule, call))

        new = give()
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

    def _write(self, call: Call, states: Sequence[TensorState], old: Mapping[int, TensorState]) -> None:
        """An op that writes into its arguments gives them, and what shares their memory, its result's state.

        `old`: the states of the arguments before the op.
        """
        for tensor in call.written:
            self._write_tensor(tensor, states[0] if states else join_written(call), old)
            self.written.append(tensor)

    def _write_tensor(self, tensor: Tensor, new: TensorState, old: Mapping[int, TensorState]) -> None:
        before = old[id(tensor)]
        if isinstance(before, Rows) and before.iota is not None:
            self.facts.refuse(Reason.POSITION_GENERATOR, "changes positions in place")
        for other, state in list(self.facts.states.values()):
            if not shares_memory(other, tensor):
                continue
            try:
                after = written_state(tensor, before, new, other, old.get(id(other), state))
            except Mixes as mixes:
                self.facts.refuse(mixes.reason, mixes.detail)
                after = UNKNOWN
            self.facts.set_state(other, after)


def _listed(call: Call, new: States) -> list[TensorState]:
    """A state for each result."""
    return list(new) if isinstance(new, Sequence) else [new] * len(call.outs)


def _checked(call: Call, new: States) -> list[TensorState]:
    states = _listed(call, new)
    for tensor, state in zip(call.outs, states, strict=True):
        check_sizes(call, tensor, state)
    return states


def _apply(rule: Rule | None, call: Call) -> States:
    if rule is None or "out" in call.kwargs:
        how = " with out=" if "out" in call.kwargs else ""
        raise Mixes(f"{vouched_name(call.func)}{how} has no rule", Reason.NO_LOCALITY_RULE)
    return rule.gives(call)


def _without_dropout(call: Call) -> bool:
    return bound_arguments(call.func, call.args, call.kwargs).get("dropout_p", 0.0) == 0.0


def _after_deferred(call: Call, deferred: Deferred) -> TensorState:
    """What may be done with a value that is another one on a shard: assert it, and what prepares that."""
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
            call.facts.events.in_turn.append(rows.table)
        lost = rows.iota is not None and all(state.iota is not rows.iota for state in kept)
        if lost or (rows.places is not None and all(state.places is None for state in kept)):
            call.use_positions(tensor)
