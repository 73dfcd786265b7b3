"""Refuse graphs that are parts of a function, for nothing is known of what runs between them; and a checkpointed block
that reads an input which the model writes behind it, or which the block writes itself.

y = checkpoint(route, x, bias)     one process computes the block again in the backward, with a bias that it has
bias.add_(step)                    changed since: its gradients are none of its forward's
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
import torch.fx as fx

from cp_rewrite.refusal import Reason, Refusal

from .graph.nodes import needs_gradient
from .graph.regions import RegionCall, region_call
from .graph.writes import memory_of, written_memory, written_nodes
from .values.state import State


def check_frame(state: State) -> State:
    """A graph must begin and end where the compiled function does.

    What Python computes at a graph break, from tokens perhaps, comes back as a tensor that looks like any argument, or
    as a number that Dynamo takes for a constant.
    """
    if state.sharding.world_size == 1:
        return state
    found: list[Refusal] = []
    if state.frame.breaks is not None:
        found.append(Refusal(Reason.GRAPH_BREAK, f"the graph ends at {state.frame.breaks}"))
    if state.frame.resumed:
        found.append(Refusal(Reason.GRAPH_BREAK, "the graph begins after a graph break"))
    return replace(state, refusals=(*state.refusals, *found))


_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")


def check_checkpoints(state: State) -> State:
    """What a checkpointed block reads of the graph's inputs must not change until it is computed again."""
    if not torch.is_grad_enabled():
        return state
    graph, read, found = state.graph_module.graph, dict[int, fx.Node](), list[Refusal]()
    inputs = {memory_of(node) for node in graph.find_nodes(op="placeholder")} & written_memory(state.graph_module)
    for node in graph.nodes if inputs else ():
        call = region_call(node)
        for memory in read.keys() & _written(node, call) if read else ():
            detail = f"{read[memory].name} is read in a checkpointed block, and changed behind it"
            found.append(Refusal(Reason.RECOMPUTED, detail, node))
        if call is not None and node.target.name() in _CHECKPOINTS and any(map(needs_gradient, node.users)):
            found += [Refusal(Reason.RECOMPUTED, detail, node) for detail in _reads_own_writes(call, inputs)]
            used = [outside for inside, outside in call.filled.items() if inside.users and isinstance(outside, fx.Node)]
            read |= {memory: outside for outside in used if (memory := memory_of(outside)) in inputs and memory}
    return replace(state, refusals=(*state.refusals, *found))


def _reads_own_writes(call: RegionCall, inputs: Container[int | None]) -> list[str]:
    """A line for each of these inputs that a block writes, and whose numbers, before or after, are in its results."""
    written, found = written_memory(call.body), list[str]()
    for inside, outside in call.filled.items():
        memory = memory_of(inside)
        if memory not in written or not isinstance(outside, fx.Node) or memory_of(outside) not in inputs:
            continue
        reached = {inside}
        for node in call.body.graph.nodes:
            if not reached.isdisjoint(node.all_input_nodes):
                reached |= {node, *written_nodes(node)}
        if next(iter(call.body.graph.find_nodes(op="output"))) in reached:
            found.append(f"{outside.name} is read in a checkpointed block, which changes it, too")
    return found


def _written(node: fx.Node, call: RegionCall | None) -> set[int | None]:
    written = {memory_of(target) for target in written_nodes(node)}
    if call is not None:
        inside = written_memory(call.body)
        written |= {memory_of(x) for p, x in call.filled.items() if memory_of(p) in inside and isinstance(x, fx.Node)}
    return written
