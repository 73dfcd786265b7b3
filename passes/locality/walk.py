"""Token locality: prove that nothing outside attention mixes tokens, so that a shard computes what the whole would.

    walk           the nodes of a Dynamo graph, and of the nested regions in it
      NodeRunner   one node, on the graph's own fake tensors; nodes that look alike (layers) once (`run.py`)
        Trace      the ATen ops that run below the node (`run.py`)
          ways     one op: which of its ways (`rules/`) it goes, with operands as they are or converted:
                   where the tokens of its results are (`claims.py`), or why it is refused
        resolver   what is done to the node for that
    ends           what the graph returns
  shared_by_rows positions that `arange` makes once for all rows of a batch

So a refusal belongs to a node, and with it to a line of the user's code. With hidden states x of (B, T, 8):

    y = x.mean(-1)      aten.mean      (B,) (T,) ·  ->  (B,) (T,)
    z = y.cumsum(1)     aten.cumsum    refused: "cumsum runs over the token dim (dim 1)"

`check_locality` is the proof, `check_token_locality` the pass, which also asks that nothing takes offsets that a
capacity filled up for a batch's own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.packing import CuSeqlens, packing_args
from cp_rewrite.passes.capture.chunks import IN_ORDER, JOINED
from cp_rewrite.passes.graph.nodes import (
    bind,
    collective_group,
    draws_random_numbers,
    graph_modules,
    is_function,
    is_transformed,
    modes_of,
    op_name,
    region_call,
    value_of,
    written_nodes,
)
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.values.edits import Locality, Lowering, PositionGenerator, RowPositions, RowReader
from cp_rewrite.passes.values.state import Site, State
from cp_rewrite.refusal import BACKWARD_HOOKS, Reason, Refusal
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import FakeTensorMode, HigherOrderOperator, expression, fake_mode_of, process_group

from .claims import REPLICATED, UNKNOWN, B, Dims, Extents, Moved, Partial, Rows, T, has, joined
from .ends import Findings, Outputs, input_state, read_extents, why_static
from .liveness import Reader, live_nodes, scores_of, sources_of
from .own_backward import OwnBackward
from .reads import Reads, fewer_of, moves_between_documents, why_not_kept
from .resolver import Resolver
from .rules.states import Offsets, kind_of
from .rules.wholes import WithCount
from .run import NodeRunner, Outcome, States, Trace, unknown_like


def check_locality(
    gm: fx.GraphModule,
    sharding: Sharding,
    sites: Sequence[Site],
    tokens: TokenAxis,
    *,
    refused: Mapping[fx.Node, Site | None] | None = None,
    kept: Mapping[fx.Node, str] | None = None,
) -> Locality:
    """Prove that every op outside the attention of `sites` treats tokens alone, or say which does not.

    Args:
        gm: the captured graph, not yet rewritten; it is not changed.
        sharding: the annotation.
        sites: attention nodes that will be rewritten; what only feeds their masks is not looked at.
        tokens: which inputs carry tokens, unified.
        refused: attention nodes that were refused, as in `State`: nothing is said of what follows from that.
        kept: nodes whose values the next call may read -> what keeps them.
    """
    mode = fake_mode_of(gm.graph.nodes)
    extents = None if mode is None else read_extents(tokens, mode.shape_env)
    if mode is None or extents is None:
        return Locality(tokens.refusals)
    if isinstance(extents.tokens, int):
        return Locality(tokens.refusals or (why_static(extents, tokens),))
    refused = refused or {}
    sites = [*sites, *(site for site in refused.values() if site is not None)]
    walk = _Walk(gm, sharding, sites, tokens, extents, mode, live_nodes(gm, sites, refused))
    walk.explained = scores_of([node for node, site in refused.items() if site is None], extents)
    with walk.runner.running():
        walk.walk_all(gm)
        output = next(iter(gm.graph.find_nodes(op="output")))
        for node, where in (kept or {}).items():
            walk.outputs.check_kept(output, node, where)
    return walk.report(gm)


class _Walk:
    """One walk over a graph and its nested regions.

    `env`: what is known of each node so far. `regions`: results of nested regions by operands' states. `explained`:
    nodes of attention that was refused before, of which nothing more is known. `known`: of nodes of regions that
    were entered with operands of several states, what holds in all of them.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        sharding: Sharding,
        sites: Sequence[Site],
        tokens: TokenAxis,
        extents: Extents,
        mode: FakeTensorMode,
        live: set[fx.Node],
    ) -> None:
        self.sharding, self.tokens, self.extents, self.live = sharding, tokens, extents, live
        self.sites = {site.node: site for site in sites}
        trace = Trace(extents, sharding)
        self.resolver = Resolver(sharding)
        self.facts = trace.facts
        self.env: dict[fx.Node, States] = {}
        self.facts.offsets = self.offsets = Offsets(gm, sharding, tokens, self.env)
        self.runner = NodeRunner(trace, mode, self.env)
        self.found = Findings()
        self.reads = Reads(gm, self.runner, sharding, self.found)
        self.outputs = Outputs(self.runner, self.resolver, self.found)
        self.own_backward = OwnBackward(self.runner, self.resolver, self.found, self.walk_graph)
        self.regions: dict[Any, States] = {}
        self.explained: set[fx.Node] = set()
        self.known: dict[fx.Node, States] = {}

    def walk_all(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="placeholder"):
            if node in self.live:
                self.env[node], refusal = input_state(node, self.tokens, self.sharding, self.extents)
                self.found.refusals += [refusal] if refusal else []
        returned = self.walk_graph(gm)
        self.outputs.check(gm, returned)
        if self.sharding.reset_states:
            self.check_states(gm)

    def walk_graph(self, gm: fx.GraphModule) -> fx.Node:
        """Walk the nodes of one graph whose placeholders are known; returns its output node."""
        for node in gm.graph.nodes:
            if node.op == "output":
                self.reads.settle(node.all_input_nodes, self.visit)
                return node
            if node.op == "call_function" and getattr(node.target, "__name__", "") in _TOGGLES:
                self.runner.toggle(node)
            elif node in self.live and node.op != "placeholder":
                self.env[node] = self.reads.visit(node, self.visit)
                self.check_joined(node)
        raise AssertionError("a graph has an output")

    def check_states(self, gm: fx.GraphModule) -> None:
        """Refuse to move rows that a state reads which begins anew at documents' places."""
        moves = [node for node, read in self.reads.found.items() if moves_between_documents(read)]
        nodes = (node for module in graph_modules(gm) if moves for node in module.graph.nodes)
        states = [node for node in nodes if kind_of(node) is not None and bind(node).get("offsets") is None]
        sources = sources_of(states, gm, self.sites.values()) if states else ()
        for node in moves:
            if node in sources:
                self.found.refuse(node, Reason.TOKEN_MIXING, _MOVED)

    def check_joined(self, node: fx.Node) -> None:
        """Check what ran chunk by chunk: it gives rows, each made of its token, or sums over them and nothing else."""
        mark, place, state = node.meta.get(JOINED), node.meta.get(IN_ORDER), self.env[node]
        if place is not None and isinstance(state, Rows) and not self.stands_in_order(state, *place):
            detail = (
                "chunks are joined one behind another in a dim in which tokens are not outermost, as where a loop "
                "makes several rows one: join them along the dim of their tokens"
            )
            self.env[node] = self.found.refuse(node, Reason.TOKEN_MIXING, detail)
            return
        if mark is None or state is UNKNOWN:
            return
        alone = (mark == "rows" and isinstance(state, Rows)) or state == Partial()
        more = any(self.env.get(n) == Partial() and JOINED not in n.meta for n in node.all_input_nodes)
        if not alone or more or node in self.sites or self.resolver.changes(node) or isinstance(state, list):
            detail = "chunks of tokens are worked on by something else than their tokens alone, or sums over them"
            self.env[node] = self.found.refuse(node, Reason.TOKEN_MIXING, detail)

    def stands_in_order(self, state: Rows, dim: int, rows: bool) -> bool:
        """True if tokens (with `rows`: rows of the batch, then tokens) are outermost in a dim in which chunks are put
        one behind another."""
        axis = tuple(factor for factor in state.dims[dim] or () if factor != B or self.extents.batch != 1)
        return has(axis[:1], B) and has(axis[:2], T) if rows else has(axis[:1], T)

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
        if is_function(node) and any(fewer_of(self.env.get(n)) for n in node.all_input_nodes):
            detail = "a torch.autograd.Function is given fewer tokens than the row: leave them out behind it"
            return self.found.refuse(node, Reason.TOKEN_MIXING, detail)
        if call is not None:
            return self.visit_region(call.body, call.operands)
        # Rules know no more of what is made from something unknown; with sizes of chunks, running it takes long.
        if node in self.explained or any(self.env.get(source) is UNKNOWN for source in node.all_input_nodes):
            return unknown_like(node)
        if is_transformed(node):
            return self.visit_transformed(node)
        group = collective_group(node)
        if group is not None and self.shares_ranks(group):
            what = "is made whole without it" if Partial() in map(self.env.get, node.all_input_nodes) else "all have"
            detail = (
                f"{node.name} is a collective of the model's own over ranks that share this row, and adds up what "
                f"{what}: leave it out, or compute with cp.token_mean(sum, count, sharding)"
            )
            return self.found.refuse(node, Reason.TOKEN_MIXING, detail)
        if is_function(node):
            return self.own_backward.visit(node)
        if isinstance(node.target, HigherOrderOperator):
            hook = f": {BACKWARD_HOOKS}" if node.target.name() == "register_hook" else ""
            words = f"higher-order op {node.target.name()} has no rule{hook}"
            return self.found.refuse(node, Reason.NO_LOCALITY_RULE, words)
        self.offsets.read_by(node)
        return self.record(node, self.reads.outcome(node))

    def report(self, gm: fx.GraphModule) -> Locality:
        report = self.found.report(self.resolver, self.reads.found.values())
        states = {n: state for n, state in (self.env | self.known).items() if self.known.get(n) is not UNKNOWN}
        fewer = {node: by for node, state in self.env.items() if (by := fewer_of(state))}
        report = replace(report, states=states, fewer=fewer)
        if self.extents.batch == 1 or not report.positions:
            return report
        inserted = {(x.node, x.operand) for x in report.inserts}
        counted = {x.node: x for x in report.lowered if all(isinstance(step.run, WithCount) for step in x.steps)}
        changed = {*fewer, *(x.node for x in report.reads), *({x.node for x in report.lowered} - counted.keys())}
        rows = shared_by_rows(gm, report.positions, self.env, self.live, changed, inserted, counted)
        return report if rows is None else replace(report, positions=(), row_positions=rows)

    def shares_ranks(self, group: str) -> bool:
        """True if a group has other ranks of the annotation's; in a dry run it is not known which."""
        if isinstance(self.sharding.mesh, int):
            return True
        ours, theirs = (dist.get_process_group_ranks(g) for g in (self.sharding.group, process_group(group)))
        return len({*ours} & {*theirs}) > 1

    def record(self, node: fx.Node, outcome: Outcome) -> States:
        """Note of a node what its ops gave rise to."""
        events = outcome.events
        if isinstance(outcome.states, Moved):
            self.found.note(node, events)
            return outcome.states
        refused = self.resolver.add(node, outcome.steps)
        if refused is not None:
            return self.found.refuse(node, refused.reason, refused.detail)
        self.found.note(node, events)
        why = why_not_kept(node, outcome.states, self.env, self.tokens)
        if why is not None:
            return self.found.refuse(node, Reason.TOKEN_MIXING, why)
        if events.sums_fill:
            self.found.fill_sums[node] = None
        return outcome.states

    def visit_transformed(self, node: fx.Node) -> States:
        """A node of a transform: its ops run on wrapped tensors, or on gradients, which no rule sees."""
        states = [state for n in node.all_input_nodes for state in tree_leaves(self.env.get(n, REPLICATED))]
        numbers = any(self.extents.counts_tokens(value_of(n)) for n in node.all_input_nodes)
        if UNKNOWN in states:
            return unknown_like(node)
        if draws_random_numbers(node):
            return self.found.refuse(node, Reason.DROPOUT, f"{node.name} draws other random numbers on each rank")
        if not numbers and all(state is REPLICATED for state in states):
            return REPLICATED
        detail = "what vmap, grad and jvp do to tokens is not followed: write it out, or vouch for an op"
        return self.found.refuse(node, Reason.NO_LOCALITY_RULE, detail)

    def visit_attention(self, site: Site) -> States:
        """Attention whose mask is proven: queries, keys and values have their tokens where the rewrite expects them."""
        self.reads.settle(site.operands, self.visit)  # they need not be the node's own
        batch = None if self.extents.batch == 1 else (B,)
        dims: Dims = tuple(batch if letter == "B" else (T,) if letter == "T" else None for letter in site.form)
        for name, node in (("query", site.query), ("key", site.key), ("value", site.value)):
            state = self.env.get(node, REPLICATED)
            if state is not UNKNOWN and not (isinstance(state, Rows) and _fits(state.dims, dims)):
                detail = f"attention's {name} does not have its tokens in dim {dims.index((T,))}, or its rows in dim 0"
                self.found.refuse(site.node, Reason.TOKEN_MIXING, detail)
        if site.sinks is not None and self.env.get(site.sinks, REPLICATED) is not REPLICATED:
            self.found.refuse(site.node, Reason.TOKEN_MIXING, "attention's sinks are not the same on all ranks")
        attended = any(isinstance(state := self.env.get(x), Rows) and state.attended for x in site.operands)
        if attended and not site.mask.packed:  # tokens of documents see those of none
            self.found.padding_sums[site.node] = None
        return Rows(dims, attended=attended or site.mask.packed)

    def visit_region(self, body: fx.GraphModule, operands: Sequence[Any]) -> States:
        """A nested region, run on its operands; the same for operands of the same states."""
        states = [self.env.get(o, REPLICATED) if isinstance(o, fx.Node) else REPLICATED for o in operands]
        offsets = self.offsets.find(operands)
        key = (body, tuple(tuple(s) if isinstance(s, list) else s for s in states), tuple(offsets))
        if key not in self.regions:
            again = any(entered is body for entered, *_ in self.regions)
            before = {node: self.env[node] for node in body.graph.nodes if again and node in self.env}
            placeholders = body.graph.find_nodes(op="placeholder")
            self.env.update(zip(placeholders, states, strict=True))
            self.offsets.enter(body.graph, offsets)
            orders = self.facts.orders
            output = self.walk_graph(body)
            if any(fewer_of(self.env[node]) != fewer_of(state) for node, state in before.items()):
                self.found.refuse(output, Reason.TOKEN_MIXING, _LENGTHS)
            result = fx.map_arg(output.args[0], lambda n: self.env.get(n, REPLICATED))
            result = list(result) if isinstance(result, list | tuple) else result
            for node, state in before.items():
                self.known[node] = joined(self.known.get(node, state), self.env[node])
            if orders != self.facts.orders:  # the next call's rows are sorted in another order
                return result
            self.regions[key] = result
        return self.regions[key]


