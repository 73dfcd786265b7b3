"""Checks of a graph as a whole, before the rules are asked and after the rewrite.

check_documents             attention that sees more than the packing tells apart
verify_graph                a rewritten graph, before anything compiles it
check_frame                 graphs that are parts of a function
check_checkpoints           checkpointed blocks that read, or write, what the model writes
check_size_conditions,      what blocks that are compiled by themselves decide by the number of tokens
guard_size_conditions
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.packing import PaddingMask, Tree, WholeRows
from cp_rewrite.passes.graph.nodes import memory_of, written_memory, written_nodes
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import expression, fake_mode_of, guard, guards_of, holds, simplified

from .graph.nodes import RegionCall, needs_gradient, region_call, value_of
from .graph.tokens import LOCAL
from .values.sizes import SizeConditions, size_places
from .values.state import State


@dataclass(frozen=True)
class Unmasked:
    """Attention that sees more than a query's document, or path of a tree, though nobody said so.

    Args:
        rows: what stands against batches with several documents in a row. trees: against trees with branches.
    """

    rows: tuple[Refusal, ...] = ()
    trees: tuple[Refusal, ...] = ()

    @staticmethod
    def of(state: State) -> Unmasked:
        sharding, packing = state.sharding, state.sharding.packing
        if sharding.across_documents or isinstance(packing, WholeRows | PaddingMask):
            return Unmasked()
        said = {sharding.assume_mask, *sharding.masks.values()}
        rows: list[Refusal] = []
        trees: list[Refusal] = []
        for site in state.sites:
            detail = f"attention is '{site.mask}', and rows hold several documents, which {packing!r} tells apart"
            if site.mask in said:
                continue
            if not site.mask.packed:
                rows.append(Refusal(Reason.DOCUMENTS_SEEN, detail, site.node))
            elif isinstance(packing, Tree) and not site.mask.tree:
                detail = f"attention is '{site.mask}', and documents are trees, whose paths {packing!r} tells apart"
                trees.append(Refusal(Reason.DOCUMENTS_SEEN, detail, site.node))
        return Unmasked(tuple(rows), tuple(trees))

    def against(self, plan: BatchPlan) -> list[Refusal]:
        """Refusals that stand against a batch."""
        branched = any(row.nodes is not None and (np.diff(row.nodes.parents) != 1).any() for row in plan.rows)
        several = branched or any((row.lengths > 0).sum() > 1 for row in plan.rows)
        return [*(self.rows if several else ()), *(self.trees if branched else ())]


def check_documents(state: State) -> State:
    """Attention must keep the documents of this batch apart; with a capacity, those of any: its steps are replayed.
    Refused is attention that no mask came into, or one of documents for trees.
    """
    found = Unmasked.of(state)
    captured = state.sharding.capacity is not None
    against = (*found.rows, *found.trees) if captured else found.against(state.plan.plan)
    return replace(state, refusals=(*state.refusals, *against))


def verify_graph(state: State) -> State:
    """Raise if the graph is broken: lint, every site replaced by a value of its own shape, inputs added last."""
    gm = state.graph_module
    for module in dict.fromkeys(d.site.graph_module for d in state.decisions):
        module.graph.lint()
        nodes = {node.name: node for node in module.graph.nodes}
        for node in nodes.values():
            if "cp_rewrite" in node.meta and "example_value" not in node.meta:
                raise RuntimeError(f"cp_rewrite: inserted node {node.name} has no fake value")
        for site in (d.site for d in state.decisions if d.site.graph_module is module):
            _verify_site(site.node, nodes)
    placeholders = gm.graph.find_nodes(op="placeholder")
    added = [node for node in placeholders if "cp_rewrite" in node.meta]
    if placeholders[len(placeholders) - len(added) :] != added or len(added) != len(state.inputs):
        raise RuntimeError("cp_rewrite: the plan's inputs must be the last inputs of the graph, in order")
    return state


def _verify_site(old: fx.Node, nodes: Mapping[str, fx.Node]) -> None:
    """The replaced node is gone; the node that took its name, of the `nodes` by name, has its shape and dtype."""
    new = nodes.get(old.name)
    if new is old or new is None:
        raise RuntimeError(f"cp_rewrite: attention node {old.name} was left in place")
    before, after = _facts(old.meta["example_value"]), _facts(new.meta["example_value"])
    if before != after:
        raise RuntimeError(f"cp_rewrite: {old.name} was {before}, its replacement is {after}")


def _facts(value: Tensor) -> tuple[torch.dtype, torch.device, int, tuple[int | str, ...]]:
    # Symbolic sizes may be written in two ways (R // B and T); comparing them would put guards on the plan's inputs.
    sizes = tuple(int(size) if size.is_Integer else "symbolic" for size in map(expression, value.shape))
    return value.dtype, value.device, value.ndim, sizes


def check_frame(state: State) -> State:
    """A graph must begin and end where the compiled function does: nothing is known of what runs between parts of one.

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
    """Refuse a change of a graph's input that a checkpointed block reads, before the block is computed again; the
    change may stand behind the block, or be the block's own.

        y = checkpoint(route, x, bias)     one process computes the block again in the backward, with a bias that it has
        bias.add_(step)                    changed since: its gradients are none of its forward's
    """
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


