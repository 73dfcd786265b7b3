"""Replace proven attention nodes by exchange and packed attention, and what is not the same on a shard by what is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch.active import site_inputs
from cp_rewrite.passes.graph.new_nodes import insert, take_place
from cp_rewrite.passes.graph.new_nodes import insert as insert_nodes
from cp_rewrite.passes.graph.nodes import graph_modules, memory_of, needs_gradient, region_call, written_nodes
from cp_rewrite.passes.locality.liveness import live_nodes
from cp_rewrite.passes.values.edits import Insert, NeighbourRead
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.plan_input import HAS_TOKEN, ROW_INDEX, TOKEN_INDEX, PlanInput

from .attention import rewrite_site, site_names
from .edits import (
    enter_region,
    globalize,
    keep_rows,
    keep_rows_apart,
    keep_sizes,
    leave_region,
    lower_node,
    read_neighbours,
)
from .inputs import Inputs


def rewrite_sites(state: State) -> State:
    """Add the plan's tensors as inputs, put packed attention in the place of each site, drop what only masks read."""
    found, inputs = state.locality, Inputs(state, _read_of_plan(state))
    made: dict[Any, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for table in found.looked_up:
        table.replace_all_uses_with(table.args[0])  # type: ignore[arg-type]
        table.graph.erase_node(table)
    stale = [operand for read in found.reads for operand in read.node.all_input_nodes]
    keep_sizes(state, inputs)
    _move_rows(state.graph_module, state, inputs, replaced, set())  # first: what is read may be replaced below
    for each in found.inserts:
        insert_before(replace(each, operand=replaced.get(each.operand, each.operand)), inputs, made, copies)
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
    """The plan's tensors that the changes read."""
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
    if read.read is None and not read.unread and needs_gradient(read.node) == needs_gradient(source):
        read.node.replace_all_uses_with(source)
        read.node.graph.erase_node(read.node)
        return source
    new = insert(read.conv or read.node, lambda: read_neighbours(read, proxy, plan), inputs.mode, read.why)
    return take_place(read.node, new, inputs.mode)


def insert_before(insert: Insert, inputs: Inputs, made: dict[Any, fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Put what `insert` makes of an operand in the operand's place.

    Args:
        made: so far; readers of a graph share them.
        copies: operands -> the nodes that wrote into a copy of them, which later nodes read in their place.
    """
    node, operand = insert.node, insert.operand
    while operand in copies and operand not in node.all_input_nodes:
        operand = copies[operand]
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
        copies[operand] = node


def _read_copy(operand: fx.Node, writer: fx.Node) -> None:
    """A node that wrote into an operand writes into a copy of it now: who reads the operand later reads the copy."""
    later = False
    for node in list(writer.graph.nodes):
        if later:
            node.replace_input_with(operand, writer)
        later |= node is writer


def erase_dead(stale: Iterable[fx.Node], live: Collection[fx.Node], inputs: Inputs) -> None:
    """Erase `stale` nodes and what they were computed from, in-place writes included, except what is live. A general
    dead-code elimination would delete in-place ops of a Dynamo graph.

    Args:
        stale: operands of the attention nodes that were replaced: masks, heads expanded for the queries.
        live: what outputs or effects depend on, from `live_nodes` before the rewrite.
    """
    doomed = _ancestors(stale, live, inputs)
    for gm in reversed(graph_modules(inputs.root)):  # regions before the graphs that call them
        for node in reversed(list(gm.graph.nodes)):
            if node not in doomed or node.users:
                continue
            if node.op == "placeholder":
                inputs.drop_operand(node)
            else:
                gm.graph.erase_node(node)


def _ancestors(stale: Iterable[fx.Node], live: Collection[fx.Node], inputs: Inputs) -> set[fx.Node]:
    writers: dict[int | None, list[fx.Node]] = {}
    for gm in graph_modules(inputs.root):
        for node in gm.graph.nodes:
            for target in written_nodes(node):
                writers.setdefault(memory_of(target), []).append(node)
    writers.pop(None, None)
    doomed: set[fx.Node] = set()
    pending = list(stale)
    while pending:
        node = pending.pop()
        if node in doomed or node in live:
            continue
        if node.op == "placeholder":
            operands = inputs.operands(node)
            if not operands:  # an input of the root: its caller passes it anyway
                continue
            pending += operands
        doomed.add(node)
        pending += [*node.all_input_nodes, *writers.get(memory_of(node), ())]
    return doomed
