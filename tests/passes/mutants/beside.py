"""Mutants that change one place of the model, several beside each other in one graph: it is captured once for all."""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor, nn

from tests.helpers.packed_model import PackedModel
from tests.passes.mutants import MUTANTS, Mutant

PLACES = ("inputs", "angles", "mask", "attention", "mix", "loss", "forward")
MOST = 12
"""Mutants in one graph."""


class Beside(PackedModel):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.mutants = nn.ModuleList(MUTANTS[name]() for name in names)


class Mixes(Beside):
    """Each gets the same hidden states."""

    def mix(self, h: Tensor) -> Tensor:
        return sum((mutant.mix(h * 1) for mutant in self.mutants), h)  # of its own: some write into it


class Losses(Beside):
    """Each gets the same logits."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> tuple[Tensor, ...]:
        return tuple(mutant.loss(logits * 1, labels, num_items) for mutant in self.mutants)


def place_of(mutant: type[Mutant]) -> str:
    """The one method of PackedModel that it changes; "" for several, and for what must be judged alone."""
    changed = [name for name in PLACES if getattr(mutant, name) is not getattr(PackedModel, name)]
    alone = getattr(mutant, "bakes_size", False) or getattr(mutant, "alone", False)
    return changed[0] if len(changed) == 1 and changed[0] in ("mix", "loss") and not alone else ""


def groups(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name -> all that are judged in one graph with it."""
    kinds: dict[tuple[str, int, int, str], list[str]] = defaultdict(list)
    seen: Counter[Any] = Counter()
    for name in names:
        place = place_of(MUTANTS[name])
        function = getattr(MUTANTS[name], place or "forward")
        # Mutants that inherit one function are not told apart by their line.
        kinds[place, getattr(MUTANTS[name], "rows", 1), seen[function], "" if place else name].append(name)
        seen[function] += 1
    parts = [tuple(kind[at : at + MOST]) for kind in kinds.values() for at in range(0, len(kind), MOST)]
    return {name: part for part in parts for name in part}


def build(names: Sequence[str]) -> nn.Module:
    """A model of one group."""
    if len(names) == 1:
        return MUTANTS[names[0]]()
    return (Mixes if place_of(MUTANTS[names[0]]) == "mix" else Losses)(names)


def is_of(name: str, node: fx.Node | None) -> bool:
    """True if a node comes from the mutant's line."""
    trace = (node and node.stack_trace) or ""
    if MUTANTS[name].line not in trace or not (place := place_of(MUTANTS[name])):
        return MUTANTS[name].line in trace
    function = getattr(MUTANTS[name], place)
    lines, first = inspect.getsourcelines(function)
    places = re.findall(r'File "(.*?)", line (\d+)', trace)
    return any(file == inspect.getsourcefile(function) and 0 <= int(line) - first < len(lines) for file, line in places)
