"""Mutants of what picks tokens and adds them up: each is right on two ranks, or stopped.

Some 2 s each on two idle cores: 303 mutants.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.border import picks
from tests.border.forks import Forks
from tests.border.outcome import KEPT, Kind, observe

MUTANTS = {"-".join(parts): parts for parts in picks.names()}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_keeps_the_promise(forks: Forks, ended: Counter[str], name: str) -> None:
    outcome = observe(forks, picks.make, *MUTANTS[name])
    ended[outcome.kind.name] += 1
    assert outcome.kind in KEPT, str(outcome)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pick-ends-mean-odd", Kind.RIGHT),
        ("pick-end_of_row-square-padded", Kind.RAISED),  # it is padding
        ("pick-of_its_token-mean-full", Kind.REFUSED),
    ],
)
def test_picks_end_as_they_should(forks: Forks, name: str, kind: Kind) -> None:
    outcome = observe(forks, picks.make, *MUTANTS[name])
    assert outcome.kind is kind, str(outcome)
