"""Programs one step beside those that every rule is tested by: none trains otherwise than one process without a word.

A second each. `CP_MUTANTS=1800` draws so many, `CP_SEED` others; every day has a seed of its own.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.border.outcome import KEPT
from tests.helpers import amount
from tests.helpers.rule_mutants import FAMILIES, RuleMutant, draw, observe

MUTANTS = draw(int(os.environ.get("CP_MUTANTS", "600")), amount.seed())
"""Some four of ten run on one process."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda number: str(MUTANTS[number]))
def test_a_program_beside_is_right_or_stopped(ended: Counter[str], number: int) -> None:
    outcome = observe(MUTANTS[number], number)
    if outcome is None:
        ended["one process can't run it"] += 1
        return
    ended[outcome.kind.name] += 1
    assert outcome.kind in KEPT, f"{MUTANTS[number].change.source}\n{outcome}"


def test_mutants_are_of_every_rule() -> None:
    assert {mutant.family for mutant in MUTANTS} == {*FAMILIES}
    assert all(isinstance(mutant, RuleMutant) for mutant in MUTANTS)
