"""Token locality: prove that nothing outside attention mixes tokens, so that a shard computes what the whole would.

The Dynamo graph is walked once under its own fake tensors. Below each node a dispatch mode sees the ATen ops and
carries, per tensor, where its tokens are (`locality_state`), by the rules of `locality_rules`; so a violation belongs
to a node, and with it to a line of the user's code. Nodes that look alike (layers) are looked at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding

from .locality_inputs import input_state, read_extents
from .locality_liveness import live_nodes, memory_of, nested_body, placeholders
from .locality_rules import find_rule
from .locality_state import REPLICATED, UNKNOWN, B, Dims, Extents, Mixes, Rows, T, TensorState
from .locality_trace import Events, Found, Trace, written_state
from .sites import Site

if TYPE_CHECKING:
    from .state import State

Attention = ("scaled_dot_product_attention", "flex_attention", "_varlen_attn")


@dataclass(frozen=True)
class PositionGenerator:
    """A node that makes positions 0, 1, 2, … of the shard, whose values are used per token.

    Args:
        node: `arange`: its (T,) result stands for the rows' global indices. `table`: it takes the first T rows, along
            `dim`, of its first operand; these stand for the rows of the global indices.
        kind: which of both.
        dim: for a table, the dim of the operand that positions run over.
        shared_order: the batch has several rows, which share these positions: they must be cut in one order.
    """

    node: fx.Node
    kind: Literal["arange", "table"] = "arange"
    dim: int = 0
    shared_order: bool = False


@dataclass(frozen=True)
class LocalityReport:
    """What the locality check found.

    Args:
        refusals: every op that is not the same on a shard.
        positions: nodes to be made global.
        padded_sums: nodes that sum over tokens whatever padding rows hold: right only when no rank has padding rows.
        static: the graph was captured for one token count; numbers made from it can only be guessed.
    """

    refusals: list[Refusal] = field(default_factory=list[Refusal])
    positions: list[PositionGenerator] = field(default_factory=list[PositionGenerator])
    padded_sums: list[fx.Node] = field(default_factory=list[fx.Node])
    static: bool = False


def check_token_locality(state: State) -> State:
    """Pass: add what the locality check finds to the state."""
    report = check_locality(state.graph_module, state.sharding, state.sites, state.source_of)
    unsupported = [
        Refusal(
            Reason.POSITION_GENERATOR,
            "takes as many rows of a table as the shard has tokens: index the table by position_ids",
            position.node,
        )
        for position in report.positions
        if position.kind == "table"
    ] + [
        Refusal(
            Reason.TOKEN_MIXING,
            "sums over tokens without leaving out padding rows: multiply by a mask made from labels (labels != -100)",
            node,
        )
        for node in report.padded_sums
    ]
    positions = tuple(position for position in report.positions if position.kind == "arange")
    return replace(state, refusals=(*state.refusals, *report.refusals, *unsupported), positions=positions)


def check_locality(
    gm: fx.GraphModule, sharding: Sharding, sites: Sequence[Site], source_of: Mapping[fx.Node, str]
) -> LocalityReport:
    """Prove that every op outside the attention of `sites` treats tokens alone, or say which does not.

    Args:
        gm: the captured graph, not yet rewritten; it is not changed.
        sharding: the annotation.
        sites: attention nodes that will be rewritten; what only feeds their masks is not looked at.
        source_of: placeholder -> argument name.
    """
    mode = _fake_mode(gm)
    extents, refusals = read_extents(source_of, sharding, mode.shape_env)
    if extents is None:
        return LocalityReport(refusals)
    walk = _Walk(sharding, sites, source_of, extents, mode, live_nodes(gm, sites))
    walk.refusals += refusals
    with walk.running():
        walk.root(gm)
    return walk.report()


States = Any
"""A tensor's state, or a list of states for a node that gives several tensors."""


@dataclass
class _Outcome:
    """What a node did; the same for every node that looks alike."""

    states: States
    events: Events


