"""Both ends of the locality check: a graph's inputs by the annotation, and its outputs, with what is found in between.

read_extents, input_state    how long the axes are, and where each input has them
why_static                   the refusal of a token count that is a constant
Findings                     findings while nodes are walked, and in the end
Outputs                      checks of what a graph returns, and of what outlives its call
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import sympy
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.arguments import IGNORE_INDEX, LABELS
from cp_rewrite.batch.marks import TokenAxes
from cp_rewrite.experts.layers import OWNED
from cp_rewrite.packing import CuSeqlens, DocumentIds, PaddingMask
from cp_rewrite.passes.graph.dynamo import input_value, is_random_number, source_name, source_of
from cp_rewrite.passes.graph.nodes import needs_gradient, outputs_of, value_of
from cp_rewrite.passes.graph.tokens import TokenAxis, TokenInput
from cp_rewrite.passes.values.edits import Locality, NeighbourRead, PositionGenerator
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding

from .call import COUNT_HINT, Events
from .claims import (
    REPLICATED,
    UNKNOWN,
    WHOLE,
    AtMost,
    B,
    Deferred,
    Dim,
    Extents,
    GroupSizes,
    Number,
    Order,
    Owned,
    Partial,
    Rows,
    T,
    TensorState,
    fewer,
)
from .resolver import Resolver
from .run import NodeRunner, States, unknown_like
from .ways import CONVERSIONS, PART


def read_extents(tokens: TokenAxis, shape_env: Any) -> Extents | None:
    """Sizes of the token and batch axes; None where no input tells them."""
    if not tokens.inputs or tokens.is_single:
        return None
    plain = Extents(0, 0, shape_env=shape_env)
    return Extents(plain.size(tokens.inputs[0].tokens), plain.size(tokens.rows), shape_env)


def input_state(
    node: fx.Node, tokens: TokenAxis, sharding: Sharding, extents: Extents
) -> tuple[TensorState, Refusal | None]:
    """The state of one placeholder, and a refusal of it; None: nothing stands against it."""
    value, name = node.meta.get("example_value"), tokens.names.get(node)
    if not isinstance(value, Tensor):
        return REPLICATED, None
    if is_random_number(node):
        detail = "Python's random draws another number on each rank: draw it before, and pass it to the model"
        return UNKNOWN, Refusal(Reason.DROPOUT, detail, node)
    if any(refusal.node is node for refusal in tokens.refusals):
        return UNKNOWN, None
    if node in tokens.masks:
        detail = f"{tokens.masks[node].name!r} is a mask, which no rank has, and something else than attention reads it"
        return UNKNOWN, Refusal(Reason.TOKEN_INPUT, detail, node)
    found = tokens.input(node)
    if found is not None:
        return _token_rows(found, extents, sharding), None
    packing = sharding.packing
    if isinstance(packing, CuSeqlens) and name in (packing.arg, packing.padded_arg):
        return REPLICATED, None
    if (shared := getattr(input_value(node), OWNED, None)) is not None:
        return Owned(shared.group), None
    if any(map(extents.counts_tokens, value.shape)):
        return UNKNOWN, _unnamed(name or node.name, node)
    return REPLICATED, None


def _unnamed(name: str, node: fx.Node) -> Refusal:
    detail = f"{name} has a dim as long as the tokens but is not named in tokens; add {name!r} and its token dim"
    return Refusal(Reason.TOKEN_INPUT, detail, node)


def _token_rows(found: TokenInput, extents: Extents, sharding: Sharding) -> Rows:
    """Rows of an argument that `shard` cuts, or of a block's, which is computed."""
    cut = found.name in sharding.tokens or found.name not in sharding.block_tokens
    dims: list[Dim] = [None] * found.value.ndim
    dims[found.dim] = (T,)
    if found.dim and extents.batch != 1:
        dims[found.dim - 1] = (B,)
    label = found.name in LABELS and not found.value.is_floating_point()
    # A named argument that needs a gradient was computed too.
    attended, padding = not cut or found.value.requires_grad, _padding(found, sharding) if cut else None
    return Rows(tuple(dims), fill=IGNORE_INDEX if label else None, padding=padding, attended=attended)


def _padding(found: TokenInput, sharding: Sharding) -> Number | None:
    """The number that an argument holds at tokens of no document; None: not known. `shard` sees to it that no such
    token is a target."""
    if found.name in LABELS and not found.value.is_floating_point():
        return IGNORE_INDEX
    packing = sharding.packing
    if isinstance(packing, DocumentIds) and found.name == packing.arg:
        return AtMost(packing.padding)
    if isinstance(packing, PaddingMask) and found.name == packing.arg:
        return 0
    return None


_OURS = re.compile(r" \([^()]*torch_internals\.py[^()]*\)$")
"""Where torch says that a size was asked for, if it is `leave_ones_open`."""


