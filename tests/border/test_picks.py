"""Mutants of what picks tokens, adds them up, runs over them, and passes a state through them: each is right on two
ranks, or stopped.

Half a second each on two idle cores: 303 mutants of picks, 220 of running sums, 140 of states.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.border import picks, scans, states
from tests.border.forks import Forks
from tests.border.outcome import KEPT, Kind, Outcome, observe

MUTANTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "-".join(parts): (family, parts) for family in (picks, scans, states) for parts in family.names()
}


def observed(forks: Forks, name: str) -> Outcome:
    family, parts = MUTANTS[name]
    return observe(forks, family.make, *parts)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_keeps_the_promise(forks: Forks, ended: Counter[str], name: str) -> None:
    outcome = observed(forks, name)
    ended[outcome.kind.name] += 1
    assert outcome.kind in KEPT, str(outcome)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pick-ends-mean-odd", Kind.RIGHT),
        ("pick-end_of_row-square-padded", Kind.RAISED),  # it is padding
        ("pick-of_its_token-mean-full", Kind.REFUSED),
        ("inclusive-odd", Kind.RIGHT),
        ("inclusive-padded", Kind.RIGHT),  # padding at the end of the row
        ("inclusive-between", Kind.RAISED),
        ("masked-between", Kind.RIGHT),
        ("documents-full", Kind.RIGHT),
        ("wrong_documents-full", Kind.RIGHT),  # as it is written
        ("padded_chunks-full", Kind.REFUSED),
        ("associative-full", Kind.REFUSED),
        ("offsets-odd", Kind.RIGHT),
        ("in_gate-odd", Kind.RIGHT),
        ("ignores_offsets-odd", Kind.REFUSED),
        ("later_offsets-odd", Kind.REFUSED),
        ("long_offsets-odd", Kind.RIGHT),
        ("copied_offsets-odd", Kind.RIGHT),
    ],
)
def test_mutants_end_as_they_should(forks: Forks, name: str, kind: Kind) -> None:
    outcome = observed(forks, name)
    assert outcome.kind is kind, str(outcome)