def _fits(dims: Dims, wanted: Dims) -> bool:
    """True if tokens and rows of the batch stand where they should; rows that are all equal need not be told apart."""
    return len(dims) == len(wanted) and all(dim in (None, want) for dim, want in zip(dims, wanted, strict=True))


_MOVED = (
    "moves tokens over the ends of documents on the way to a recurrent state, which under reset_states=True begins "
    "anew where documents begin in the row: write a short convolution as conv1d, which is reset too; pass the "
    "packing's offsets to the recurrence; or reset in the model, and leave reset_states out"
)
_LENGTHS = "a nested region is called with all tokens and with fewer: call it with one kind"
_TOGGLES = frozenset({"_set_grad_enabled", "_log_api_usage_once", "_enter_autocast", "_exit_autocast", "_sdpa_kernel"})
"""Functions that switch something on or off for the nodes behind them; they make no tensor."""


_ALONE = frozenset(
    "add sub mul div to long int float type contiguous detach clone diff clamp unsqueeze eq ne lt le gt ge".split()
)
"""Ops that give an entry for each offset, of it or of two that stand side by side."""
_SOURCE_FIRST = frozenset({"index_select", "gather", "take"})


def check_token_locality(state: State) -> State:
    """Prove that nothing but attention mixes tokens, and that nothing takes offsets that were filled up for a batch's
    own.
    """
    found = check_locality(
        state.graph_module,
        state.sharding,
        state.sites,
        state.tokens,
        refused=state.refused,
        kept=state.frame.kept,
    )
    filled = _check_filled_offsets(state.graph_module, state.sharding, state.sites, state.tokens.names)
    refusals = dict.fromkeys((*state.refusals, *found.refusals, *filled))
    return replace(state, locality=found, refusals=tuple(refusals))


