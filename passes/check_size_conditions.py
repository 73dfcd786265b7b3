"""Refuse models that decide by the number of tokens: traced on a shard, they decided for a shard's count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy

from cp_rewrite.passes.values.sizes import SizeConditions, size_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import fake_mode_of, guard, guards_of, holds, simplified

from .check_chunks import check_chunks
from .whole_row import of_whole_row

_DIVISIONS = {"FloorDiv", "Mod", "PythonMod", "ModularIndexing", "CeilDiv"}
"""Names of torch's integer divisions."""


def check_size_conditions(state: State) -> State:
    """Every condition on token counts that Dynamo recorded must hold for the whole row as it does for the shard; else
    the row's graph takes the place of the shard's.

    Runs before any pass puts guards of its own on sizes.
    """
    world_size, mode = state.sharding.world_size, fake_mode_of(state.graph_module.graph.nodes)
    sizes = state.tokens.symbols | state.tokens.mask_symbols
    if world_size == 1 or not sizes or mode is None or mode.shape_env is None:
        return state
    found = _checked(state, mode.shape_env)
    return found if found.refusals == state.refusals else of_whole_row(state, mode) or found


def _checked(state: State, shape_env: Any) -> State:
    """With a refusal of each condition that does not hold for the row."""
    world_size, sizes = state.sharding.world_size, state.tokens.symbols | state.tokens.mask_symbols
    recorded = [(simplified(shape_env, condition), where) for condition, where in guards_of(shape_env)]
    recorded = [(condition, where) for condition, where in recorded if condition.free_symbols & sizes]
    if state.chunked:
        return check_chunks(state, [condition for condition, _ in recorded], shape_env)
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


def _divided(places: Sequence[str]) -> str:
    """What a model does that decides by a share of a shard's tokens, or how many chunks they are, at these places."""
    lines = "line" if len(places) == 2 else "lines"
    more = f", and {len(places) - 1} more {lines}," if len(places) > 1 else ""
    return (
        f"`{places[0]}`{more} divides the number of tokens, as a count of chunks does, and decides one thing by a "
        "shard's and another by the row's"
    )
