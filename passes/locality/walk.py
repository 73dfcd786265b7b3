"""Token locality: prove that nothing outside attention mixes tokens, so that a shard computes what the whole would.

    walk           the nodes of a Dynamo graph, and of the nested regions in it
      run          one node, on the graph's own fake tensors; nodes that look alike (layers) once
        trace      the ATen ops that run below the node
          rules    one op: where the tokens of its results are (`tensor_state`), or why it is refused

So a refusal belongs to a node, and with it to a line of the user's code. With hidden states x of (B, T, 8):

    y = x.mean(-1)      aten.mean      (B,) (T,) ·  ->  (B,) (T,)
    z = y.cumsum(1)     aten.cumsum    refused: "cumsum runs over the token dim (dim 1)"
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch.distributed as dist
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.operands import (
    collective_group,
    draws_random_numbers,
    is_transformed,
    needs_gradient,
    value_of,
)
from cp_rewrite.passes.graph.regions import outputs_of, region_call
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.locality.inputs import input_state, read_extents
from cp_rewrite.passes.locality.liveness import is_attention, live_nodes, scores_of
from cp_rewrite.passes.locality.mask_sums import mask_sum
from cp_rewrite.passes.locality.resolver import Resolver
from cp_rewrite.passes.locality.run import NodeRunner, Outcome, States, unknown_like
from cp_rewrite.passes.locality.tensor_state import (
    REPLICATED,
    TABLE_HINT,
    UNKNOWN,
    B,
    Deferred,
    Dims,
    Extents,
    GroupSizes,
    Order,
    Partial,
    Rows,
    T,
)
from cp_rewrite.passes.locality.trace import Trace
from cp_rewrite.passes.values.insert import Insert
from cp_rewrite.passes.values.position import PositionGenerator
from cp_rewrite.passes.values.resolution import Conversion, Lowering
from cp_rewrite.passes.values.site import Site
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import FakeTensorMode, HigherOrderOperator, fake_mode_of, process_group


@dataclass(frozen=True)
class LocalityReport:
    """What the locality check found.

    Args:
        refusals: every op that is not the same on a shard.
        positions: nodes to be made global.
        padded_sums: nodes that sum over tokens whatever rows without a token hold: right only where no rank has such
            rows, or with the inserts.
        inserts: what leaves such rows out of some of these sums.
        gap_sums: nodes that take in what tokens of no document hold after attention: right only when no batch has any.
        outputs: the dim of each output that counts tokens, of a tensor with one row for each token of each row of the
            batch.
        parts: whether each output is this rank's part of a sum that one process returns.
        static: the graph was captured for one token count; numbers made from it can only be guessed.
        resolved: what is put between nodes and their operands so that nodes are the same on a shard. lowered: nodes
            that are taken apart for it.
    """

    refusals: list[Refusal] = field(default_factory=list[Refusal])
    positions: list[PositionGenerator] = field(default_factory=list[PositionGenerator])
    padded_sums: list[fx.Node] = field(default_factory=list[fx.Node])
    inserts: list[Insert] = field(default_factory=list[Insert])
    gap_sums: list[fx.Node] = field(default_factory=list[fx.Node])
    outputs: list[int | None] = field(default_factory=list[int | None])
    parts: list[bool] = field(default_factory=list[bool])
    static: bool = False
    resolved: list[Insert] = field(default_factory=list[Insert])
    lowered: list[Lowering] = field(default_factory=list[Lowering])


def check_locality(
    gm: fx.GraphModule,
    sharding: Sharding,
    sites: Sequence[Site],
    tokens: TokenAxis,
    *,
    refused: Mapping[fx.Node, Site | None] | None = None,
    kept: Mapping[fx.Node, str] | None = None,
    tables: bool = False,
    padded_sums: bool = False,
    fixed_tokens: bool = True,
    resolve: bool = False,
) -> LocalityReport:
    """Prove that every op outside the attention of `sites` treats tokens alone, or say which does not.

    Args:
        gm: the captured graph, not yet rewritten; it is not changed.
        sharding: the annotation.
        sites: attention nodes that will be rewritten; what only feeds their masks is not looked at.
        tokens: which inputs carry tokens, unified.
        refused: attention nodes that were refused, as in `State`: nothing is said of what follows from that.
        kept: nodes whose values the next call may read -> what keeps them.
        tables: the caller can make positions of kind `table` global; otherwise they are refused.
        padded_sums: the caller puts the report's inserts in, and sees to it that no rank has rows without a token
            where it names other padded sums; otherwise these sums are refused.
        fixed_tokens: accept a graph captured for one token count. In it a number computed from the token count (a
            window of T // 2) is a constant like any other; only plain ones (T, 1 / T, sqrt(T), log(T)) are recognised.
        resolve: the caller does what the report says to nodes that are not the same on a shard; otherwise they are
            refused.
    """
    mode = fake_mode_of(gm.graph.nodes)
    extents = None if mode is None else read_extents(tokens, mode.shape_env)
    if mode is None or extents is None:
        return LocalityReport(list(tokens.refusals))
    if extents.static and not fixed_tokens:
        fixed = [found.name for found in tokens.inputs if isinstance(found.tokens, int)]
        return LocalityReport([_why_static(extents, fixed)], static=True)
    refused = refused or {}
    sites = [*sites, *(site for site in refused.values() if site is not None)]
    walk = _Walk(sharding, sites, tokens, extents, mode, live_nodes(gm, sites), resolve)
    walk.explained = scores_of([node for node, site in refused.items() if site is None], extents)
    with walk.runner.running():
        walk.walk_all(gm)
        output = next(iter(gm.graph.find_nodes(op="output")))
        for node, where in (kept or {}).items():
            walk.check_kept(output, node, where)
    return walk.report(tables, padded_sums)


class _Walk:
    """One walk over a graph and its nested regions.

    `env`: what is known of each node so far. `used`, `indexed`: nodes that make positions, as in `Events`. `tables`:
    nodes that take the first T rows of a table, with its dim. `regions`: results of nested regions by operands' states.
    `explained`: nodes of attention that was refused before, of which nothing more is known.
    """

    def __init__(
        self,
        sharding: Sharding,
        sites: Sequence[Site],
        tokens: TokenAxis,
        extents: Extents,
        mode: FakeTensorMode,
        live: set[fx.Node],
        resolve: bool,
    ) -> None:
        self.sharding, self.tokens, self.extents, self.live = sharding, tokens, extents, live
        self.sites = {site.node: site for site in sites}
        trace = Trace(extents, frozenset(sharding.local_ops), resolve, draws=sharding.random == "per_rank")
        self.resolver = Resolver(sharding)
        self.facts = trace.facts
        self.env: dict[fx.Node, States] = {}
        self.runner = NodeRunner(trace, mode, self.env)
        self.refusals: list[Refusal] = []
        self.used: dict[fx.Node, None] = {}
        self.indexed: set[fx.Node] = set()
        self.tables: dict[fx.Node, int] = {}
        self.padded_sums: dict[fx.Node, tuple[Insert, ...]] = {}
        self.gap_sums: dict[fx.Node, None] = {}
        self.regions: dict[Any, States] = {}
        self.outputs: list[int | None] = []
        self.parts: list[bool] = []
        self.explained: set[fx.Node] = set()

    def walk_all(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="placeholder"):
            if node in self.live:
                self.env[node], refusal = input_state(node, self.tokens, self.sharding, self.extents)
                self.refusals += [refusal] if refusal else []
        returned = self.walk_graph(gm)
        for leaf in returned.all_input_nodes:
            self.check_output(returned, leaf, self.env.get(leaf, REPLICATED))
        self.outputs = [self.token_dim(leaf) for leaf in outputs_of(gm)]
        self.parts = [isinstance(leaf, fx.Node) and self.env.get(leaf) == Partial() for leaf in outputs_of(gm)]

    def token_dim(self, leaf: Any) -> int | None:
        """The dim of an output that counts this rank's tokens, after that of the batch's rows where it has several."""
        state = self.env.get(leaf) if isinstance(leaf, fx.Node) else None
        if not isinstance(state, Rows) or state.dims[state.token_dim] != (T,):
            return None
        before = state.dims[max(state.token_dim - 1, 0)]
        return state.token_dim if self.extents.batch == 1 or before == (B,) else None

    def check_output(self, output: fx.Node, leaf: fx.Node, state: States) -> None:
        """What the caller gets must be rows in the shard's order, a part of a sum, or the same on all ranks."""
        if isinstance(state, list):
            for item in state:
                self.check_output(output, leaf, item)
        elif self.extents.counts_tokens(value_of(leaf)):
            detail = f"an output, {value_of(leaf)}, is made from the shard's number of tokens"
            self.refuse(leaf, Reason.POSITION_GENERATOR, detail)
        elif isinstance(state, Deferred):
            self.refuse(leaf, Reason.TOKEN_MIXING, state.detail)
        elif isinstance(state, GroupSizes):
            self.refuse(leaf, Reason.TOKEN_MIXING, "an output counts the shard's tokens")
        elif isinstance(state, Rows):
            if state.places is not None or any(
                isinstance(factor, Order) for factor in state.dims[state.token_dim] or ()
            ):
                self.refuse(leaf, Reason.TOKEN_MIXING, "an output holds tokens in an order of the shard's own")
            if state.iota is not None and state.iota in self.facts.fixed_positions:
                self.refuse(leaf, Reason.POSITION_GENERATOR, self.facts.fixed_positions[state.iota])
            elif state.iota is not None:
                self.used[state.iota] = None
        elif state is REPLICATED and leaf.op != "placeholder" and needs_gradient(leaf):
            if self.runner.trace.resolves and not isinstance(self.env.get(leaf), list):
                why = "an output that every rank computes in full is counted once"
                return self.resolver.add_output(output, leaf, (Conversion.SHARE_OUT,), why)
            detail = "every rank computes this output in full, so its gradient would count once per rank"
            self.refuse(leaf, Reason.TOKEN_MIXING, detail)

    def check_kept(self, output: fx.Node, node: fx.Node, where: str) -> None:
        """What outlives the call must be the same on all ranks."""
        states = tree_leaves(self.env.get(node, REPLICATED))
        if (
            self.runner.trace.resolves
            and states == [Partial()]
            and node in output.all_input_nodes
            and not needs_gradient(node)
        ):
            given: Any = output.args[0]
            self.parts = [part and leaf is not node for part, leaf in zip(self.parts, given, strict=True)]
            return self.resolver.add_output(output, node, (Conversion.SUM,), f"{where} keeps it for the next step")
        if any(state not in (REPLICATED, UNKNOWN) for state in states):
            detail = f"{where} keeps what only this rank knows, which the next step takes for everyone's"
            self.refuse(node, Reason.TOKEN_MIXING, detail)

    def walk_graph(self, gm: fx.GraphModule) -> fx.Node:
        """Walk the nodes of one graph whose placeholders are known; returns its output node."""
        for node in gm.graph.nodes:
            if node.op == "output":
                return node
            if node.op == "call_function" and getattr(node.target, "__name__", "") in _TOGGLES:
                self.runner.toggle(node)
            elif node in self.live and node.op != "placeholder":
                self.env[node] = self.visit(node)
        raise AssertionError("a graph has an output")

    def visit(self, node: fx.Node) -> States:
        """The state of one node's output, which is noted or refused."""
        if node.op == "get_attr":
            return REPLICATED
        if node in self.sites:
            return self.visit_attention(self.sites[node])
        parent: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(self.env.get(parent), list):
            return self.env[parent][node.args[1]]
        call = region_call(node)
        if call is not None:
            return self.visit_region(call.body, call.operands)
        # Rules know no more of what is made from something unknown; with sizes of chunks, running it takes long.
        if node in self.explained or any(self.env.get(source) is UNKNOWN for source in node.all_input_nodes):
            return unknown_like(node)
        if is_attention(node.target):
            return self.refuse(node, Reason.TOKEN_MIXING, f"{node.name} is attention whose mask was not proven")
        if is_transformed(node):
            return self.visit_transformed(node)
        group = collective_group(node)
        if group is not None and self.shares_ranks(group):
            detail = (
                f"{node.name} is a collective of the model's own over ranks that share this row, and adds up what one "
                "process has once: leave it out, or compute with cp.token_mean(sum, count, sharding)"
            )
            return self.refuse(node, Reason.TOKEN_MIXING, detail)
        if isinstance(node.target, HigherOrderOperator):
            return self.refuse(node, Reason.NO_LOCALITY_RULE, f"higher-order op {node.target.name()} has no rule")
        return self.record(node, self.runner.outcome(node))

    def shares_ranks(self, group: str) -> bool:
        """Whether a group has other ranks of the annotation's; in a dry run it is not known which."""
        if isinstance(self.sharding.mesh, int):
            return True
        ours, theirs = (dist.get_process_group_ranks(g) for g in (self.sharding.group, process_group(group)))
        return len({*ours} & {*theirs}) > 1

    def record(self, node: fx.Node, outcome: Outcome) -> States:
        """Note of a node what its ops gave rise to."""
        events = outcome.events
        refused = self.resolver.add(node, outcome.steps)
        if refused is not None:
            return self.refuse(node, refused.reason, refused.detail)
        for found in events.refusals:
            self.refuse(node, found.reason, found.detail)
        self.used.update(dict.fromkeys(events.used))
        self.indexed.update(events.indexed)
        if events.table is not None:
            self.tables[node] = events.table
        if events.unmasked:
            inserts = mask_sum(node, self.runner)
            # A region that is entered twice: what it is given may have its tokens in other dims.
            self.padded_sums[node] = inserts if self.padded_sums.get(node, inserts) == inserts else ()
        if events.gaps:
            self.gap_sums[node] = None
        return outcome.states

    def refuse(self, node: fx.Node, reason: Reason, detail: str) -> States:
        refusal = Refusal(reason, detail, node)
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        return unknown_like(node)

    def visit_transformed(self, node: fx.Node) -> States:
        """A node of a transform: its ops run on wrapped tensors, or on gradients, which no rule sees."""
        states = [state for n in node.all_input_nodes for state in tree_leaves(self.env.get(n, REPLICATED))]
        numbers = any(self.extents.counts_tokens(value_of(n)) for n in node.all_input_nodes)
        if UNKNOWN in states:
            return unknown_like(node)
        if draws_random_numbers(node):
            return self.refuse(node, Reason.DROPOUT, f"{node.name} draws other random numbers on each rank")
        if not numbers and all(state is REPLICATED for state in states):
            return REPLICATED
        detail = "what vmap, grad and jvp do to tokens is not followed: write it out, or vouch for an op"
        return self.refuse(node, Reason.NO_LOCALITY_RULE, detail)

    def visit_attention(self, site: Site) -> States:
        """Attention whose mask is proven: queries, keys and values have their tokens where the rewrite expects them."""
        batch = None if self.extents.batch == 1 else (B,)
        dims: Dims = ((T,), None, None) if site.rows else (batch, None, (T,), None)
        for name, node in (("query", site.query), ("key", site.key), ("value", site.value)):
            state = self.env.get(node, REPLICATED)
            if state is not UNKNOWN and not (isinstance(state, Rows) and _fits(state.dims, dims)):
                detail = f"attention's {name} does not have its tokens in dim {dims.index((T,))}, or its rows in dim 0"
                self.refuse(site.node, Reason.TOKEN_MIXING, detail)
        if site.sinks is not None and self.env.get(site.sinks, REPLICATED) is not REPLICATED:
            self.refuse(site.node, Reason.TOKEN_MIXING, "attention's sinks are not the same on all ranks")
        attended = any(isinstance(state := self.env.get(x), Rows) and state.attended for x in site.operands)
        if attended and not site.mask.packed:  # tokens of documents see those of none
            self.gap_sums[site.node] = None
        return Rows(dims, attended=attended or site.mask.packed)

    def visit_region(self, body: fx.GraphModule, operands: Sequence[Any]) -> States:
        """A nested region, run on its operands; the same for operands of the same states."""
        states = [self.env.get(o, REPLICATED) if isinstance(o, fx.Node) else REPLICATED for o in operands]
        key = (body, tuple(tuple(s) if isinstance(s, list) else s for s in states))
        if key not in self.regions:
            self.env.update(zip(body.graph.find_nodes(op="placeholder"), states, strict=True))
            nested, self.facts.nested = self.facts.nested, True
            orders = self.facts.orders
            output = self.walk_graph(body)
            self.facts.nested = nested
            result = fx.map_arg(output.args[0], lambda n: self.env.get(n, REPLICATED))
            result = list(result) if isinstance(result, list | tuple) else result
            if orders != self.facts.orders:  # the next call's rows are sorted in another order
                return result
            self.regions[key] = result
        return self.regions[key]

    def report(self, tables: bool, padded_sums: bool) -> LocalityReport:
        for node in self.used:
            if node in self.indexed:
                detail = "these positions both index the shard's rows and count the global row: make them twice"
                self.refuse(node, Reason.POSITION_GENERATOR, detail)
        for node in () if tables else self.tables:
            self.refuse(node, Reason.POSITION_GENERATOR, TABLE_HINT)
        for node in () if padded_sums else self.padded_sums:
            detail = (
                "sums over tokens whatever padding rows hold: multiply by a mask that is 0 there, as labels != -100 is"
            )
            self.refuse(node, Reason.TOKEN_MIXING, detail)
        positions = [PositionGenerator(node) for node in self.used]
        if tables:
            positions += [PositionGenerator(node, "table", dim) for node, dim in self.tables.items()]
        inserts = [insert for each in self.padded_sums.values() for insert in each]
        sums, fixed = (list(self.padded_sums), inserts, list(self.gap_sums)), self.extents.static
        found = self.refusals, positions, *sums, self.outputs, self.parts, fixed
        return LocalityReport(*found, self.resolver.inserts, self.resolver.lowered)


def _fits(dims: Dims, wanted: Dims) -> bool:
    """Whether tokens and rows of the batch stand where they should; rows that are all equal need not be told apart."""
    return len(dims) == len(wanted) and all(dim in (None, want) for dim, want in zip(dims, wanted, strict=True))


def _why_static(extents: Extents, fixed: Sequence[str]) -> Refusal:
    """What made a constant of the token count: inputs of that size, or a line of the model, where a guard names one."""
    if fixed:
        detail = (
            f"{', '.join(fixed)} came with a fixed number of tokens, {extents.tokens}: pass what `shard` returns, not "
            "copies; or mark the token dims (torch._dynamo.maybe_mark_dynamic), or compile with dynamic=True"
        )
        return Refusal(Reason.TOKEN_INPUT, detail)
    for guard in getattr(extents.shape_env, "guards", ()):
        if isinstance(guard.expr, sympy.Eq) and extents.tokens in guard.expr.args:
            detail = f"`{guard.sloc}` fixes the number of tokens to the shard's {extents.tokens}"
            return Refusal(Reason.TOKEN_COUNT, detail)
    return Refusal(Reason.TOKEN_INPUT, f"the graph was captured for {extents.tokens} tokens a rank only")


_TOGGLES = frozenset({"_set_grad_enabled", "_log_api_usage_once", "_enter_autocast", "_exit_autocast", "_sdpa_kernel"})
"""Functions that switch something on or off for the nodes behind them; they make no tensor."""
