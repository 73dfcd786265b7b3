"""One ATen op as locality rules see it: its arguments by name, and the states of its tensors.

Events, NodeFacts    events of a node's ops, which rules write, and facts about the node, which they read
advice               words about an op that mixes tokens, by what the op is for
Call                 the op, and checks that rules share
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.nodes import bind_op, op_name
from cp_rewrite.passes.values.edits import Step
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import OpOverload

from .claims import REPLICATED, UNKNOWN, WHOLE, Extents, Factor, Mixes, Order, Rows, Size, T, TensorState, has


@dataclass(frozen=True)
class Found:
    """A reason to refuse the node that runs."""

    reason: Reason
    detail: str


@dataclass
class Events:
    """Events that the ops of one node gave rise to, apart from the states of its outputs.

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
        """Add the events of another op of the node."""
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
        """Keys of `fixed_positions` that do not count 0, 1, 2, …: they do not even name the rows of a shard in turn."""
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
        """(moves, in_function): the flags that `under` sets."""
        return self.moves, self.in_function

    @contextmanager
    def under(self, **flags: bool) -> Generator[None]:
        """Run nodes inside with other `flags`."""
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


SHIFT_HINT = (
    "shift labels over the global row before they are cut: sharding.shard(batch, shift_labels=True), "
    "and give the model shift_labels"
)
TABLE_HINT = "takes as many rows of a table as the shard has tokens: index the table by position_ids"
MEAN_HINT = "return sums and use cp.token_mean(sum, count, sharding), or divide a sum by num_items_in_batch"
COUNT_HINT = (
    "make it of the whole row before the batch is cut, and pass it as an argument; the number of tokens alone is "
    "torch.ones(T).sum()"
)
_BEFORE = "make it from the global row, before the batch is cut, and name it in tokens"
_WHOLE = (
    "pad rows to whole chunks where the batch is made, and leave this out; a scan over chunks (linear attention, a "
    "state-space model) can't be sharded here"
)
_CHUNKS = (
    "a loop over chunks runs on all tokens where it treats each of them alike, and only adds up their sums "
    "(`total = total + x`) or joins their rows in order (`torch.cat`)"
)
_ADVICE = {
    "convolution": "a convolution over tokens reads those beside each, which other ranks may hold: it can't be sharded "
    "here",
    "pool": "pooling over tokens reads those beside each, which other ranks may hold: it can't be sharded here",
    "chunks": _WHOLE,
    "pads": "a shift over tokens reads some that another rank may hold: shift by a fixed number, with resolve=True",
    "cumsum cumprod cummax cummin logcumsumexp": "a running sum over tokens needs those before each, which other ranks "
    "may hold",
    "roll slice constant_pad_nd cat": "a shift over tokens, or a choice by their place, reads tokens that another rank "
    "may hold: it can't be sharded here",
}
"""Advice about ops on floating-point tensors, by words in the ops' names and verbs."""

_LOSSES = frozenset({"cross_entropy", "nll_loss", "cross_entropy_loss", "log_softmax", "linear_cross_entropy"})
_COPIES = frozenset(
    "contiguous view reshape flatten unflatten squeeze unsqueeze to float long int type clone detach getitem pad "
    "transpose permute".split()
)


def advice(node: fx.Node | None, op: str, x: Tensor) -> str:
    """Advice on an op that ran below `node` over the tokens of `x`; "" where that is not known.

    `op`: its name, and the verb that refusals say.
    """
    if op.startswith("split"):
        return f"; {_CHUNKS}"
    if node is not None and _feeds_loss(node):
        return f"; {SHIFT_HINT}"
    if not x.is_floating_point():
        return f"; {_BEFORE}"
    return next((f"; {text}" for words, text in _ADVICE.items() if any(word in op for word in words.split())), "")


def kind_by_name(name: str) -> str:
    """The kind of an op without a rule, where its name tells that no token goes through it alone; "" elsewhere."""
    if re.search(r"attn|attention|fmha|sdpa", name):
        return "attention"
    return "a scan" if re.search(r"scan|ssm|ssd|mamba|delta_rule|retention|linear_att", name) else ""


def _feeds_loss(node: fx.Node) -> bool:
    """True if what a node gives goes into a loss as it is: labels, or the scores of the tokens that have one."""
    seen: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if op_name(user) in _LOSSES:
            return True
        if user not in seen and op_name(user) in _COPIES:
            seen.add(user)
            pending += user.users
    return False


