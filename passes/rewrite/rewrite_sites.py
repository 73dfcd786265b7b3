"""Replace proven attention nodes by exchange and packed attention, and what is not the same on a shard by what is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch.active.plan import site_inputs
from cp_rewrite.passes.graph.new_nodes import insert, take_place
from cp_rewrite.passes.graph.nodes import needs_gradient
from cp_rewrite.passes.graph.regions import graph_modules, region_call
from cp_rewrite.passes.locality.liveness import live_nodes
from cp_rewrite.passes.values.neighbour_read import NeighbourRead
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import HAS_TOKEN, ROW_INDEX, TOKEN_INDEX, PlanInput

from .attention import rewrite_site, site_names
from .erase import erase_dead
from .inserts import insert_before
from .keep_rows import enter_region, keep_rows, keep_sizes, leave_region
from .lower import lower_node
from .plan_inputs import Inputs
from .positions import globalize, keep_rows_apart
from .read_neighbours import read_neighbours


def rewrite_sites(state: State) -> State:
    """Add the plan's tensors as inputs, put packed attention in the place of each site, drop what only masks read."""
    found, inputs = state.locality, Inputs(state, _read_of_plan(state))
    made: dict[Any, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for table in found.looked_up:
        table.replace_all_uses_with(table.args[0])  # type: ignore[arg-type]
        table.graph.erase_node(table)
    stale = [operand for read in found.reads for operand in read.node.all_input_nodes]
    keep_sizes(state, inputs)
    _move_rows(state.graph_module, state, inputs, replaced, set())  # first: what is read may be replaced below
    for each in found.inserts:
        insert_before(replace(each, operand=replaced.get(each.operand, each.operand)), inputs, made)
    apart = found.row_positions.lowered if found.row_positions else ()
    for lowering in found.lowered:
        if lowering not in apart:
            replaced.update(lower_node(lowering, inputs, state.sharding))
    for position in found.positions:
        replaced[position.node] = globalize(position, inputs)
    if found.row_positions:
        keep_rows_apart(found.row_positions, inputs, state.sharding)
    # Masks, and key and value heads that the model had expanded for its query heads.
    readers = [_Reader(d.node, [replaced.get(node, node) for node in d.operands]) for d in state.decisions]
    live = live_nodes(state.graph_module, readers)
    stale += [n for d in state.decisions for n in (*d.site.node.all_input_nodes, *d.site.operands)]
    names = site_names(state.decisions) if state.sharding.max_logits else [""] * len(state.decisions)
    for decision, name in zip(state.decisions, names, strict=True):
        replaced[decision.site.node] = rewrite_site(decision, state.sharding, inputs, replaced, name)
    erase_dead([node for node in stale if node not in replaced], live, inputs)
    for module in graph_modules(state.graph_module):
        module.recompile()
    return replace(state, inputs=inputs.keys)


@dataclass(frozen=True)
class _Reader:
    """An attention node, and what takes its place reads, once what it read was replaced."""

    node: fx.Node
    operands: list[fx.Node]


def _read_of_plan(state: State) -> list[PlanInput]:
    """What the changes read of the plan."""
    found = state.locality
    keys = [key for d in state.decisions for key in site_inputs(d.site.mask, d.exchange_name)]
    keys += [key for insert in found.inserts for key in insert.inputs]
    keys += [key for lowering in found.lowered for key in lowering.reads]
    keys += [key for read in found.reads for key in read.inputs]
    keys += [HAS_TOKEN] * any(node.graph is not state.graph_module.graph for node in found.fewer)
    return keys + [ROW_INDEX] * bool(found.positions) + [TOKEN_INDEX] * bool(found.row_positions)


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
    new = insert(read.conv or read.node, lambda: read_neighbours(read, proxy, plan), inputs.mode, read.why)
    return take_place(read.node, new, inputs.mode)
