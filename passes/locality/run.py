"""One node of a Dynamo graph, run on its fake inputs while the ATen ops below it are watched.

`Trace` says of each op's results what is known of them, and of what an op writes into; `NodeRunner` runs nodes under
it, those that look alike (layers) once.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx
from torch import SymFloat, Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cp_rewrite.passes.graph.new_nodes import tracing
from cp_rewrite.passes.graph.nodes import memory_of, needs_gradient, value_of
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import (
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    enable_python_dispatcher,
    memory_id,
)

from .call import COPIES, METADATA, Call, Events, NodeFacts
from .claims import REPLICATED, UNKNOWN, Extents, Mixes, Rows, TensorState
from .resolver import NO_STEPS, Steps, on_operands
from .rules.moves import follow_source
from .rules.rule import Alone
from .ways import Ways


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
        self.counted = False
        """True: one of its ops was given a fraction made from the token count."""

    def start(self, node: fx.Node, states: Sequence[tuple[Tensor, TensorState]], gradients: Sequence[Tensor]) -> None:
        """Watch one node; arguments as of `NodeFacts.start`."""
        self.facts.start(node, states, gradients)
        self.written, self.seen, self.counted = [], set(), False
        self.place, self.uses, self.taken = 0, Counter(), {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.name in METADATA:
            return out
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        call = Call(func, args, kwargs, outs, self.facts)
        self.seen.add(func._schema.name)
        self.counted |= any(map(self.facts.extents.counts_tokens, _fractions((args, kwargs))))
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


def _fractions(values: Any) -> list[SymFloat]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, SymFloat)]


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


States = Any
"""A tensor's state, or a list of states for a node that gives several tensors."""


@dataclass(frozen=True)
class Outcome:
    """States that a node gave, and the events and steps of its ops; the same for every node that looks alike."""

    states: States
    events: Events
    steps: Steps = NO_STEPS


@dataclass(frozen=True)
class _Operand:
    """A tensor that a node reads, as an alias, so that nothing done to it touches the graph's own.

    `place`: of its node among the node's arguments, as `arguments` counts them.
    """

    tensor: Tensor
    state: TensorState
    source: fx.Node
    place: int


