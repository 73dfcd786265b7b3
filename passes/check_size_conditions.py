"""Refuse models that decide by the number of tokens: traced on a shard, they decided for a shard's count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import sympy
import torch.fx as fx

from cp_rewrite.passes.values.size_conditions import SizeConditions
from cp_rewrite.passes.values.sizes import size_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal, source_line
from cp_rewrite.torch_internals import fake_mode_of, guard, guards_of, holds, simplified

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