_DIVISIONS = {"FloorDiv", "Mod", "PythonMod", "ModularIndexing", "CeilDiv"}
"""Names of torch's integer divisions."""

_CHUNKS = (
    "a loop over chunks of tokens in a block that is compiled by itself sees the chunks of a rank's tokens: compile "
    "the whole model, or cut into chunks outside of the block"
)


def check_size_conditions(state: State) -> State:
    """Every condition on a rank's token count that Dynamo recorded must hold for the whole row as well: blocks that are
    compiled one by one are traced on a shard. A whole model is traced on inputs that look as long as the row
    (`batch/as_row.py`), and decides for it.

    Runs before any pass puts guards of its own on sizes.
    """
    world_size, mode, sizes = state.sharding.world_size, fake_mode_of(state.graph_module.graph.nodes), _of_rank(state)
    if world_size == 1 or not sizes or mode is None or mode.shape_env is None:
        return state
    shape_env = mode.shape_env
    recorded = [(simplified(shape_env, condition), where) for condition, where in guards_of(shape_env)]
    recorded = [(condition, where) for condition, where in recorded if condition.free_symbols & sizes]
    refusals: list[Refusal] = []
    divided: list[str] = []
    for condition, where in recorded:
        if not holds(shape_env, _of_row(condition, sizes, world_size)):
            if {part.func.__name__ for part in condition.atoms(sympy.Function)} & _DIVISIONS:
                divided.append(where)
                continue
            detail = f"`{where}` needs {condition}, which holds for a shard's tokens but not for the row's"
            refusals.append(Refusal(Reason.TOKEN_COUNT, detail))
    if divided:
        refusals.append(Refusal(Reason.TOKEN_COUNT, _divided(divided)))
    if state.chunked:
        refusals.append(Refusal(Reason.TOKEN_COUNT, _CHUNKS))
    places = size_places(state.graph_module.graph.find_nodes(op="placeholder"))
    found = SizeConditions(dict(recorded), sizes, places) if recorded else None
    return replace(state, size_conditions=found, refusals=(*state.refusals, *refusals))


def guard_size_conditions(state: State) -> State:
    """Have a batch for which a condition turns out otherwise for the whole row compiled, and checked, anew.

    Torch takes long to prove and guard what is written with divisions: a dry run that is refused goes without.
    """
    found, mode = state.size_conditions, fake_mode_of(state.graph_module.graph.nodes)
    if found is not None and mode is not None:
        for condition in found.conditions:
            tokens = condition.free_symbols & found.tokens
            guard(mode.shape_env, _of_row(condition, tokens, state.sharding.world_size))
    return state


def _of_rank(state: State) -> set[Any]:
    """Symbols that count a rank's tokens, of inputs that do not look as long as the row."""
    sizes = [found.tokens for found in state.tokens.inputs if LOCAL not in found.node.meta]
    for node, argument in state.tokens.masks.items():
        if not argument.is_list and LOCAL not in node.meta:
            sizes += value_of(node).shape[-2:]
    return {symbol for size in sizes for symbol in expression(size).free_symbols}


def _of_row(condition: Any, tokens: Iterable[Any], world_size: int) -> Any:
    """A condition on a shard's tokens, said of the whole row's."""
    return condition.xreplace({size: world_size * size for size in tokens})


def _divided(places: Sequence[str]) -> str:
    """Say that a model decides by a share of a shard's tokens, or how many chunks they are, at these places."""
    lines = "line" if len(places) == 2 else "lines"
    more = f", and {len(places) - 1} more {lines}," if len(places) > 1 else ""
    return (
        f"`{places[0]}`{more} divides the number of tokens, as a count of chunks does, and decides one thing by a "
        "shard's and another by the row's"
    )