@dataclass
class Call:
    """One ATen op that was run, as one of its ways sees it: its arguments, its results `outs`, what is known of them.

    `claims`: of operands that are read as something else than they are, by `id`. `events`: what the way gave rise to.
    """

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outs: Sequence[Tensor]
    facts: NodeFacts
    claims: Mapping[int, TensorState] = field(default_factory=dict[int, TensorState])
    events: Events = field(default_factory=Events)
    named: set[int] = field(default_factory=set[int])
    """By `id`: indices that only name the shard's rows, which its rule has taken so."""

    def reading(self, claims: Mapping[int, TensorState]) -> Call:
        """The same op, some of whose operands have other claims; nothing came of it yet."""
        return Call(self.func, self.args, self.kwargs, self.outs, self.facts, claims)

    @property
    def extents(self) -> Extents:
        return self.facts.extents

    @property
    def name(self) -> str:
        return aten_name(self.func)

    @property
    def first(self) -> Tensor:
        """The first tensor among the arguments."""
        return self.tensors[0]

    @cached_property
    def bound(self) -> dict[str, Any]:
        """Argument name -> value, defaults included."""
        return bind_op(self.func, self.args, self.kwargs)

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def numbers(self) -> dict[str, Any]:
        """The arguments that are numbers, but no sizes or places: some stand where a tensor may."""
        kinds = {a.name: str(a.type).removeprefix("Optional[").rstrip("]") for a in self.func._schema.arguments}
        found = {name: value for name, value in self.bound.items() if kinds[name] in ("number", "float", "Tensor")}
        return {name: value for name, value in found.items() if not isinstance(value, Tensor)}

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the op writes into."""
        arguments = self.func._schema.arguments
        targets = [self.bound[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        return [target for target in targets if isinstance(target, Tensor)]

    def arg(self, *names: str) -> Any:
        """The argument of the first of these names that the op has; None without any."""
        return next((self.bound[name] for name in names if name in self.bound), None)

    def state(self, tensor: Tensor | None) -> TensorState:
        if tensor is None:
            return REPLICATED
        return self.claims[id(tensor)] if id(tensor) in self.claims else self.facts.state(tensor)

    def rows(self, tensor: Tensor | None) -> Rows | None:
        state = self.state(tensor)
        return state if isinstance(state, Rows) else None

    def sizes(self, tensor: Tensor) -> list[Size]:
        return [self.extents.size(size) for size in tensor.shape]

    def entries(self, tensor: Tensor) -> list[tuple[Any, Size]]:
        """(dim, size) of each dim of a tensor."""
        state, sizes = self.state(tensor), self.sizes(tensor)
        return list(zip(state.dims if isinstance(state, Rows) else [None] * len(sizes), sizes, strict=True))

    def use_positions(self, *tensors: Tensor | None) -> None:
        """Note that these tensors' values matter: `arange` over tokens among them must count the global row."""
        for tensor in tensors:
            rows = self.rows(tensor)
            if rows and rows.shard_rows is not None:
                raise Mixes(f"{self.name} uses as values the places that rows have in a shard")
            if rows and rows.iota is not None:
                if rows.iota in self.facts.fixed_positions:
                    raise Mixes(self.facts.fixed_positions[rows.iota], Reason.POSITION_GENERATOR)
                self.events.used.append(rows.iota)

    def walked_by(self, rows: Rows | None) -> fx.Node | None:
        """The `arange` that names the shard's rows in turn, where `rows` is still one."""
        return None if rows is None or rows.iota in self.facts.shifted else rows.iota

    def refuse_axis(self, state: Rows, dim: int, verb: str) -> None:
        """Refuse an op that mixes the entries of a dim, where that holds tokens or rows of the batch.

        `verb` says what the op does to the dim.
        """
        axis = state.dims[dim]
        if axis is None:
            return
        if not has(axis, T):
            raise Mixes(f"{self.name} {verb} the batch dim while rows of the batch are cut in different orders")
        what = f"{self.name} {verb}"
        raise Mixes(f"{what} the token dim (dim {dim}){advice(self.facts.node, what, self.first)}")

    def check_numbers(self, *values: Any) -> None:
        """Refuse an op of which these numbers, or any of all its arguments, were made from the token count."""
        for value in tree_leaves(values or (self.args, self.kwargs)):
            if self.extents.counts_tokens(value):
                hint = MEAN_HINT if self.name.startswith(("div", "true_divide", "mul")) else COUNT_HINT
                detail = f"{self.name} uses the number of tokens as a value, which is another one on a shard; {hint}"
                raise Mixes(detail, Reason.POSITION_GENERATOR)


def mixes_parts(call: Call) -> Mixes:
    """A Mixes of an op that does something else with a sum over tokens than to add it up."""
    return Mixes(f"{call.name} on a sum over the shard's tokens is not the same on the whole; {MEAN_HINT}")


def check_gradients(call: Call) -> None:
    """Raise where an operand that all ranks have in full would get a gradient from each, beside sums over all ranks."""
    if any(call.state(x) is REPLICATED and call.facts.has_gradient(x) for x in call.tensors):
        raise Mixes(f"{call.name} adds a term that every rank computes in full: its gradient would count once per rank")


def check_sizes(call: Call, tensor: Tensor, state: TensorState) -> None:
    """Check a rule's result: dims are as long as their axes, and no other dim has T in its size."""
    extents = call.extents
    dims = state.dims if isinstance(state, Rows) else [None] * tensor.ndim
    if state is UNKNOWN:
        return
    for dim, size in zip(dims, call.sizes(tensor), strict=True):
        if dim is not None:
            long: Any = 1
            for factor in dim:
                long = long * extents.of(factor)
            assert long == size or sympy.expand(long - size) == 0, f"{call.func}: {dim} of size {size}"
        elif isinstance(size, sympy.Expr) and extents.tokens in size.free_symbols:
            raise Mixes(
                f"{call.name} makes a dim of {size} entries, which is another number on a shard",
                Reason.POSITION_GENERATOR,
            )


@lru_cache(maxsize=4096)
def aten_name(func: OpOverload) -> str:
    """`add` for aten::add.Tensor and aten::add_.Tensor; `ns::op` elsewhere."""
    space, name = func._schema.name.split("::")
    if func._schema.is_mutable and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if space == "aten" else f"{space}::{name}"


COPIES = frozenset({"clone", "view", "_unsafe_view", "detach"})
"""Ops that torch runs or leaves out as strides and gradients ask for: places of other ops are counted without them."""
METADATA = frozenset(
    {"prim::device", "prim::layout", "aten::is_contiguous", "aten::is_strides_like_format", "aten::sym_size"}
    | {"aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::size", "aten::stride", "aten::dim"}
)
"""Ops that read no element: they only ask for sizes and the like."""
