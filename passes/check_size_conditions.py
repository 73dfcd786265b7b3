"""Refuse models that decide by the number of tokens: traced on a shard, they decided for a shard's count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import sympy
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.join_chunks import JOINED
from cp_rewrite.passes.graph.operands import op_name
from cp_rewrite.passes.graph.regions import region_calls
from cp_rewrite.passes.values.size_conditions import SizeConditions
from cp_rewrite.passes.values.sizes import size_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal, source_line
from cp_rewrite.torch_internals import expression, fake_mode_of, guard, guards_of, holds, simplified

_DIVISIONS = {"FloorDiv", "Mod", "PythonMod", "ModularIndexing", "CeilDiv"}
"""Names of torch's integer divisions."""


def check_size_conditions(state: State) -> State:
    """Every condition on token counts that Dynamo recorded must hold for the whole row as it does for the shard.

    Runs before any pass puts guards of its own on sizes.
    """
    world_size, mode = state.sharding.world_size, fake_mode_of(state.graph_module.graph.nodes)
    sizes = {symbol for count in state.tokens.counts for symbol in count.free_symbols}
    if world_size == 1 or not sizes or mode is None or mode.shape_env is None:
        return state
    refusals: list[Refusal] = []
    chunked: list[str] = []
    conditions: dict[Any, str] = {}
    joined = {_line(node) for node in state.chunked}
    for recorded, where in guards_of(mode.shape_env):
        condition = simplified(mode.shape_env, recorded)
        tokens = condition.free_symbols & sizes
        if not tokens:
            continue
        divides = {part.func.__name__ for part in condition.atoms(sympy.Function)} & _DIVISIONS
        if divides and any(line in where for line in joined):
            continue
        conditions[condition] = where
        if not holds(mode.shape_env, _of_row(condition, tokens, world_size)):
            if divides:
                chunked.append(where)
                continue
            detail = f"`{where}` needs {condition}, which holds for a shard's tokens but not for the row's"
            refusals.append(Refusal(Reason.TOKEN_COUNT, detail))
    for node, number in state.chunked.items():
        count = len(node.meta["example_value"]) if number is not None else 0
        if number is None or not _counted(state.graph_module, count):
            continue
        where, condition = source_line(node), sympy.Eq(simplified(mode.shape_env, expression(number)), count)
        conditions[condition] = where
        if not holds(mode.shape_env, _of_row(condition, sizes, world_size)):
            detail = f"`{where}` makes {count} chunks of a shard's tokens, other than of the row's, and is counted with"
            refusals.append(Refusal(Reason.TOKEN_COUNT, detail))
    if chunked:
        refusals.append(Refusal(Reason.TOKEN_COUNT, _in_chunks(chunked)))
    places = size_places(state.graph_module.graph.find_nodes(op="placeholder"))
    found = SizeConditions(conditions, sizes, places) if conditions else None
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


def _of_row(condition: Any, tokens: Iterable[Any], world_size: int) -> Any:
    """A condition on a shard's tokens, said of the whole row's."""
    return condition.xreplace({size: world_size * size for size in tokens})


def _counted(gm: fx.GraphModule, count: int) -> bool:
    """Whether something behind a loop over chunks counts with a number that may be how many there were: 8, 1 / 8, 7.

    Python's own arithmetic leaves only its result in the graph: `sum(losses) / len(losses)` is a quotient by 8.
    """
    nested = {node for graph in region_calls(gm) for node in graph.nodes}
    behind = {node for node in (*nested, *gm.graph.nodes) if JOINED in node.meta}
    if not behind.isdisjoint(nested):  # what a region gives is read outside of it
        behind = {*nested, *gm.graph.nodes}
    for node in gm.graph.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    behind |= {source for node in behind for source in node.all_input_nodes if not source.all_input_nodes}
    leaves = (
        leaf for node in behind if op_name(node) in _COUNTS for leaf in tree_leaves((node.args, dict(node.kwargs)))
    )
    return any(_is_near(leaf, count) for leaf in leaves)


def _is_near(value: Any, count: int) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value or not math.isfinite(value):
        return False
    near = [n for n in (count - 1, count, count + 1) if n > 1]
    return any(math.isclose(abs(x), n) for x in (value, 1 / value) for n in near)


_COUNTS = frozenset(
    "add sub mul div pow rsub multiply divide true_divide floordiv floor_divide subtract addcmul addcdiv lerp where "
    "masked_fill clamp ipow fill tensor as_tensor scalar_tensor full new_tensor new_full full_like".split()
)
"""Ops that count with numbers among their arguments."""


def _line(node: fx.Node) -> str:
    """`file:line in`, as guards name places."""
    place = source_line(node).split(",")[0]
    return f"{PurePath(place).name} in "


def _in_chunks(places: Sequence[str]) -> str:
    """What a model does that counts chunks of a shard's tokens, at these places."""
    more = f", and {len(places) - 1} more lines," if len(places) > 1 else ""
    return (
        f"`{places[0]}`{more} cuts the row into chunks of tokens, as linear attention and state-space models do, and "
        "has one outcome for a shard's number of chunks and another for the row's"
    )
