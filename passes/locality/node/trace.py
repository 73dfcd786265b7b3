"""Watch the ATen ops that run below one node of a Dynamo graph, and say of each result what is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, UNKNOWN, Rows, TensorState
from cp_rewrite.passes.locality.neighbours.moves import follow_source
from cp_rewrite.passes.locality.rules.rule import Alone
from cp_rewrite.passes.locality.ways import Ways
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import TorchDispatchMode, memory_id

from .call import COPIES, METADATA, Call
from .node_facts import NodeFacts


class Trace(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """While it is active, gives the results of every ATen op their states. It needs a fake tensor mode around it.

    Args:
        extents: sizes of the token and batch axes.
        sharding: which ways are open, as of `Ways`.
    """

    def __init__(self, extents: Extents, sharding: Sharding) -> None:
        super().__init__()
        self.facts = NodeFacts(extents, sharding.resolve, sharding.reset_states)
        self.ways = Ways(sharding)
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
        states, written = self._states(call)
        self.place += call.name not in COPIES
        before = {id(tensor): self.facts.state(tensor) for tensor in call.tensors}
        self.facts.hand_down_gradients(call.tensors, outs)
        for tensor, state in zip(outs, states, strict=True):
            self.facts.set_state(tensor, state)
        if func._schema.is_mutable:
            self._write(call, written or join_written(call), before)
        return out

    def _states(self, call: Call) -> tuple[list[TensorState], TensorState | None]:
        """The states of an op's results, by the way that it goes, and of what it writes into; the way is noted."""
        taken = self.ways.pick(call)
        if isinstance(taken, Mixes):
            self.facts.refuse(taken.reason, taken.detail)
            return [UNKNOWN] * len(call.outs), UNKNOWN if call.outs else None
        self.facts.events.add(taken.call.events)
        step = taken.step(self.place)
        if step is not None:
            self.facts.events.steps.append(step)
            self.taken[self.place] = call.tensors
        elif isinstance(taken.way, Alone):
            follow_source(call)
        return taken.states, getattr(taken.run, "written", taken.states[0] if taken.states else None)

    def _write(self, call: Call, new: TensorState, old: Mapping[int, TensorState]) -> None:
        """An op that writes into its arguments gives them, and what shares their memory, the state `new`.

        `old`: the states of the arguments before the op.
        """
        for tensor in call.written:
            self._write_tensor(tensor, new, old)
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


def join_written(call: Call) -> TensorState:
    """State of the tensors that an op which returns nothing writes into."""
    states = {call.state(other) for other in call.tensors}
    return REPLICATED if states <= {REPLICATED} else UNKNOWN


def written_state(
    target: Tensor, before: TensorState, new: TensorState, other: Tensor, state: TensorState
) -> TensorState:
    """State of `other`, which shares memory with `target`, after `target` got the state `new`.

    Args:
        before: the state of `target` so far. state: that of `other`.
    Raises:
        Mixes: `other` may hold token rows now in a way that its dims do not tell.
    """
    same = other is target or (
        other.shape == target.shape
        and other.stride() == target.stride()
        and other.storage_offset() == target.storage_offset()
    )
    if same or UNKNOWN in (new, state):
        return new if same else UNKNOWN
    if isinstance(new, Rows) and isinstance(before, Rows) and isinstance(state, Rows) and new.dims == before.dims:
        return Rows(state.dims, attended=new.attended or state.attended)
    if new == before == REPLICATED:
        return state
    raise Mixes("writes token rows through a view into a tensor that is not cut like them")


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or memory_id(a) == memory_id(b)
