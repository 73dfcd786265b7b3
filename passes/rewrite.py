"""Replace proven attention nodes by exchange and packed attention. Only this file changes a graph, by way of
`plan_inputs` and `erase`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch.active import HAS_TOKEN, ROW_INDEX, TOKEN_INDEX, PlanInput
from cp_rewrite.kernels.params import Params
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.narrow.gathered_attention import attend_gathered
from cp_rewrite.passes.graph.new_nodes import insert as insert_nodes
from cp_rewrite.passes.graph.operands import needs_gradient
from cp_rewrite.passes.graph.regions import region_call
from cp_rewrite.passes.graph.writes import memory_of, written_nodes
from cp_rewrite.passes.locality.liveness import live_nodes
from cp_rewrite.passes.values.neighbour_read import NeighbourRead
from cp_rewrite.passes.values.position import PositionGenerator
from cp_rewrite.passes.values.resolution import Insert
from cp_rewrite.passes.values.state import Decision, State
from cp_rewrite.torch_internals import FakeTensorMode

from .erase import erase_dead
from .lower import lower_node
from .moved.keep_rows import enter_region, keep_rows, keep_sizes, leave_region
from .moved.read_neighbours import read_neighbours
from .narrow.copy_nodes import copy_behind
from .plan_inputs import Inputs
from .rows_apart import keep_rows_apart

_WHY = "rewrite_sites"


def rewrite_sites(state: State) -> State:
    """Add the plan's tensors as inputs, put packed attention in the place of each site, drop what only masks read."""
    found = state.locality
    keys = [key for d in state.decisions for key in PlanInput.of_site(d.site.mask, d.exchange_name)]
    keys += [key for insert in found.inserts for key in insert.inputs]
    keys += [key for lowering in found.lowered for key in lowering.reads]
    keys += [key for read in found.reads for key in read.inputs]
    keys += [HAS_TOKEN] * any(node.graph is not state.graph_module.graph for node in found.fewer)
    keys += [ROW_INDEX] * bool(found.positions) + [TOKEN_INDEX] * bool(found.row_positions)
    inputs = Inputs(state, keys)
    made: dict[Any, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for table in found.looked_up:
        table.replace_all_uses_with(table.args[0])  # type: ignore[arg-type]
        table.graph.erase_node(table)
    stale = [operand for read in found.reads for operand in read.node.all_input_nodes]
    keep_sizes(state, inputs)
    _move_rows(state.graph_module, state, inputs, replaced, set())  # first: what is read may be replaced below
    for insert in found.inserts:
        _insert_before(replace(insert, operand=replaced.get(insert.operand, insert.operand)), inputs, made)
    apart = found.row_positions.lowered if found.row_positions else ()
    for lowering in found.lowered:
        if lowering not in apart:
            lower_node(lowering, inputs, state.sharding)
    for position in found.positions:
        _globalize(position, inputs)
    if found.row_positions:
        keep_rows_apart(found.row_positions, inputs, state.sharding)
    # Masks, and key and value heads that the model had expanded for its query heads.
    live = live_nodes(state.graph_module, state.decisions)
    stale += [n for d in state.decisions for n in (*d.site.node.all_input_nodes, *d.site.operands)]
    for decision in state.decisions:
        replaced[decision.site.node] = _rewrite_site(decision, state, inputs, replaced)
    erase_dead([node for node in stale if node not in replaced], live, inputs)
    for module in state.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return replace(state, inputs=inputs.keys)


def _move_rows(
    gm: fx.GraphModule, state: State, inputs: Inputs, replaced: dict[fx.Node, fx.Node], entered: set[fx.Graph]
) -> None:
    """Replace reads of neighbours, and let nodes of fewer tokens keep all rows: in the order in which nodes run."""
    entered.add(gm.graph)
    found = state.locality
    reads = {read.node: read for read in found.reads}
    for node in list(gm.graph.nodes):
        call = region_call(node) if found.reads or found.fewer else None
        if call is not None and call.body.graph not in entered:
            enter_region(call, state)
            _move_rows(call.body, state, inputs, replaced, entered)
        if call is not None:
            leave_region(call, state)
        elif node in reads:
            replaced[node] = _replace_read(reads[node], inputs, replaced)
        elif node in found.fewer and node.op != "placeholder":
            keep_rows(node, state, inputs)


def _rewrite_site(decision: Decision, state: State, inputs: Inputs, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The node that takes the site's place. `replaced`: attention may read an earlier one's output as it is."""
    site, sharding = decision.site, state.sharding
    graph = site.node.graph
    value = site.node.meta["example_value"]
    tracer = GraphAppendingTracer(graph)
    plan = [fx.Proxy(inputs.node(graph, key), tracer) for key in PlanInput.of_site(site.mask, decision.exchange_name)]
    scale = site.query.meta["example_value"].shape[-1] ** -0.5 if site.scale is None else site.scale
    params = Params(float(scale), site.softcap, sharding.deterministic)
    operands = [replaced.get(node, node) for node in site.operands]
    if decision.cut is not None:
        copies = copy_behind(decision.cut, site.node, replaced, plan[2], plan[4:], decision.exchange, inputs.mode)
        operands[1:3] = copies[site.key], copies[site.value]

    def emit() -> Any:
        nodes = [fx.Proxy(node, tracer) for node in operands]
        q, k, v = (_rows(node, value.dtype, site.form) for node in nodes[:3])
        sinks = nodes[3] if site.sinks is not None else None
        how = decision.exchange, params, decision.kernel, sharding.keep_kv
        if decision.cut is None:
            out = attend(q, k, v, plan[:4], plan[4:], *how, sinks, decision.heads)[0]
        else:
            out = attend_gathered(q, k, v, plan[:4], params, decision.kernel, sinks)[0]
        batch = partial(_batch_size, replaced.get(site.query, site.query), tracer)
        return _of_form(out, site.form, batch)

    return _take_place(site.node, insert_nodes(site.node, emit, inputs.mode, _WHY), inputs.mode)


def _take_place(node: fx.Node, new: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """Let all that read `node` read `new`, and erase it."""
    # Nested regions take their word for it that no gradient comes in where an output's example needs none.
    with mode:
        needed = node.meta["example_value"].requires_grad
        new.meta["example_value"] = new.meta["example_value"].detach().requires_grad_(needed)
    node.replace_all_uses_with(new)
    name = node.name
    node.graph.erase_node(node)
    new.name = name
    return new


def _replace_read(read: NeighbourRead, inputs: Inputs, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The node that takes the place of one that shifts, rolls or convolves tokens."""
    graph, tracer = read.node.graph, GraphAppendingTracer(read.node.graph)
    plan = [fx.Proxy(inputs.node(graph, key), tracer) for key in read.inputs]

    def proxy(node: fx.Node) -> fx.Proxy:
        return fx.Proxy(replaced.get(node, node), tracer)

    source = replaced.get(read.source, read.source)
    if read.read is None and needs_gradient(read.node) == needs_gradient(source):
        read.node.replace_all_uses_with(source)
        read.node.graph.erase_node(read.node)
        return source
    new = insert_nodes(read.conv or read.node, lambda: read_neighbours(read, proxy, plan), inputs.mode, read.why)
    return _take_place(read.node, new, inputs.mode)


def _rows(x: fx.Proxy, dtype: torch.dtype, form: str) -> fx.Proxy:
    """(B * T, H, D) of `form`; under autocast attention runs in another dtype than its inputs have."""
    x = x if x.node.meta["example_value"].dtype == dtype else x.to(dtype)
    match form:
        case "THD":
            return x
        case "HTD":
            return x.transpose(0, 1)
        case "BTD":
            return x.flatten(0, 1).unsqueeze(1)
        case _:
            return (x.transpose(1, 2) if form == "BHTD" else x).flatten(0, 1)


def _of_form(out: fx.Proxy, form: str, batch: Callable[[], Any]) -> fx.Proxy:
    """The inverse of `_rows`; `batch`: how many rows the batch has."""
    match form:
        case "THD":
            return out
        case "HTD":
            return out.transpose(0, 1)
        case "BTD":
            return out.squeeze(1).unflatten(0, (batch(), -1))
        case _:
            out = out.unflatten(0, (batch(), -1))
            return out.transpose(1, 2) if form == "BHTD" else out


def _batch_size(query: fx.Node, tracer: GraphAppendingTracer) -> Any:
    size = query.meta["example_value"].shape[0]
    return size if isinstance(size, int) else fx.Proxy(query, tracer).size(0)


def _globalize(position: PositionGenerator, inputs: Inputs) -> None:
    """Positions of the shard become the plan's global ones."""
    node = position.node
    tracer = GraphAppendingTracer(node.graph)
    index = fx.Proxy(inputs.node(node.graph, ROW_INDEX), tracer)

    def emit() -> Any:
        if position.kind == "arange":
            return index.to(node.meta["example_value"].dtype)
        table = node.args[0]
        assert isinstance(table, fx.Node)
        return fx.Proxy(table, tracer).index_select(position.dim, index)

    node.replace_all_uses_with(insert_nodes(node, emit, inputs.mode, _WHY))
    node.graph.erase_node(node)


def _insert_before(insert: Insert, inputs: Inputs, made: dict[Any, fx.Node]) -> None:
    """Put what `insert` makes of an operand in the operand's place. `made`: so far; readers of a graph share them."""
    node, operand = insert.node, insert.operand
    key = (node.graph, operand, insert.emit, insert.inputs)
    if key not in made:
        tracer = GraphAppendingTracer(node.graph)
        needed = [fx.Proxy(inputs.node(node.graph, key), tracer) for key in insert.inputs]
        new = insert_nodes(node, lambda: insert.emit(fx.Proxy(operand, tracer), *needed), inputs.mode, insert.why)
        new.meta["example_value"].requires_grad_(operand.meta["example_value"].requires_grad)
        if not any(memory_of(operand) == memory_of(n) for writer in node.graph.nodes for n in written_nodes(writer)):
            made[key] = new
    else:
        new = made[key]
    node.replace_input_with(operand, new)
    if operand in written_nodes(node) or new in written_nodes(node):
        _read_copy(operand, node)


def _read_copy(operand: fx.Node, writer: fx.Node) -> None:
    """A node that wrote into an operand writes into a copy of it now: who reads the operand later reads the copy."""
    later = False
    for node in list(writer.graph.nodes):
        if later:
            node.replace_input_with(operand, writer)
        later |= node is writer
