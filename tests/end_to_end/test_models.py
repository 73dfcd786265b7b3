"""Models as people use them: each trains sharded as on one process, or is refused for a true reason.

The outcomes are the table in docs/generated/models.md, which
`CP_ACCEPT=1 pytest tests/end_to_end/test_models.py -m "slow or not slow"` writes.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.marks import is_part
from cp_rewrite.diagnose import check
from cp_rewrite.diagnose.check import floor_of
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import BY_LENGTH, END, MODELS, RECIPES, build_model
from tests.helpers.one_process import gradients_of
from tests.helpers.pool import Pool
from tests.sweep.table import TITLE

VERSION = f"transformers {importlib.metadata.version('transformers')}"
DOCS = Path(__file__).parent.parent.parent / "docs" / "generated" / "models.md"
LENGTHS = [[13, 1, 7, 29, 31]]  # 81 tokens: one of two ranks has a row without a token
ACROSS = [[[13, 1, 7]], [[16, 9]], [[17, 4]], LENGTHS, [[15, 6]]]
"""Documents for models whose RoPE changes beyond 16 positions: batches in turn, by one graph."""
LIMIT = 1e-5
QUICK = ("llama",)
ON_THREADS = ("modernbert", "nanogpt", "torchtitan_eos_mask")
"""With QUICK one of each kind of attention, mask and position; on processes the others are slow."""

REFUSED: dict[str, tuple[str, str]] = {}
"""Model -> the reason it must be refused for, and why that is true."""


@dataclass(frozen=True)
class Outcome:
    """Result of a model: its masks, or the reasons it was refused for; largest relative differences to one process."""

    masks: tuple[str, ...]
    refused: tuple[str, ...] = ()
    loss: float = 0.0
    gradient: float | None = None
    worst: str = ""
    sums: str = "–"


def test_every_model_is_right_or_refused(pool: Pool, name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name] = run(pool, name)
    if name in REFUSED:
        assert REFUSED[name][0] in outcome.refused
        return
    assert not outcome.refused
    assert outcome.loss <= LIMIT
    assert (outcome.gradient or 0.0) <= LIMIT, outcome.worst


@pytest.mark.parametrize("model", ON_THREADS)
def test_models_are_right_on_threads(model: str) -> None:
    torch._dynamo.reset()
    report = cp.check(build_model(model), sharding_of(2, model), batch_of(LENGTHS), shift_labels=True)
    assert report.largest <= LIMIT, str(report)


@pytest.mark.xdist_group("pool")  # where the outcomes are
def test_the_table_in_the_docs_is_what_ran(outcomes: dict[str, Outcome]) -> None:
    if os.environ.get("CP_ACCEPT") and set(outcomes) == set(MODELS):
        DOCS.write_text(f"{table(outcomes)}\n{TITLE}{DOCS.read_text().partition(TITLE)[2]}")
    written = DOCS.read_text().splitlines()
    if not any(line.startswith("torch ") and line.endswith(f"{VERSION}.") for line in written):
        pytest.skip("the table is of another version of transformers")
    for name, outcome in outcomes.items():
        verdict = row(name, outcome).rpartition(" | ")[0].rpartition(" | ")[0]  # the numbers may differ
        assert any(line.startswith(verdict) for line in written), verdict


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        slow = pytest.mark.slow
        metafunc.parametrize("name", [pytest.param(n, marks=() if n in QUICK else slow) for n in MODELS])


def run(pool: Pool, name: str) -> Outcome:
    model = build_model(name)
    batch = batch_of(LENGTHS)
    trains = name not in RECIPES or RECIPES[name].attention != "flex_attention"  # torch has no flex backward on CPU
    model.requires_grad_(trains)
    sharding = sharding_of(2, name)
    torch._dynamo.reset()
    report = cp.explain(model, sharding, shift_labels=True)(**batch)
    masks = tuple(dict.fromkeys(site.mask for site in report.sites))
    if not report.ok:
        return Outcome(masks, tuple(dict.fromkeys(refusal.reason.name for refusal in report.refusals)))
    batches = [batch_of(lengths) for lengths in (ACROSS if name in BY_LENGTH else [LENGTHS])]
    found, others = pool.run(2, sharded_steps, name, batches, trains)
    pairs = [(step(model, each, trains), ours) for each, ours in zip(batches, found, strict=True)]
    assert [total for total, _ in found] == [total for total, _ in others]
    errors = {
        key: max(difference(ours[key], grads[key], grads) for (_, grads), (_, ours) in pairs) for key in found[0][1]
    }
    worst = max(errors, key=errors.__getitem__, default="")
    sums = [collective.bytes for collective in report.collectives if collective.bytes]
    text = f"{len(sums)} of {sum(sums)} bytes" if sums else "–"
    loss = max(abs(total - loss) / abs(loss) for (loss, _), (total, _) in pairs)
    return Outcome(masks, (), loss, errors.get(worst), worst, text)


def packing_of(name: str) -> Any:
    return cp.EndOfDocument("input_ids", END) if name == "torchtitan_eos_mask" else cp.PositionIds("position_ids")


def sharding_of(mesh: Any, name: str) -> cp.Sharding:
    return cp.Sharding(mesh, TOKENS, packing_of(name), inner="eager", across_documents=True)


def batch_of(lengths: list[list[int]]) -> dict[str, Tensor]:
    """Documents whose last token is END, and no other."""
    batch = make_batch(lengths)
    last = batch["position_ids"].roll(-1, 1) == 0
    return batch | {"input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == END, 3).masked_fill(last, END)}


def step(model: nn.Module, batch: dict[str, Tensor], trains: bool) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss: Tensor = model(**batch).loss
    if trains:
        loss.backward()
    return float(loss.detach()), gradients_of(model)


def sharded_steps(mesh: DeviceMesh, name: str, batches: list[dict[str, Tensor]], trains: bool) -> list[Any]:
    sharding = sharding_of(mesh, name)
    torch._dynamo.reset()
    model = build_model(name).requires_grad_(trains)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    found: list[Any] = []
    for batch in batches:
        model.zero_grad()
        with sharding.shard(batch, shift_labels=True) as local:
            loss = compiled(**local).loss
        if trains:
            loss.backward()
            cp.sum_gradients(model.parameters(), sharding)
        total = loss.detach().clone()
        if is_part(loss):
            torch.distributed.all_reduce(total, group=sharding.group)
        found.append((float(total), gradients_of(model)))
    return found


def difference(actual: Tensor, expected: Tensor, grads: dict[str, Tensor]) -> float:
    """Relative norm error of one of these gradients."""
    return check.difference(actual, expected, floor_of(grads.values()))


def row(name: str, outcome: Outcome) -> str:
    attention = RECIPES[name].attention.removesuffix("_attention") if name in RECIPES else "sdpa"
    verdict = f"refused: {REFUSED[name][0]}: {REFUSED[name][1]}" if outcome.refused else "right"
    gradient = "not checked" if outcome.gradient is None else f"{outcome.gradient:.0e}"
    numbers = "– | –" if outcome.refused else f"{outcome.loss:.0e} | {gradient}"
    return f"| {name} | {attention} | {', '.join(outcome.masks) or '–'} | {verdict} | {outcome.sums} | {numbers} |"


def table(outcomes: dict[str, Outcome]) -> str:
    versions = f"torch {torch.__version__.split('+')[0]}, {VERSION}"
    lines = [
        "# Models",
        "",
        "Written by `tests/end_to_end/test_models.py`. Each model has a small config and random weights, in fp32,",
        f"and takes a packed row of documents of {LENGTHS[0]} tokens with `position_ids` (torchtitan's",
        "EOS mask: with an end token behind each, and `EndOfDocument`). *Right* means: on 2",
        "processes loss and every gradient equal those of one process; the last columns hold the largest relative",
        "differences (the limit is 1e-5). *Over ranks*: sums for means and statistics",
        "over tokens, and reads of neighbouring rows for convolutions.",
        f"{versions}.",
        "",
        "torch has no backward of flex_attention on CPUs: only the loss is compared there. transformers' masks ignore",
        "`position_ids` in gpt-oss and in models that are not causal (ModernBERT): the whole row is one document, on",
        "one process too, which `across_documents=True` allows here.",
        "",
        "*longrope*, *dynamic*: RoPE that changes beyond 16 positions, in batches on both sides of that, by one graph.",
        "",
        "Encoders (BERT, RoBERTa, EuroBERT, ESM, ModernBERT, ELECTRA, DistilBERT) and heads that classify tokens or",
        "sequences, reward heads too, are compared on 2, 3 and 4 processes by `tests/end_to_end/test_heads.py`.",
        "",
        "| model | attention | masks proven | outcome | over ranks | loss | gradient |",
        "|---|---|---|---|---|---|---|",
        *(row(name, outcomes[name]) for name in MODELS),
    ]
    return "\n".join(lines) + "\n"
