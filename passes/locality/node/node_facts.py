"""What is known while one node of the graph runs, and what its ops give rise to: rules read and write it."""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Factor, Order
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, TensorState
from cp_rewrite.passes.values.resolution import Step
from cp_rewrite.refusal import Reason


@dataclass(frozen=True)
class Found:
    """A reason to refuse the node that runs."""

    reason: Reason
    detail: str


@dataclass
class Events:
    """What the ops of one node gave rise to, apart from the states of its outputs.

    Args:
        refusals: reasons to refuse the node.
        used: nodes that make positions whose values were used.
        indexed: nodes that make positions which only name every row of a shard in turn.
        table: the dim of the node's first operand, a table, that it takes the first T rows of.
        looked_up: nodes that take the first T rows of a table, which were looked up by tokens' own numbers.
        in_turn: such nodes whose rows were used for the tokens in turn.
        sums_fill: a sum over tokens took in the rows that fill a rank up, whatever they hold.
        sums_padding: a sum over tokens took in tokens of no document, which hold something else than on one process.
        moved: an op moved tokens to other places: what it gives is known by the nodes that it is made of.
        steps: ops that were refused as they are, and what makes them right.
    """

    refusals: list[Found] = field(default_factory=list[Found])
    used: list[fx.Node] = field(default_factory=list[fx.Node])
    indexed: list[fx.Node] = field(default_factory=list[fx.Node])
    table: int | None = None
    looked_up: list[fx.Node] = field(default_factory=list[fx.Node])
    in_turn: list[fx.Node] = field(default_factory=list[fx.Node])
    sums_fill: bool = False
    sums_padding: bool = False
    moved: bool = False
    steps: list[Step] = field(default_factory=list[Step])

    def add(self, more: Events) -> None:
        """What another op of the node gave rise to."""
        for name, value in vars(more).items():
            if isinstance(value, list):
                getattr(self, name).extend(value)
            elif value is not None and value is not False:
                setattr(self, name, value)


class NodeFacts:
    """Facts of the node that runs, and those that hold from node to node.

    Args:
        extents: sizes of the token and batch axes.
        moves: tokens may be moved to other places (`Moved`).
        resets: recurrent states begin anew at documents, whatever the model says.
    """

    def __init__(self, extents: Extents, moves: bool, resets: bool) -> None:
        self.extents, self.moves, self.resets = extents, moves, resets
        self.in_function = False
        """The node stands in a `torch.autograd.Function`, which can't read the plan."""
        self.orders = 0
        """How many sorts were seen: each is an order of its own."""
        self.fixed_positions: dict[fx.Node, str] = {}
        """Nodes that make positions which can't be replaced by the plan's, and why."""
        self.shifted: set[fx.Node] = set()
        """Those among them that do not count 0, 1, 2, …: they do not even name the rows of a shard in turn."""
        self.offsets: Container[fx.Node] = ()
        """Nodes that hold the packing's offsets."""
        self.start(None, (), ())

    def start(
        self, node: fx.Node | None, states: Sequence[tuple[Tensor, TensorState]], gradients: Sequence[Tensor]
    ) -> None:
        """Forget the last node. `states`: the node's tensors with what is known of them; `gradients`: those that need
        one."""
        self.node, self.events = node, Events()
        self.numbers: dict[int, Any] = {}
        """Known values of tensors filled with one number, by `id`."""
        self.operands = {id(tensor): tensor for tensor, _ in states[:1]}
        """Tensors that are the node's first operand, whole."""
        self.sources: dict[int, fx.Node] = {}
        """The node that gave a tensor, where it is one's whole value, by `id`."""
        self._gradients = {id(tensor) for tensor in gradients}
        self.states = {id(tensor): (tensor, state) for tensor, state in states}
        """Tensors are kept with their states: an `id` is used again once its tensor is gone."""
        for tensor, state in states:
            self.set_state(tensor, state)

    @property
    def flags(self) -> tuple[bool, bool]:
        """What `under` sets."""
        return self.moves, self.in_function

    @contextmanager
    def under(self, **flags: bool) -> Generator[None]:
        """Inside, nodes run with other `flags`."""
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(before)

    def state(self, tensor: Tensor) -> TensorState:
        held = self.states.get(id(tensor))
        return held[1] if held else REPLICATED

    def set_state(self, tensor: Tensor, state: TensorState) -> None:
        if state == WHOLE and not self.has_gradient(tensor):
            state = REPLICATED
        self.states[id(tensor)] = (tensor, state)

    def has_gradient(self, tensor: Tensor) -> bool:
        return id(tensor) in self._gradients and (tensor.is_floating_point() or tensor.is_complex())

    def hand_down_gradients(self, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """The results of an op have a gradient where one of its inputs has."""
        if any(map(self.has_gradient, inputs)):
            self._gradients.update(map(id, outs))

    def refuse(self, reason: Reason, detail: str) -> None:
        self.events.refusals.append(Found(reason, detail))

    def new_order(self, axis: tuple[Factor, ...]) -> Order:
        """The order that the sort which runs now puts rows of `axis` into."""
        self.orders += 1
        return Order(self.orders, axis)  # type: ignore[arg-type]