def _check_filled_offsets(
    gm: fx.GraphModule, sharding: Sharding, sites: Sequence[Reader], names: Mapping[fx.Node, str]
) -> list[Refusal]:
    """Why a model can't be given offsets that are filled up. names: of the graph's inputs.

        capacity.documents = 5        cu_seqlens   0 9 13 16        of the batch
                                                   0 9 13 16 16 16  of every batch's size, as the model gets it

    Nothing may count them, add them up, or pick tokens by them. A token's place among them, and what is looked up
    there, are as on one process. A mean over them is not.
    """
    if sharding.capacity is None or not isinstance(sharding.packing, CuSeqlens):
        return []
    given = [
        node for node in gm.graph.find_nodes(op="placeholder") if names.get(node) in packing_args(sharding.packing)
    ]
    live, attention = live_nodes(gm, sites), {site.node for site in sites}
    found: dict[fx.Node, None] = {}
    filled = dict.fromkeys(given)
    for node in (pending := [*given]):
        for user in node.users:
            if user not in live or user in attention:
                continue
            call = region_call(user)
            if call is not None:
                read = [inner for inner, operand in call.filled.items() if operand is node and inner in live]
            elif _keeps_entries(user, node):
                read = [user]
            else:
                read = []
                if not _looks_up(user, node, original=node in given):
                    found[user] = None
            pending += [x for x in read if x not in filled]
            filled |= dict.fromkeys(read)
    counts = {symbol for node in given for symbol in expression(value_of(node).shape[0]).free_symbols}
    found |= dict.fromkeys(node for node in live if _is_count(node, counts) and node.op != "placeholder")
    # Of a size that is fixed, counts are plain numbers of the graph.
    found |= dict.fromkeys(node for node in given if not expression(value_of(node).shape[0]).free_symbols)
    return [Refusal(Reason.CAPACITY, _DETAIL, node) for node in found]


