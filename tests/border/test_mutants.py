"""Programs at the border, put together from parts: none may train otherwise than one process without a word.

Half a second each on two idle cores; `make sweep` runs every combination of parts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.border import draws, fill, padding, state
from tests.border.forks import Forks
from tests.border.outcome import KEPT, Kind, observe

MUTANTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "-".join(parts): (family, parts) for family in (padding, fill, state, draws) for parts in family.names()
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_keeps_the_promise(forks: Forks, ended: Counter[str], name: str) -> None:
    family, parts = MUTANTS[name]
    outcome = observe(forks, family.make, *parts)
    stopped = outcome.kind in (Kind.REFUSED, Kind.RAISED)
    ended[f"{outcome.kind.name}{', though right' if stopped and family.is_same(*parts) else ''}"] += 1
    assert outcome.kind in KEPT, str(outcome)


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 500