def why_static(extents: Extents, tokens: TokenAxis) -> Refusal:
    """A refusal that names what made a constant of the token count: inputs of that size, or the line of the model that
    a guard names."""
    fixed = [found.name for found in tokens.inputs if isinstance(found.tokens, int)]
    for node, name in tokens.names.items():
        value = node.meta.get("example_value")
        if tokens.input(node) is None and isinstance(value, Tensor) and extents.tokens in value.shape:
            return _unnamed(name, node)
    if fixed:
        detail = (
            f"{', '.join(fixed)} came with a fixed number of tokens, {extents.tokens}: pass what `shard` returns, not "
            "copies; or mark the token dims (torch._dynamo.maybe_mark_dynamic), or compile with dynamic=True; what "
            "came out of torch.export is exported with dynamic_shapes for the token dims (Dim.AUTO)"
        )
        return Refusal(Reason.TOKEN_INPUT, detail)
    for guard in getattr(extents.shape_env, "guards", ()):
        if _fixes(guard.expr, extents.tokens):
            line = _OURS.sub("", str(guard.sloc))
            why = "as a loop over each token does, or a choice by a chunk's one token"
            if "opt_einsum" in line:
                why = "since opt_einsum takes an order by sizes: set torch.backends.opt_einsum.enabled = False"
            elif "math." in line:
                why = "as some functions of math do, unlike exp, log and pow: torch.ones(T).sum() is T as a tensor"
            detail = f"`{line}` fixes the number of tokens at {extents.tokens}, {why}"
            return Refusal(Reason.TOKEN_COUNT, detail)
    return Refusal(Reason.TOKEN_INPUT, f"the graph was captured for {extents.tokens} tokens only")


def _fixes(condition: Any, tokens: Any) -> bool:
    """True if a condition is S = tokens, or says so in other words, as S - 12 = 1."""
    if not isinstance(condition, sympy.Eq):
        return False
    difference = sympy.expand(condition.args[0] - condition.args[1])  # pyright: ignore[reportOperatorIssue]
    symbols = [*difference.free_symbols]
    alone = len(symbols) == 1 and difference.is_polynomial(*symbols) and sympy.degree(difference, symbols[0]) == 1
    return tokens in condition.args or (alone and difference.subs({symbols[0]: tokens}) == 0)


class Findings:
    """Findings of the locality check so far.

    `used`, `indexed`, `looked_up`, `in_turn`: nodes that make positions, or take rows of tables, as in `Events`.
    `tables`: nodes that take the first T rows of a table, with its dim. `fill_sums`, `outputs`, `parts`: as in
    `Locality`.
    """

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.used: dict[fx.Node, None] = {}
        self.indexed: set[fx.Node] = set()
        self.tables: dict[fx.Node, int] = {}
        self.looked_up: set[fx.Node] = set()
        self.in_turn: set[fx.Node] = set()
        self.fill_sums: dict[fx.Node, None] = {}
        self.padding_sums: dict[fx.Node, None] = {}
        self.outputs: list[int | None] = []
        self.axes: list[TokenAxes | None] = []
        self.parts: list[bool] = []

    def refuse(self, node: fx.Node, reason: Reason, detail: str) -> States:
        refusal = Refusal(reason, detail, node)
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        return unknown_like(node)

    def note(self, node: fx.Node, events: Events) -> None:
        """Note of a node what its ops gave rise to, but for sums that take in fill."""
        for found in events.refusals:
            self.refuse(node, found.reason, found.detail)
        self.used.update(dict.fromkeys(events.used))
        self.indexed.update(events.indexed)
        self.looked_up.update(events.looked_up)
        self.in_turn.update(events.in_turn)
        if events.table is not None:
            self.tables[node] = events.table
        if events.sums_padding:
            self.padding_sums[node] = None

    def report(self, resolver: Resolver, reads: Iterable[NeighbourRead]) -> Locality:
        for node in self.used:
            if node in self.indexed:
                detail = "these positions both index the shard's rows and count the global row: make them twice"
                self.refuse(node, Reason.POSITION_GENERATOR, detail)
        for node in self.looked_up & self.in_turn:
            detail = "these rows of a table are both read by index and used for the tokens in turn: take them twice"
            self.refuse(node, Reason.POSITION_GENERATOR, detail)
        tables = [PositionGenerator(n, "table", dim) for n, dim in self.tables.items() if n not in self.looked_up]
        return Locality(
            refusals=tuple(self.refusals),
            positions=(*map(PositionGenerator, self.used), *tables),
            looked_up=tuple(node for node in self.tables if node in self.looked_up),
            inserts=tuple(resolver.inserts),
            lowered=tuple(resolver.lowered),
            reads=tuple(reads),
            fill_sums=tuple(self.fill_sums),
            padding_sums=tuple(self.padding_sums),
            outputs=tuple(self.outputs),
            axes=tuple(self.axes),
            parts=tuple(self.parts),
        )