_DETAIL = (
    "offsets of documents are filled up to capacity.documents + 1 entries, which are no documents: they may tell a "
    "token's document, by searchsorted, and be looked up by it, but not be counted, summed or picked by"
)


def _keeps_entries(user: fx.Node, node: fx.Node) -> bool:
    if op_name(user) == "getitem":
        index: Any = user.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(part is None or part is Ellipsis or isinstance(part, slice) for part in parts)
        return user.args[0] is node and plain and all(_from_the_front(part) for part in parts)
    return op_name(user) in _ALONE


def _from_the_front(part: Any) -> bool:
    """True if a slice begins at a place that is counted from the first entry, and leaves none out."""
    return not isinstance(part, slice) or (part.start in (None, 0, 1) and part.step in (None, 1))


def _looks_up(user: fx.Node, node: fx.Node, original: bool) -> bool:
    """True if an op finds places among the offsets `node`, or reads them at such places."""
    name = op_name(user)
    if name == "searchsorted":
        return user.args[0] is node and user.args[1:2] != (node,)
    if name == "bucketize":
        return user.args[0] is not node
    if name == "getitem":
        index: Any = user.args[1]
        if user.args[0] is not node or node in tree_leaves(index):
            return False
        ints = [part for part in tree_leaves(index) if isinstance(part, int)]
        return all(part >= 0 or (original and part == -1) for part in ints)
    return name in _SOURCE_FIRST and user.args[0] is node and node not in user.args[1:]


