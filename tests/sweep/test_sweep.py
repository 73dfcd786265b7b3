"""Text models of `transformers` are right or refused, as docs/generated/models.md says of each."""

from __future__ import annotations

import time

import pytest

from .table import DOCS, best, verdicts
from .trial import Outcome

SAID = verdicts(DOCS.read_text())
LIMIT_S = 300  # of a case, on a busy machine


def test_the_table_holds_a_hundred_models_and_no_wrong_one() -> None:
    found = [*SAID.values()]
    assert len(found) >= 100
    assert found.count("right") >= 100
    assert set(found) <= {"right", "refused", "torch"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_class_is_as_the_table_says(name: str) -> None:
    pytest.importorskip("transformers")
    from .cases import all_cases, one_of_each_type
    from .processes import sweep

    if name not in {case.name for case in one_of_each_type()}:
        pytest.skip("another class of its model type is tried")
    outcomes: list[Outcome] = []
    cases = [case for case in all_cases() if case.name == name]
    sweep(cases, 1, LIMIT_S, time.monotonic() + 3 * LIMIT_S, outcomes.append)
    (outcome,) = best(outcomes)
    assert outcome.verdict in ("right", "refused", "torch"), outcome.why
    assert outcome.verdict == "right" or SAID[name] != "right", outcome.why
