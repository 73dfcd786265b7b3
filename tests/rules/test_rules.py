"""Every rule of the table on arguments that nobody wrote by hand: what is proven is what ranks give."""

from __future__ import annotations

import pytest

from cp_rewrite.passes.locality.rules import table
from cp_rewrite.passes.locality.rules.rule import Rule, rows, rule, same_dims
from tests.helpers.amount import seed

from .claims import SAME, Claim, Claims, Kind
from .known import MISSING
from .outcome import outcome
from .samples import Sample, ops, samples
from .trials import of_day, of_op

A_DAY = 40
"""Ops of which one trial each is made."""
PARTS = 40


@pytest.mark.long
def test_rules_give_what_they_claim() -> None:
    found = of_day(A_DAY, seed())
    assert not found.wrong, f"CP_SEED={seed()}\n" + "\n".join(found.wrong)
    assert found.counts["right"] > A_DAY // 4, found.counts


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_rules_give_what_they_claim(part: int) -> None:
    for name in sorted(ops())[part::PARTS]:
        found = of_op(name)
        assert not found.wrong, "\n".join(found.wrong)
        assert not found.missing or name in MISSING, f"refused, though ranks give the same: {found.missing}"


def test_ops_are_left_out_by_whole_words() -> None:
    assert {"kthvalue", "nn.functional.relu", "nn.functional.gelu", "nn.functional.normalize"} <= set(ops())
    assert not {"lu_solve", "linalg.lu", "normal", "log_normal", "nn.functional.dropout2d", "istft"} & set(ops())


def sample(text: str) -> Sample:
    name = text.partition("(")[0].removesuffix("_")
    return next(each for each in samples(name) if str(each) == text)


def with_rule(monkeypatch: pytest.MonkeyPatch, name: str, rule: Rule | None) -> None:
    rules = {key: each for key, each in table._BY_NAME.items() if key != name}
    monkeypatch.setattr(table, "_BY_NAME", rules | ({name: rule} if rule else {}))
    table.find_rule.cache_clear()


@pytest.mark.parametrize("claim", [Claim(Kind.ROWS, 0), Claim(Kind.ROWS, 1), Claim(Kind.ROWS, 2)], ids=str)
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, claim: Claim) -> None:
    with_rule(monkeypatch, "cumsum", rule("cumsum", rows(same_dims)))
    found = outcome(sample("cumsum([5, 5, 5], 0)"), Claims((claim,), 5))
    table.find_rule.cache_clear()
    assert found.kind == ("wrong" if claim.dim == 0 else "right"), found


def test_a_missing_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rule(monkeypatch, "cumsum", None)
    claims = [Claims((Claim(Kind.ROWS, dim),), 5) for dim in (0, 1)]
    found = [outcome(sample("cumsum([5, 5, 5], 0)"), each).kind for each in claims]
    table.find_rule.cache_clear()
    assert found == ["refused", "missing"]


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        # All entries are -inf: logarithm of a sum of nothing.
        ("masked.logsumexp([3, 2, 1, 2], mask=bool[1, 2, 1, 2], dim=0, keepdim=True)", (Claim(Kind.ROWS, 0), SAME)),
        ("squeeze_([5, 1, 5, 1], 1)", (Claim(Kind.ROWS, 2),)),  # its shape is that of the result already
        ("gcd_(int64[5], int64[])", (Claim(Kind.ROWS, 0), SAME)),
        ("fft.fftn([5, 6, 7], s=(3, 10), dim=(1, 2), norm=ortho)", (Claim(Kind.ROWS, 0, fill=1),)),
    ],
)
def test_what_was_found(text: str, claims: tuple[Claim, ...]) -> None:
    each = sample(text)
    assert outcome(each, Claims(claims, each.tensors[0].shape[0])).kind == "right"
