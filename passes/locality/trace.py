"""Watch the ATen ops below one node of a Dynamo graph, and carry states through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_rewrite.refusal import Reason

from .call import GROUPED_PRODUCTS, Call, FoundRule, check_sizes, vouched_name, vouched_state
from .state import (
    MEAN_HINT,
    REPLICATED,
    UNKNOWN,
    Deferred,
    Dims,
    Extents,
    Factor,
    GroupSizes,
    Mixes,
    Order,
    Partial,
    Rows,
    T,
    TensorState,
)


@dataclass(frozen=True)
class Found:
    """What running one node showed, apart from the states of its outputs."""

    reason: Reason
    detail: str


@dataclass
class Events:
    """What the ops of one node gave rise to."""

    refusals: list[Found] = field(default_factory=list[Found])
    used: list[fx.Node] = field(default_factory=list[fx.Node])
    """Position generators whose values were used."""
    indexed: list[fx.Node] = field(default_factory=list[fx.Node])
    """Position generators that only name every row of a shard in turn."""
    table: int | None = None
    """The dim of the node's first operand, a table, that it takes the first T rows of."""
    unmasked: bool = False
    """A sum over tokens took in the rows of padding tokens, whatever they hold."""


class Trace(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Carries states through the ATen ops that run while it is active, under a fake tensor mode.

    Args:
        find_rule: an op's rule, and whether it also runs when no input is cut (the op may make rows from sizes).
        extents: sizes of the token and batch axes.
        vouched: names of ops that the user says act on each token alone.
    """

    def __init__(self, find_rule: Callable[[OpOverload], FoundRule], extents: Extents, vouched: frozenset[str]) -> None:
        super().__init__()
        self.find_rule, self.extents, self.vouched = find_rule, extents, vouched
        self.events = Events()
        self.node: fx.Node | None = None
        self.nested = False
        self.orders = 0
        """How many sorts were seen: each is an order of its own."""
        self.operands: dict[int, Tensor] = {}
        """Tensors that are the node's first operand, whole."""
        self.fixed_positions: dict[fx.Node, str] = {}
        self.shifted: set[fx.Node] = set()
        """Those among them that do not count 0, 1, 2, …: they do not even name the rows of a shard in turn."""
        self.written: list[Tensor] = []
        self.seen: set[str] = set()
        """Names of the ops that the node ran."""
        self.numbers: dict[int, Any] = {}
        """Known values of tensors filled with one number."""
        self._states: dict[int, tuple[Tensor, TensorState]] = {}
        self._gradients: set[int] = set()

    def start(
        self, node: fx.Node, states: Sequence[tuple[Tensor, TensorState]], gradients: Sequence[Tensor] = ()
    ) -> None:
        """Watch one node. `states`: its tensors with what is known of them; `gradients`: those that need one."""
        self.node, self.events, self.written, self.numbers, self.seen = node, Events(), [], {}, set()
        self._states = {id(tensor): (tensor, state) for tensor, state in states}
        self.operands = {id(tensor): tensor for tensor, _ in states[:1]}
        self._gradients = {id(tensor) for tensor in gradients}

    def has_gradient(self, tensor: Tensor) -> bool:
        return id(tensor) in self._gradients

    def state(self, tensor: Tensor) -> TensorState:
        held = self._states.get(id(tensor))
        return held[1] if held else REPLICATED

    def positions(self, call: Call, dims: Dims) -> fx.Node:
        """The node whose `arange` over tokens runs now; noted when it can't be replaced by the plan's positions."""
        assert self.node is not None
        why = None
        if call.arg("start") not in (None, 0) or call.arg("step") not in (None, 1):
            why = "arange over tokens does not count 0, 1, 2, …: write arange(T) and add or multiply after it"
            self.shifted.add(self.node)
        elif dims != ((T,),):
            why = "arange runs over the flattened rows of the batch"
        elif self.node.target is not torch.arange:
            why = f"{self.node.name} makes positions inside: pass position_ids to the model"
        elif self.nested:
            why = "positions are made inside a nested region: make them outside and pass them in"
        if why is not None:
            self.fixed_positions[self.node] = why
        return self.node

    def new_order(self, axis: tuple[Factor, ...]) -> Order:
        """The order that the sort which runs now puts rows of `axis` into."""
        self.orders += 1
        return Order(self.orders, axis)  # type: ignore[arg-type]

    def table_rows(self, call: Call, table: Tensor, dim: int) -> Rows:
        """The first T rows of a table are the rows of positions 0, 1, 2, …"""
        start, step = call.arg("start"), call.arg("step")
        if start not in (None, 0) or step not in (None, 1) or id(table) not in self.operands or self.nested:
            raise Mixes(
                "takes as many rows of a table as the shard has tokens: index the table by position_ids",
                Reason.POSITION_GENERATOR,
            )
        self.events.table = dim
        self.operands[id(call.outs[0])] = call.outs[0]
        return Rows(tuple((T,) if i == dim else None for i in range(table.ndim)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.name in _METADATA:
            return out
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        call = Call(func, args, kwargs, outs, self)
        self.seen.add(func._schema.name)
        try:
            new = self._transfer(call)
            states = list(new) if isinstance(new, Sequence) else [new] * len(outs)
            for tensor, state in zip(outs, states, strict=True):
                check_sizes(call, tensor, state)
        except Mixes as mixes:
            self.events.refusals.append(Found(mixes.reason, mixes.detail))
            states = [UNKNOWN] * len(outs)
        before = {id(tensor): self.state(tensor) for tensor in call.tensors}
        for tensor, state in zip(outs, states, strict=True):
            self._states[id(tensor)] = (tensor, state)
            if any(id(x) in self._gradients for x in call.tensors):
                self._gradients.add(id(tensor))
        if func._schema.is_mutable:
            self._write(call, states, before)
        return out

    def _transfer(self, call: Call) -> TensorState | Sequence[TensorState]:
        states = [self.state(tensor) for tensor in call.tensors]
        if UNKNOWN in states:
            return UNKNOWN
        if any(isinstance(s, GroupSizes) for s in states) and call.name not in GROUP_OPS:
            raise Mixes(f"{call.name} uses how many tokens of the shard have a value")
        deferred = next((state for state in states if isinstance(state, Deferred)), None)
        if deferred is not None:
            if call.name in ("_assert_async", "_functional_assert_async"):
                return REPLICATED
            if call.name in ("logical_not", "bitwise_not", "logical_and", "bitwise_and", "clone", "detach", "alias"):
                return deferred
            raise Mixes(deferred.detail)
        if "scaled_dot_product" in call.name:
            raise Mixes(f"{call.name} is attention whose mask was not proven: call it by itself, with the mask")
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            raise Mixes(f"{call.name} draws other random numbers on a shard (dropout: set it to 0)", Reason.DROPOUT)
        cut = any(state is not REPLICATED for state in states)
        found = self.find_rule(call.func)
        vouched = cut and vouched_name(call.func) in self.vouched
        if not vouched and not found.sizes:
            call.check_numbers()
        if not cut and (not found.from_sizes or "out" in call.kwargs):
            call.check_numbers()
            return REPLICATED
        if not found.sums and any(isinstance(state, Partial) for state in states):
            raise Mixes(f"{call.name} on a sum over the shard's tokens is not the same on the whole; {MEAN_HINT}")
        if vouched:
            new: TensorState | Sequence[TensorState] = [vouched_state(call, out) for out in call.outs]
        elif found.rule is None or "out" in call.kwargs:
            how = " with out=" if "out" in call.kwargs else ""
            raise Mixes(f"{vouched_name(call.func)}{how} has no rule", Reason.NO_LOCALITY_RULE)
        else:
            new = found.rule(call)
        if vouched or not found.positions:
            use_lost_positions(call, new if isinstance(new, Sequence) else [new])
        return new

    def _write(self, call: Call, states: Sequence[TensorState], old: Mapping[int, TensorState]) -> None:
        """An op that writes into its arguments gives them, and what shares their memory, its result's state."""
        targets = [a.name for a in call.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for target in targets:
            tensor = call.bound[target]
            if isinstance(tensor, Tensor):
                new = states[0] if states else join_written(call, tensor)
                before = old[id(tensor)]
                if isinstance(before, Rows) and before.iota is not None:
                    self.events.refusals.append(Found(Reason.POSITION_GENERATOR, "changes positions in place"))
                written = [(other, state) for other, state in self._states.values() if shares_memory(other, tensor)]
                for other, state in written:
                    state = old.get(id(other), state)
                    try:
                        after = written_state(tensor, before, new, other, state)
                    except Mixes as mixes:
                        self.events.refusals.append(Found(mixes.reason, mixes.detail))
                        after = UNKNOWN
                    self._states[id(other)] = (other, after)
                self.written.append(tensor)


def use_lost_positions(call: Call, results: Sequence[TensorState]) -> None:
    """Positions and places that no result holds any more went into its values."""
    kept = [state for state in results if isinstance(state, Rows)]
    for tensor in call.tensors:
        rows = call.rows(tensor)
        if rows is None:
            continue
        lost = rows.iota is not None and all(state.iota is not rows.iota for state in kept)
        if lost or (rows.places is not None and all(state.places is None for state in kept)):
            call.use_positions(tensor)


def join_written(call: Call, tensor: Tensor) -> TensorState:
    """State of a tensor written by an op that returns nothing."""
    states = {call.state(other) for other in call.tensors}
    return REPLICATED if states <= {REPLICATED} else UNKNOWN


def written_state(
    target: Tensor, before: TensorState, new: TensorState, other: Tensor, state: TensorState
) -> TensorState:
    """State of `other`, which shares memory with `target`, after `target` got the state `new`."""
    same = other is target or (
        other.shape == target.shape
        and other.stride() == target.stride()
        and other.storage_offset() == target.storage_offset()
    )
    if same or UNKNOWN in (new, state):
        return new if same else UNKNOWN
    if isinstance(new, Rows) and isinstance(before, Rows) and isinstance(state, Rows) and new.dims == before.dims:
        return Rows(state.dims)
    if new == before == REPLICATED:
        return state
    raise Mixes("writes token rows through a view into a tensor that is not cut like them")


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or a.untyped_storage()._cdata == b.untyped_storage()._cdata


GROUP_OPS = frozenset({"cumsum", "_to_copy", *GROUPED_PRODUCTS})
_METADATA = frozenset(
    {"prim::device", "prim::layout", "aten::is_contiguous", "aten::is_strides_like_format", "aten::sym_size"}
    | {"aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::size", "aten::stride", "aten::dim"}
)