class NodeRunner:
    """Runs nodes. `env` holds the states of the nodes walked so far; a node that writes in place changes it."""

    def __init__(self, trace: Trace, mode: FakeTensorMode, env: dict[fx.Node, States]) -> None:
        self.trace, self.facts, self.mode, self.env = trace, trace.facts, mode, env
        self._memo: dict[Any, Outcome] = {}
        self._signatures: dict[fx.Node, Any] = {}
        self._autocasts: list[tuple[Any, Any]] = []

    def running(self) -> ExitStack:
        """Ops run on fake tensors; autocast regions that a graph leaves open are left."""
        stack = ExitStack()
        stack.enter_context(tracing(self.mode))
        stack.callback(self._leave_autocasts)
        return stack

    def toggle(self, node: fx.Node) -> None:
        """Autocast changes which ops run below a node, so it is entered for real; other toggles change no state."""
        if node.target is torch.amp.autocast_mode._enter_autocast:
            self._autocasts.append((node.args, torch.amp.autocast_mode._enter_autocast(*node.args)))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            torch.amp.autocast_mode._exit_autocast(self._autocasts.pop()[1])

    def outcome(self, node: fx.Node) -> Outcome:
        """Run a node, or remember what came of one that looks alike.

        Not remembered are nodes that write in place, take rows of a table, move tokens or sort: what they do is their
        own.
        """
        key = self._key(node)
        if key is not None and key in self._memo:
            return self._memo[key]
        orders = self.facts.orders
        outcome = self._run(node)
        events = outcome.events
        again = not self.trace.written and events.table is None and not events.moved and orders == self.facts.orders
        if key is not None and again:
            self._memo[key] = outcome
        return outcome

    def _run(self, node: fx.Node) -> Outcome:
        operands: list[_Operand] = []
        if any(value_of(source) is None for source in node.all_input_nodes):
            return self._run_on_numbers(node)
        places = itertools.count()
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._load(n, next(places), operands))
        gradients = [operand.tensor for operand in operands if needs_gradient(operand.source)]
        self.trace.start(node, [(operand.tensor, operand.state) for operand in operands], gradients)
        self.facts.sources = {id(o.tensor): o.source for o in operands if isinstance(value_of(o.source), Tensor)}
        target: Any = node.target
        run: Callable[..., Any] = getattr(args[0], target) if node.op == "call_method" else target
        try:
            # The dispatcher that Dynamo runs with: it decides into which ops a call falls apart.
            with self.mode, enable_python_dispatcher(), self.trace:
                out = run(*(args[1:] if node.op == "call_method" else args), **kwargs)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            detail = f"{_name(node.target)} can't be run on fake tensors ({type(error).__name__}: {first_line})"
            self.facts.refuse(Reason.NO_LOCALITY_RULE, detail)
            return Outcome(unknown_like(node), self.facts.events)
        if _is_foreign(node, self.trace.seen) and self._has_own_backward(run, args, kwargs):
            detail = f"{_name(run)} has a backward of its own (torch.autograd.Function), which the graph does not show"
            self.facts.refuse(Reason.NO_LOCALITY_RULE, detail)
        for operand in operands:
            if any(shares_memory(operand.tensor, tensor) for tensor in self.trace.written):
                self._written(operand.source, self.facts.state(operand.tensor))
        if self.facts.events.table is not None and id(out) not in self.facts.operands:
            detail = "takes the first rows of a table and does more with it at once: take them on a line of its own"
            self.facts.refuse(Reason.POSITION_GENERATOR, detail)
        steps = self._steps(node, operands)
        if not steps.inside:  # what is taken apart is so for this row alone, as torch's guards are
            self._check_fractions(node)
        return Outcome(self._states_of(out), self.facts.events, steps)

    def _check_fractions(self, node: fx.Node) -> None:
        """Refuse a fraction made from the token count of which torch makes a plain number on the way into its ops, as
        of `eps`: none of them shows it."""
        counted = filter(self.facts.extents.counts_tokens, _fractions([value_of(n) for n in node.all_input_nodes]))
        if self.trace.seen and not self.trace.counted and any(True for _ in counted):
            detail = f"{_name(node.target)} takes a number made from the token count, of which torch makes a plain one"
            self.facts.refuse(Reason.POSITION_GENERATOR, detail)

    def _run_on_numbers(self, node: fx.Node) -> Outcome:
        """A node that reads what Dynamo has no value of: an entry of `tolist`, from which it takes a number."""
        self.trace.start(node, (), ())
        if all(self.env.get(source, REPLICATED) is REPLICATED for source in node.all_input_nodes):
            return Outcome(REPLICATED, self.facts.events)
        source = next(source for source in node.all_input_nodes if value_of(source) is None)
        while source.target is operator.getitem and value_of(cast(fx.Node, source.args[0])) is None:
            source = cast(fx.Node, source.args[0])
        if source.target is operator.getitem:  # of a tensor, which Dynamo takes apart so for `tolist`
            self.facts.refuse(Reason.TOKEN_MIXING, "tolist reads numbers off a tensor, which are others on a shard")
        else:
            detail = (
                f"{_name(source.target)} is not shown by the graph, nor what it gives, as of a torch.autograd.Function "
                "under allow_in_graph (torchao's float8 product is one)"
            )
            self.facts.refuse(Reason.NO_LOCALITY_RULE, detail)
        return Outcome(unknown_like(node), self.facts.events)

    def _steps(self, node: fx.Node, operands: Sequence[_Operand]) -> Steps:
        """The changes of a node that the steps of its ops ask for."""
        steps = self.facts.events.steps
        if not steps:
            return NO_STEPS
        found = on_operands(
            steps, self.trace.uses, self.trace.taken, {id(o.tensor): (o.place, o.source) for o in operands}
        )
        if found is not None:
            return Steps(tuple(sorted(found.items())), reasons=tuple(steps))
        several = any(isinstance(value_of(n), list | tuple) for n in node.all_input_nodes)
        tensors = all(isinstance(leaf, Tensor) for leaf in tree_leaves(value_of(node)))
        if several or not tensors or any(step.writes for step in steps):
            for step in steps:
                if step.local:
                    self.facts.events.sums_fill = True
                else:
                    self.facts.refuse(step.reason, step.detail)
            return NO_STEPS
        return Steps((), tuple(steps), tuple(args for args, _ in self._autocasts), tuple(steps))

    def _load(self, source: fx.Node, place: int, operands: list[_Operand]) -> Any:
        """A node's value for one run; its tensors are added to `operands`."""

        def alias(value: Any, state: States) -> Any:
            if isinstance(value, Tensor):
                operands.append(_Operand(value.detach(), state, source, place))
                return operands[-1].tensor
            if isinstance(value, list | tuple) and isinstance(state, list):
                return type(value)(alias(v, s) for v, s in zip(value, state, strict=True))
            return value

        return alias(value_of(source), self.env.get(source, REPLICATED))

    def _has_own_backward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """True if the gradient of a function's result goes through a torch.autograd.Function."""

        def fresh(value: Any) -> Any:
            differentiable = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            return value.detach().requires_grad_().clone() if differentiable else value

        with self.mode, enable_python_dispatcher(), torch.enable_grad():
            out = function(*tree_map(fresh, args), **tree_map(fresh, kwargs))
        pending = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        seen: set[Any] = set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            pending.extend(following for following, _ in node.next_functions)
        return False

    def _written(self, node: fx.Node, new: TensorState) -> None:
        """A node's tensor got new content: so did every node that shares its memory."""
        before, memory = self.env.get(node, REPLICATED), memory_of(node)
        for other, state in [(n, s) for n, s in self.env.items() if memory is not None and memory_of(n) == memory]:
            if other.op in ("placeholder", "get_attr") and state is REPLICATED and new not in (REPLICATED, UNKNOWN):
                detail = "writes what only this rank knows into an input, which the next step takes for everyone's"
                self.facts.refuse(Reason.TOKEN_MIXING, detail)
            try:
                self.env[other] = written_state(value_of(node), before, new, value_of(other), state)
            except Mixes as mixes:
                self.facts.refuse(mixes.reason, mixes.detail)
                self.env[other] = UNKNOWN

    def _states_of(self, out: Any) -> States:
        if isinstance(out, Tensor):
            return self.facts.state(out)
        return [self._states_of(item) for item in out] if isinstance(out, list | tuple) else REPLICATED

    def _leave_autocasts(self) -> None:
        while self._autocasts:
            torch.amp.autocast_mode._exit_autocast(self._autocasts.pop()[1])

    def _key(self, node: fx.Node) -> Any:
        """The key of an outcome: all that it depends on; None when that can't be hashed."""
        parts = [self._part(arg) for arg in node.args] + [(k, self._part(v)) for k, v in node.kwargs.items()]
        # Positions are known by the nodes that make them.
        own = node if node.target is torch.arange else None
        key = (node.op, node.target, tuple(parts), tuple(a for a, _ in self._autocasts), self.facts.flags, own)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _part(self, arg: Any) -> Any:
        """One argument's part of an outcome's key: a tensor's signature and state, the value of anything else."""
        if isinstance(arg, fx.Node):
            if arg not in self._signatures:
                self._signatures[arg] = self._signature(value_of(arg))
            state = self.env.get(arg, REPLICATED)
            return (
                self._signatures[arg],
                tuple(state) if isinstance(state, list) else state,
                arg in self.facts.offsets,
            )
        if isinstance(arg, list | tuple):
            return tuple(self._part(item) for item in arg)
        if isinstance(arg, slice):
            return ("slice", self._part(arg.start), self._part(arg.stop), self._part(arg.step))
        return (type(arg), arg)

    def _signature(self, value: Any) -> Any:
        """Equal for values that ops can't tell apart: tensors of one dtype and geometry."""
        size = self.facts.extents.size
        if isinstance(value, Tensor):
            geometry = (tuple(map(size, value.shape)), tuple(map(size, value.stride())), size(value.storage_offset()))
            return (value.dtype, value.requires_grad, *geometry)
        if isinstance(value, list | tuple):
            return tuple(self._signature(item) for item in value)
        return size(value) if hasattr(value, "node") else (type(value), value)


def _is_foreign(node: fx.Node, seen: Collection[str]) -> bool:
    """True if a node calls code from outside of torch that fell apart into the ops that were `seen`.

    A function that Dynamo was told to leave whole, or an op made of others; not an op that is seen as such.
    """
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        name = node.target._qualified_op_name if isinstance(node.target, OpOverloadPacket) else node.target._schema.name
        return not name.startswith(("aten::", "prims::")) and name not in seen
    module = str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    return module not in ("torch", "_operator", "operator", "math", "builtins")


def _name(target: Any) -> str:
    """A function's name, the same on every rank: no address in it."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target)
    return str(getattr(target, "__name__", target))


def unknown_like(node: fx.Node) -> States:
    """UNKNOWN, for each of a node's results."""
    value = node.meta.get("example_value")
    return [UNKNOWN] * len(value) if isinstance(value, list | tuple) else UNKNOWN
