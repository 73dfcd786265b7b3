"""Take a graph from Dynamo: a copy, with those of its nested regions, that passes may change."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import SymInt

from cp_rewrite.batch.active.plan import ActivePlan
from cp_rewrite.passes.graph.dynamo_frame import break_reason, ends_of, is_resumed, results_of
from cp_rewrite.passes.graph.nodes import op_name, value_of
from cp_rewrite.passes.graph.regions import (
    RegionCall,
    attribute_of,
    graph_modules,
    outputs_of,
    region_call,
    region_calls,
)
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.values.state import Frame, State
from cp_rewrite.sharding import Sharding, device_of
from cp_rewrite.torch_internals import expression

from .flash_attn import part_flash_attn
from .join_chunks import join_chunks
from .multihead import part_multihead
from .part_moves import part_moves
from .picked_sums import sum_picked
from .place_writes import place_writes
from .whole_writes import part_masked_scatter

_PLAIN: dict[str, Any] = {"is_all_true": torch.all, "is_any_true": torch.any}
"""What `torch._check_tensor_all` calls -> its usual name."""


def capture(gm: fx.GraphModule, sharding: Sharding, plan: ActivePlan, loss_alone: bool = False) -> State:
    """A copy of Dynamo's graph, ready for the passes: adding placeholders to Dynamo's own graph would break it."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = copied(gm, copies)
    ends = ends_of(gm)
    kept = {copies[node]: where for node, where in ends.kept.items() if node in copies}
    _return_without(copy, {copies[node] for node in ends.unread if node in copies})
    give_sizes_once(copy)
    part_multihead(copy)
    part_flash_attn(copy)
    for module in graph_modules(copy):
        for node in module.graph.nodes:
            if (plain := _PLAIN.get(op_name(node))) is not None:
                node.op, node.target = "call_function", plain
    places = {node: place for place, node in enumerate(outputs_of(copy)) if node in kept}
    tokens = TokenAxis.read(copy, sharding, plan.tokens)
    chunked = False
    if sharding.resolve:
        part_masked_scatter(copy, tokens.counts, kept)
        place_writes(copy, tokens.counts)
        part_moves(copy)
        sum_picked(copy, tokens.counts, kept)
        chunked = join_chunks(copy, tokens.counts, kept)
        for module in graph_modules(copy)[1:]:
            chunked |= join_chunks(module, tokens.counts, kept)
    device = plan.device if plan.device.type != "cpu" else device_of(sharding)
    given = outputs_of(copy)  # other nodes may have taken the place of those that are kept
    kept = {given[places[node]] if node in places else node: where for node, where in kept.items()}
    frame = Frame(kept, frozenset(places.values()), break_reason(gm), is_resumed(), partial(results_of, gm))
    return State(copy, sharding, tokens, device, plan, frame, loss_alone, chunked=chunked)


def _return_without(gm: fx.GraphModule, unread: set[fx.Node]) -> None:
    """Let a graph give None in the place of these results."""
    output = next(iter(gm.graph.find_nodes(op="output")))
    output.args = fx.map_arg(output.args, lambda node: None if node in unread else node)


def give_sizes_once(gm: fx.GraphModule) -> None:
    """Give each region a size once that it is given more than once.

    checkpoint(body, s0, x, s1, cos)    with s1 = s0    ->    checkpoint(body, s0, x, cos)

    The first of equal blocks is traced before torch learns that two sizes are one, and the others behind it: so they
    are the same graph, and are compiled once.
    """
    for graph, nodes in region_calls(gm).items():
        calls = [call for node in nodes if (call := region_call(node)) is not None]
        repeated = _repeated(graph, calls)
        for call in calls:
            rest = [operand for inside, operand in call.filled.items() if inside not in repeated]
            call.node.args = (*call.node.args[: len(call.node.args) - len(call.operands)], *rest)
        for inside, first in repeated.items():
            inside.replace_all_uses_with(first)
            graph.erase_node(inside)


def _repeated(graph: fx.Graph, calls: Sequence[RegionCall]) -> dict[fx.Node, fx.Node]:
    """A size among a region's inputs -> the first one that equals it, in all calls."""
    firsts: dict[Hashable, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for inside in graph.find_nodes(op="placeholder"):
        if isinstance(value_of(inside), SymInt):
            given = (expression(value_of(inside)), *(_size(call.filled[inside]) for call in calls))
            if (first := firsts.setdefault(given, inside)) is not inside:
                found[inside] = first
    return found


def _size(operand: Any) -> Hashable:
    return expression(value_of(operand) if isinstance(operand, fx.Node) else operand)


def copied(gm: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """The graph and those of its nested regions; tensors and other modules are shared. Notes the copy of each node."""
    graph = fx.Graph()
    result: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    graph.output(result[0]).meta = dict(result[1].meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(body := attribute_of(node), fx.GraphModule):
            setattr(copy, str(node.target), copied(body, copies))
    return copy


def for_eager(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that runs node by node: regions that are compiled once for all are called as modules. Their operator first
    runs a body on memory that holds anything, to learn of its results, and tables of places hold anything then."""
    copy = copied(gm, {})
    for module in graph_modules(copy):
        for node in module.graph.nodes:
            call = region_call(node)
            if call is not None and node.target.name() == "invoke_subgraph":
                node.op, node.target, node.args = "call_module", str(node.args[0].target), call.operands
        module.recompile()
    return copy
