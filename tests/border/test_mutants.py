"""Programs at the border, put together from parts: none may train otherwise than one process without a word.

Some 2 s each on two idle cores. `CP_MUTANTS=all` runs every combination of parts, without it five of nine are run.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.border import draws, fill, padding, state
from tests.border.forks import Forks
from tests.border.outcome import KEPT, Kind, observe

CHOSEN = range(9) if os.environ.get("CP_MUTANTS") == "all" else range(0, 9, 2)
"""Of every nine, so that every part is in some."""
MUTANTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "-".join(parts): (family, parts)
    for family in (padding, fill, state, draws)
    for i, parts in enumerate(family.names())
    if i % 9 in CHOSEN
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_keeps_the_promise(forks: Forks, ended: Counter[str], name: str) -> None:
    family, parts = MUTANTS[name]
    outcome = observe(forks, family.make, *parts)
    stopped = outcome.kind in (Kind.REFUSED, Kind.RAISED)
    ended[f"{outcome.kind.name}{', though right' if stopped and family.is_same(*parts) else ''}"] += 1
    assert outcome.kind in KEPT, str(outcome)


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 300
