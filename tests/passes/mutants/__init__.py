"""Models that look right and are not the same on a shard, one change each.

A class says what must happen: `reason` and a piece of the culprit's `line`, or `reason = None` where the passes make it
right (then the numbers of two ranks are compared with one process). The reason "padding" stands for a sum that takes in
rows without a token, which the passes mask.
"""

from __future__ import annotations

from types import ModuleType
from typing import cast

from tests.helpers.packed_model import PackedModel
from tests.passes.mutants import (
    counts,
    effects,
    experts,
    losses,
    masks,
    positions,
    scores,
    selections,
    states,
    sums,
    tokens,
)


class Mutant(PackedModel):
    """The attributes that a mutant declares."""

    reason: str | None
    line: str


def _of(module: ModuleType) -> dict[str, type[Mutant]]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {n: cast(type[Mutant], c) for n, c in found.items() if issubclass(c, PackedModel) and hasattr(c, "reason")}


_MODULES = (tokens, selections, effects, experts, losses, sums, states, positions, counts, masks, scores)
MUTANTS: dict[str, type[Mutant]] = {name: mutant for module in _MODULES for name, mutant in _of(module).items()}