def _is_count(node: fx.Node, counts: set[Any]) -> bool:
    value = value_of(node)
    return isinstance(value, torch.SymInt) and bool(expression(value).free_symbols & counts)


_BROADCASTS = frozenset(
    "add sub mul div truediv multiply true_divide eq ne lt le gt ge where and or logical_and logical_or maximum "
    "minimum expand masked_fill".split()
)
"""Ops that give the same where an operand of size 1 in a dim, or without it, is expanded there before."""


def shared_by_rows(
    gm: fx.GraphModule,
    generators: Sequence[PositionGenerator],
    env: Mapping[fx.Node, Any],
    live: Collection[fx.Node],
    changed: Collection[fx.Node],
    inserted: Collection[tuple[fx.Node, fx.Node]],
    counted: Mapping[fx.Node, Lowering],
) -> RowPositions | None:
    """Nodes that follow from positions which `arange` makes once for all rows of a batch, where each row is cut in an
    order of its own; and who reads them. None where they can't be told apart by rows.

    Such tensors have no dim of rows; they get one, up to where they meet tensors that have it.

    Args:
        env: what is known of the nodes. live: those that outputs depend on, not only masks.
        changed: nodes that will be replaced. inserted: (node, operand) where something is put between both.
        counted: nodes that count with the row's tokens.
    """
    shared = {generator.node: None for generator in generators}
    readers: list[RowReader] = []
    if any(node.graph is not gm.graph for node in shared) or _casts(gm):
        return None
    for node in gm.graph.nodes:
        sources = [n for n in node.all_input_nodes if n in shared]
        if not sources or node in shared or (node not in live and node.op != "output"):
            continue
        if isinstance(value_of(node), int | torch.SymInt | torch.Size):
            continue
        state = env.get(node)
        if not isinstance(state, Rows) or node in changed or not _can_run_again(node):
            return None
        own = [operand for reader, operand in inserted if reader is node]
        if not any(has(dim, B) for dim in state.dims):
            if own:
                return None
            shared[node] = None
            continue
        found = [_reader(node, source, state) for source in sources]
        if node in counted or any(operand in shared for operand in own) or None in found:
            return None
        readers += [reader for reader in found if reader is not None]
    lowered = tuple(counted[node] for node in shared if node in counted)
    return RowPositions(tuple(generators), tuple(shared), tuple(readers), lowered)


def _can_run_again(node: fx.Node) -> bool:
    """True if a node gives one tensor, by itself, and changes nothing."""
    alone = not written_nodes(node) and not is_transformed(node) and region_call(node) is None
    return alone and node.op != "output" and isinstance(value_of(node), Tensor)


def _reader(node: fx.Node, source: fx.Node, state: Rows) -> RowReader | None:
    if op_name(node) not in _BROADCASTS or (B,) not in state.dims:
        return None
    value: Tensor = value_of(source)
    dim = state.dims.index((B,)) - (len(state.dims) - value.ndim)
    return RowReader(node, source, dim) if dim < 0 or value.shape[dim] == 1 else None


def _casts(gm: fx.GraphModule) -> bool:
    """True if a graph has autocast on anywhere: what is computed by rows would run outside of it."""
    return any(bool(cast[2]) for casts, _ in modes_of(gm.graph).values() for cast in casts if len(cast) > 2)
