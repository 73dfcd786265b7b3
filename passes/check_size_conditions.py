"""Refuse models that decide by the number of tokens: traced on a shard, they decided for a shard's count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy

from cp_rewrite.passes.values.conditions import SizeConditions
from cp_rewrite.passes.values.sizes import size_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import fake_mode_of, guard, guards_of, holds, simplified

from .check_chunks import check_chunks

_DIVISIONS = {"FloorDiv", "Mod", "PythonMod", "ModularIndexing", "CeilDiv"}
"""Names of torch's integer divisions."""


def check_size_conditions(state: State) -> State:
    """Every condition on token counts that Dynamo recorded must hold for the whole row as it does for the shard.

    Runs before any pass puts guards of its own on sizes.
    """
    world_size, mode = state.sharding.world_size, fake_mode_of(state.graph_module.graph.nodes)
    sizes = state.tokens.symbols | state.tokens.mask_symbols
    if world_size == 1 or not sizes or mode is None or mode.shape_env is None:
        return state
    recorded = [(simplified(mode.shape_env, condition), where) for condition, where in guards_of(mode.shape_env)]
    recorded = [(condition, where) for condition, where in recorded if condition.free_symbols & sizes]
    if state.chunked:
        return check_chunks(state, [condition for condition, _ in recorded], mode.shape_env)
    refusals: list[Refusal] = []
    chunked: list[str] = []
    for condition, where in recorded:
        if not holds(mode.shape_env, _of_row(condition, sizes, world_size)):
            if {part.func.__name__ for part in condition.atoms(sympy.Function)} & _DIVISIONS:
                chunked.append(where)
                continue
            detail = f"`{where}` needs {condition}, which holds for a shard's tokens but not for the row's"
            refusals.append(Refusal(Reason.TOKEN_COUNT, detail))
    if chunked:
        refusals.append(Refusal(Reason.TOKEN_COUNT, _in_chunks(chunked)))
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
        for condition in found.exact:
            guard(mode.shape_env, condition)
    return state


def _of_row(condition: Any, tokens: Iterable[Any], world_size: int) -> Any:
    """A condition on a shard's tokens, said of the whole row's."""
    return condition.xreplace({size: world_size * size for size in tokens})


def _in_chunks(places: Sequence[str]) -> str:
    """What a model does that counts chunks of a shard's tokens, at these places."""
    more = f", and {len(places) - 1} more lines," if len(places) > 1 else ""
    return (
        f"`{places[0]}`{more} cuts the row into chunks of tokens, as linear attention and state-space models do, and "
        "has one outcome for a shard's number of chunks and another for the row's"
    )