class _Walk:
    def __init__(
        self,
        sharding: Sharding,
        sites: Sequence[Site],
        source_of: Mapping[fx.Node, str],
        extents: Extents,
        mode: FakeTensorMode,
        live: set[fx.Node],
    ) -> None:
        self.sharding, self.source_of, self.extents, self.mode, self.live = sharding, source_of, extents, mode, live
        self.sites = {site.node: site for site in sites}
        self.trace = Trace(find_rule, extents, frozenset(sharding.local_ops))
        self.refusals: list[Refusal] = []
        self.env: dict[fx.Node, States] = {}
        self.memo: dict[Any, _Outcome] = {}
        self.shapes: dict[fx.Node, Any] = {}
        self.contexts: list[Any] = []
        self.used: dict[fx.Node, None] = {}
        self.indexed: set[fx.Node] = set()
        self.tables: dict[fx.Node, int] = {}
        self.padded_sums: dict[fx.Node, None] = {}

    def running(self) -> ExitStack:
        """Fake tensors, no autograd, no new guards: the shapes are those that Dynamo saw already."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        shape_env = self.mode.shape_env
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        allow = self.mode.allow_non_fake_inputs
        stack.callback(setattr, self.mode, "allow_non_fake_inputs", allow)
        self.mode.allow_non_fake_inputs = True
        stack.callback(self._leave_contexts)
        return stack

    def root(self, gm: fx.GraphModule) -> None:
        for node in placeholders(gm):
            if node in self.live:
                self.env[node], refusal = input_state(node, self.source_of, self.sharding, self.extents)
                self.refusals += [refusal] if refusal else []
        output = self.graph(gm)
        for leaf in output.all_input_nodes:
            value = leaf.meta.get("example_value")
            if self.env.get(leaf) is REPLICATED and isinstance(value, Tensor) and value.requires_grad:
                if leaf.op != "placeholder":
                    detail = "every rank computes this output in full, so its gradient would count once per rank"
                    self.refusals.append(Refusal(Reason.TOKEN_MIXING, detail, leaf))

    def graph(self, gm: fx.GraphModule) -> fx.Node:
        """Walk the nodes of one graph whose placeholders are known; returns its output node."""
        for node in gm.graph.nodes:
            if node.op == "output":
                return node
            if _is_toggle(node):
                self._toggle(node)
            elif node in self.live and node.op != "placeholder":
                self.env[node] = self.node(node)
        raise AssertionError("a graph has an output")

    def node(self, node: fx.Node) -> States:
        if node.op == "get_attr":
            return REPLICATED
        if node in self.sites:
            return self._attention(self.sites[node])
        if node.target is operator.getitem and isinstance(self.env.get(node.args[0]), list):  # type: ignore[arg-type]
            return self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        if (body := nested_body(node)) is not None:
            return self._nested(body[0], body[1])
        if not isinstance(node.target, str) and _is_unproven(node.target):
            return self._refuse(node, Reason.TOKEN_MIXING, f"{node.name} is attention whose mask was not proven")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._refuse(node, Reason.NO_LOCALITY_RULE, f"higher-order op {node.target.name()} has no rule")
        return self._take(node, self._outcome(node))

    def _outcome(self, node: fx.Node) -> _Outcome:
        key = self._key(node)
        if key is not None and key in self.memo:
            return self.memo[key]
        outcome = self._run(node)
        if key is not None and not self.trace.written and outcome.events.table is None:
            self.memo[key] = outcome
        return outcome

    def _run(self, node: fx.Node) -> _Outcome:
        """Run one node on its fake inputs and watch."""
        known: list[tuple[Tensor, TensorState]] = []
        aliases: dict[int, fx.Node] = {}

        def load(source: fx.Node) -> Any:
            return _with_states(
                _value(source), self.env.get(source, REPLICATED), known, lambda t: aliases.update({id(t): source})
            )

        args, kwargs = fx.map_arg((node.args, node.kwargs), load)
        self.trace.start(node, known)
        try:
            with self.mode, self.trace:
                out = (
                    getattr(args[0], node.target)(*args[1:], **kwargs)
                    if node.op == "call_method"
                    else node.target(*args, **kwargs)
                )  # type: ignore[operator]
        except Exception as error:
            detail = f"{node.target} can't be run on fake tensors ({type(error).__name__}: {error})"
            self.trace.events.refusals.append(Found(Reason.NO_LOCALITY_RULE, detail))
            return _Outcome(UNKNOWN, self.trace.events)
        for tensor, state in self.trace.written:
            if id(tensor) in aliases:
                self._written(aliases[id(tensor)], state)
        return _Outcome(self._states_of(out), self.trace.events)

    def _written(self, node: fx.Node, new: TensorState) -> None:
        """A node's tensor got new content: so did every node that shares its memory."""
        before, memory = self.env.get(node, REPLICATED), memory_of(node)
        for other, state in list(self.env.items()):
            if not isinstance(state, list) and memory is not None and memory_of(other) == memory:
                try:
                    self.env[other] = written_state(_value(node), before, new, _value(other), state)
                except Mixes as mixes:
                    self.trace.events.refusals.append(Found(mixes.reason, mixes.detail))
                    self.env[other] = UNKNOWN

    def _take(self, node: fx.Node, outcome: _Outcome) -> States:
        events = outcome.events
        for found in events.refusals:
            self._refuse(node, found.reason, found.detail)
        self.used.update(dict.fromkeys(events.used))
        self.indexed.update(events.indexed)
        if events.table is not None:
            self.tables[node] = events.table
        if events.unmasked:
            self.padded_sums[node] = None
        return outcome.states

    def _refuse(self, node: fx.Node, reason: Reason, detail: str) -> States:
        refusal = Refusal(reason, detail, node)
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        value = node.meta.get("example_value")
        return [UNKNOWN] * len(value) if isinstance(value, list | tuple) else UNKNOWN

    def _attention(self, site: Site) -> States:
        for name, node in (("query", site.query), ("key", site.key), ("value", site.value)):
            state = self.env.get(node, REPLICATED)
            if state is not UNKNOWN and not (isinstance(state, Rows) and state.dims[2:3] == ((T,),)):
                self._refuse(site.node, Reason.TOKEN_MIXING, f"attention's {name} does not have its tokens in dim 2")
        batch = None if self.extents.batch == 1 else (B,)
        dims: Dims = (batch, None, (T,), None)
        value = site.node.meta.get("example_value")
        return [Rows(dims[: t.ndim]) for t in value] if isinstance(value, list | tuple) else Rows(dims)

    def _nested(self, body: fx.GraphModule, operands: Sequence[Any]) -> States:
        states = [self.env.get(o, REPLICATED) if isinstance(o, fx.Node) else REPLICATED for o in operands]
        key = (body, tuple(states)) if not any(isinstance(state, list) for state in states) else None
        if key is not None and key in self.memo:
            return self.memo[key].states
        self.env.update(zip(placeholders(body), states, strict=True))
        nested, self.trace.nested = self.trace.nested, True
        output = self.graph(body)
        self.trace.nested = nested
        result = fx.map_arg(output.args[0], lambda n: self.env.get(n, REPLICATED))
        result = list(result) if isinstance(result, list | tuple) else result
        if key is not None:
            self.memo[key] = _Outcome(result, Events())
        return result

    def _toggle(self, node: fx.Node) -> None:
        """Autocast changes which ops run below a node, so it is entered for real; other toggles change no state."""
        if node.target is torch.amp.autocast_mode._enter_autocast:
            context = torch.amp.autocast_mode._enter_autocast(*node.args)
            self.contexts.append((node.args, context, node))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            torch.amp.autocast_mode._exit_autocast(self.contexts.pop()[1])

    def _leave_contexts(self) -> None:
        while self.contexts:
            torch.amp.autocast_mode._exit_autocast(self.contexts.pop()[1])

    def _states_of(self, out: Any) -> States:
        if isinstance(out, Tensor):
            return self.trace.state(out)
        return [self._states_of(item) for item in out] if isinstance(out, list | tuple) else REPLICATED

    def _key(self, node: fx.Node) -> Any:
        """What an outcome depends on; None when that can't be hashed."""
        parts = [self._part(arg) for arg in node.args] + [(k, self._part(v)) for k, v in node.kwargs.items()]
        key = (node.op, node.target, tuple(parts), tuple(args for args, _, _ in self.contexts), self.trace.nested)
        if node.target is torch.arange:
            key = (*key, node)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _part(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if arg not in self.shapes:
                self.shapes[arg] = self._signature(_value(arg))
            state = self.env.get(arg, REPLICATED)
            return (self.shapes[arg], tuple(state) if isinstance(state, list) else state)
        if isinstance(arg, list | tuple):
            return tuple(self._part(item) for item in arg)
        if isinstance(arg, slice):
            return ("slice", self._part(arg.start), self._part(arg.stop), self._part(arg.step))
        return (type(arg), arg)

    def _signature(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.dtype, tuple(self.extents.size(size) for size in value.shape))
        if isinstance(value, list | tuple):
            return tuple(self._signature(item) for item in value)
        return self.extents.size(value) if hasattr(value, "node") else (type(value), value)

    def report(self) -> LocalityReport:
        for node in self.indexed & set(self.used):
            detail = "these positions both index the shard's rows and count the global row: make them twice"
            self._refuse(node, Reason.POSITION_GENERATOR, detail)
        shared = self.extents.batch != 1
        positions = [PositionGenerator(node, shared_order=shared) for node in self.used]
        positions += [PositionGenerator(node, "table", dim, shared) for node, dim in self.tables.items()]
        return LocalityReport(self.refusals, positions, list(self.padded_sums), self.extents.static)


def _with_states(
    value: Any, state: States, known: list[tuple[Tensor, TensorState]], note: Callable[[Tensor], None]
) -> Any:
    """A node's value for one run: tensors as aliases, each entered with its state."""
    if isinstance(value, Tensor):
        alias = value.detach()
        known.append((alias, state))
        note(alias)
        return alias
    if isinstance(value, list | tuple) and isinstance(state, list):
        return type(value)(_with_states(v, s, known, note) for v, s in zip(value, state, strict=True))
    return value


def _value(node: fx.Node) -> Any:
    if "example_value" in node.meta:
        return node.meta["example_value"]
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            owner = getattr(owner, name)
        return owner
    return None


def _fake_mode(gm: fx.GraphModule) -> FakeTensorMode:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


_TOGGLES = frozenset(
    {
        "_set_grad_enabled",
        "_log_api_usage_once",
        "_enter_autocast",
        "_exit_autocast",
        "_sdpa_kernel",
        "_set_sdp_use_flash",
    }
)


def _is_toggle(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _TOGGLES


def _is_unproven(target: Any) -> bool:
    name = target.name() if hasattr(target, "name") and callable(target.name) else getattr(target, "__name__", "")
    return str(name).split("::")[-1].split(".")[0] in Attention