class Outputs:
    """Checks of outputs and of values that outlive the call, once all nodes are walked."""

    def __init__(self, runner: NodeRunner, resolver: Resolver, findings: Findings) -> None:
        self.facts, self.extents, self.env = runner.facts, runner.facts.extents, runner.env
        self.resolves, self.resolver, self.findings = runner.trace.ways.resolves, resolver, findings

    def check(self, gm: fx.GraphModule, returned: fx.Node) -> None:
        for leaf in returned.all_input_nodes:
            self.check_output(returned, leaf, self.env.get(leaf, REPLICATED))
        self.findings.outputs = [self.token_dim(leaf) for leaf in outputs_of(gm)]
        self.findings.axes = [self.axes(leaf) for leaf in outputs_of(gm)]
        self.findings.parts = [isinstance(leaf, fx.Node) and self.env.get(leaf) == Partial() for leaf in outputs_of(gm)]

    def token_dim(self, leaf: Any) -> int | None:
        """The dim of an output that counts this rank's tokens, after that of the batch's rows where it has several."""
        state = self.env.get(leaf) if isinstance(leaf, fx.Node) else None
        if not isinstance(state, Rows) or state.dims[state.token_dim] != (T,):
            return None
        before = state.dims[max(state.token_dim - 1, 0)]
        return state.token_dim if self.extents.batch == 1 or before == (B,) else None

    def axes(self, leaf: Any) -> TokenAxes | None:
        """The axes that each dim of an output counts, where its tokens are not as `token_dim` has them; else None."""
        state = self.env.get(leaf) if isinstance(leaf, fx.Node) else None
        if not isinstance(state, Rows) or self.token_dim(leaf) is not None:
            return None
        names: dict[Any, str | int] = {T: "T", B: "B"}
        return tuple(dim and tuple(names.get(f, f if isinstance(f, int) else -1) for f in dim) for dim in state.dims)

    def check_output(self, output: fx.Node, leaf: fx.Node, state: States) -> None:
        """Check that an output is rows in the shard's order, a part of a sum, or the same on all ranks."""
        if isinstance(state, list):
            for item in state:
                self.check_output(output, leaf, item)
        elif self.extents.counts_tokens(value_of(leaf)):
            detail = f"{value_of(leaf)}, which is returned or kept, is made from the shard's number of tokens"
            self.findings.refuse(leaf, Reason.POSITION_GENERATOR, f"{detail}; {COUNT_HINT}")
        elif isinstance(state, Deferred):
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, state.detail)
        elif isinstance(state, Owned):
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, "an output is a weight of experts that ranks share")
        elif isinstance(state, GroupSizes):
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, "an output counts the shard's tokens")
        elif isinstance(state, Rows):
            if state.shard_rows is not None or any(
                isinstance(factor, Order) for factor in state.dims[state.token_dim] or ()
            ):
                self.findings.refuse(leaf, Reason.TOKEN_MIXING, "an output holds tokens in an order of the shard's own")
            if by := fewer(state.dims):
                how = "fewer" if by > 0 else "more"
                detail = f"an output has {abs(by)} tokens {how} than the row: give it one entry for each"
                self.findings.refuse(leaf, Reason.TOKEN_MIXING, detail)
            if state.table is not None:
                self.findings.in_turn.add(state.table)
            if state.iota is not None and state.iota in self.facts.fixed_positions:
                self.findings.refuse(leaf, Reason.POSITION_GENERATOR, self.facts.fixed_positions[state.iota])
            elif state.iota is not None:
                self.findings.used[state.iota] = None
        elif state is REPLICATED and leaf.op != "placeholder" and needs_gradient(leaf):
            if self.resolves and not isinstance(self.env.get(leaf), list):
                why = "an output that every rank computes in full is counted once"
                return self.resolver.add_output(output, leaf, CONVERSIONS[REPLICATED, WHOLE], why)
            detail = "every rank computes this output in full, so its gradient would count once per rank"
            self.findings.refuse(leaf, Reason.TOKEN_MIXING, detail)

    def check_kept(self, output: fx.Node, node: fx.Node, where: str) -> None:
        """Check a value that outlives the call: as what it returns, with sums whole, it is this rank's rows, or the
        same on all ranks. Rows must not be read by the next call, which would take them for everyone's."""
        states = tree_leaves(self.env.get(node, REPLICATED))
        if self.resolves and states == [Partial()] and node in output.all_input_nodes:
            given: Any = output.args[0]
            self.findings.parts = [
                part and leaf is not node for part, leaf in zip(self.findings.parts, given, strict=True)
            ]
            return self.resolver.add_output(output, node, CONVERSIONS[PART, WHOLE], f"{where} keeps it")
        if all(state in (REPLICATED, UNKNOWN) for state in states):
            return
        detail = f"{where} keeps what only this rank knows"
        if all(isinstance(state, Rows) or state in (REPLICATED, UNKNOWN, WHOLE) for state in states):
            read = [source_name(source_of(n)) for n in output.graph.find_nodes(op="placeholder") if n.users]
            again = next((name for name in read if where in _holders(name)), None)
            if again is None and where.startswith("L["):
                return
            detail += f", and {again} is read as what all ranks know" if again else ""
        self.findings.refuse(node, Reason.TOKEN_MIXING, f"{detail}: keep sums or means over tokens, or return it")


def _holders(source: str) -> set[str]:
    """Sources that an input was read of, and its own: `L['self'].seen`, `L['self']` of `L['self'].seen[0]`."""
    return {source[:place] for place in range(1, len(source) + 1) if place == len(source) or source[place] in ".["}
