"""Refuse models that decide by the number of tokens: traced on a shard, they took the branch for a shard's count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import SymInt, Tensor

from cp_rewrite.passes.locality.inputs import token_sizes
from cp_rewrite.passes.values.size_conditions import SizeBranches
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal

from .plan_inputs import fake_mode


def check_size_branches(state: State) -> State:
    """Every condition on token counts that Dynamo recorded must hold for the whole row as it does for the shard.

    The condition for the whole row becomes a guard of its own: a batch for which it turns out otherwise is compiled,
    and checked, anew. Runs before any pass puts guards of its own on sizes.
    """
    world_size, sizes = state.sharding.world_size, _token_sizes(state)
    environment: Any = fake_mode(state.graph_module).shape_env
    if world_size == 1 or not sizes or environment is None:
        return state
    refusals: list[Refusal] = []
    conditions: dict[Any, str] = {}
    for guard in list(environment.guards):
        condition = environment.replace(guard.expr)  # symbols found equal are one
        tokens = condition.free_symbols & sizes
        if not tokens:
            continue
        of_row = condition.subs({size: world_size * size for size in tokens})
        where = conditions[condition] = str(getattr(guard.sloc, "user_loc", None) or guard.sloc)
        if not environment.evaluate_expr(of_row):
            detail = f"`{where}` needs {condition}, which holds for a shard's tokens but not for the row's"
            refusals.append(Refusal(Reason.TOKEN_COUNT, detail))
    branches = SizeBranches(conditions, sizes, _places(state)) if conditions else None
    return replace(state, branches=branches, refusals=(*state.refusals, *refusals))


def _places(state: State) -> dict[Any, tuple[int, int | None]]:
    """Where each size symbol can be read off the graph's inputs."""
    places: dict[Any, tuple[int, int | None]] = {}
    for place, node in enumerate(state.graph_module.graph.find_nodes(op="placeholder")):
        value = node.meta["example_value"]
        sizes = list(enumerate(value.shape)) if isinstance(value, Tensor) else [(None, value)]
        for dim, size in sizes:
            if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                places.setdefault(size.node.expr, (place, dim))
    return places


def _token_sizes(state: State) -> set[Any]:
    """Symbols of the token counts."""
    counts = [count for _, count in token_sizes(state.source_of, state.sharding)]
    return {symbol for count in counts if isinstance(count, SymInt) for symbol in count.node.expr.free_symbols}
