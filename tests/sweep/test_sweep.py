"""Text models of `transformers` are right or refused, as docs/generated/models.md says of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import amount

from .table import DOCS, best, verdicts
from .trial import Outcome

SAID = verdicts(DOCS.read_text())
LIMIT_S = 300  # of a case, on a busy machine


def test_the_table_holds_a_hundred_models_and_no_wrong_one() -> None:
    found = [*SAID.values()]
    assert len(found) >= 100
    assert found.count("right") >= 100
    assert set(found) <= {"right", "refused", "torch"}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("MiniMaxM3VLForCausalLM", {"full_attention", "minimax_m3_sparse", "dense", "sparse"}),
        ("Qwen2ForCausalLM", {"full_attention", "sliding_attention"}),
        ("Exaone4ForCausalLM", {"full_attention", "sliding_attention"}),
        ("NllbMoeForConditionalGeneration", {"experts"}),
        ("Qwen3NextForCausalLM", {"full_attention", "linear_attention", "experts"}),
    ],
)
def test_a_small_model_has_every_kind_of_layer(name: str, kinds: set[str]) -> None:
    pytest.importorskip("transformers")
    from .cases import Case, build
    from .layers import absent_from, kinds_of

    model = build(Case(name, "causal")).model
    assert {*kinds_of(model)} == kinds
    assert not absent_from(model)


@pytest.mark.parametrize("name", random.Random(amount.seed() + 1).sample([*SAID], amount.FEW))
def test_a_trainer_calls_a_drawn_class_with_what_the_caller_says(name: str) -> None:
    pytest.importorskip("transformers")
    from .trainer import KINDS

    outcome = called_by_trainer(name)
    assert [*outcome.batches] == [*KINDS]
    assert outcome.verdict in ("right", "refused", "unbuilt"), outcome.why


def test_a_lost_mask_shows_in_what_a_trainer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' auxiliary loss then counts padding: the comparison sees it in padded rows, and nowhere else."""
    pytest.importorskip("transformers")
    from .trainer import Plain

    def without_mask(self: Plain, call: Callable[..., Any], *_: object) -> Callable[..., Any]:
        return lambda **local: call(**{name: x for name, x in local.items() if name != "attention_mask"})

    assert called_by_trainer("MixtralForCausalLM").batches == dict.fromkeys(("packed", "whole", "padded"), "right")
    monkeypatch.setattr(Plain, "compile", without_mask)
    outcome = called_by_trainer("MixtralForCausalLM")
    assert outcome.batches == {"packed": "right", "whole": "right", "padded": "different"}
    assert outcome.verdict == "different"


def called_by_trainer(name: str) -> Outcome:
    from .cases import all_cases
    from .trainer import TrainerTrial

    (case,) = (case for case in all_cases() if case.name == name)
    return TrainerTrial(case, 0, lambda: pytest.fail("no ranks"), lambda _: None).run()


@pytest.mark.slow
@pytest.mark.parametrize("name", random.Random(amount.seed()).sample([*SAID], amount.FEW))
def test_a_drawn_class_is_as_the_table_says(name: str) -> None:
    pytest.importorskip("transformers")
    from .cases import all_cases
    from .processes import sweep

    outcomes: list[Outcome] = []
    cases = [case for case in all_cases() if case.name == name]
    sweep(cases, 1, LIMIT_S, time.monotonic() + 3 * LIMIT_S, outcomes.append)
    (outcome,) = best(outcomes)
    assert outcome.verdict in ("right", "refused", "torch"), outcome.why
    assert outcome.verdict == "right" or SAID[name] != "right", outcome.why
