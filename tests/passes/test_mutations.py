"""Models that look right and are not the same on a shard: each is refused with its reason, or made right."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.marks import is_part
from tests.helpers.packed_model import TOKENS, Verdict, judge, packed_batch
from tests.helpers.pool import Pool
from tests.passes.mutants import MUTANTS
from tests.passes.mutants.beside import build, groups, is_of

pytestmark = pytest.mark.long

REFUSED = sorted(name for name, mutant in MUTANTS.items() if mutant.reason not in (None, "padding"))
PADDING = sorted(name for name, mutant in MUTANTS.items() if mutant.reason == "padding")
RIGHT = sorted(name for name, mutant in MUTANTS.items() if mutant.reason is None)
GROUPS = groups(REFUSED)
ANNOTATED = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), "head_tail", across_documents=True)


@functools.cache
def verdict_of(names: tuple[str, ...]) -> Verdict:
    batch = packed_batch(getattr(MUTANTS[names[0]], "rows", 1))
    return judge(build(names), batch)


def check_refused(name: str, verdict: Verdict) -> None:
    named = [refusal for refusal in verdict.refusals if is_of(name, refusal.node)]
    assert any(refusal.reason.name.startswith(MUTANTS[name].reason or "") for refusal in named), str(verdict)


def in_turns(names: list[str]) -> list[Any]:
    """The names; of two groups of three the tests are slow."""
    groups = list(dict.fromkeys(GROUPS[name] for name in names))
    slow = {*groups} - {*groups[::3]}
    return [pytest.param(name, marks=pytest.mark.slow if GROUPS[name] in slow else ()) for name in names]


@pytest.mark.parametrize(
    "name", in_turns([name for name in REFUSED if not getattr(MUTANTS[name], "bakes_size", False)])
)
def test_mutant_is_refused_with_its_reason_and_line(name: str) -> None:
    check_refused(name, verdict_of(GROUPS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in REFUSED if len(GROUPS[name]) > 1 and not getattr(MUTANTS[name], "bakes_size", False)]
)
def test_mutant_alone_is_refused(name: str) -> None:
    check_refused(name, verdict_of((name,)))


@pytest.mark.parametrize("name", [name for name in REFUSED if getattr(MUTANTS[name], "bakes_size", False)])
def test_mutant_that_fixes_the_token_count_is_refused(name: str) -> None:
    mutant = MUTANTS[name]
    report = cp.explain(mutant(), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed_batch())
    assert any(r.reason is cp.Reason.TOKEN_COUNT and mutant.line in r.detail for r in report.refusals), str(report)


def total_loss(output: Any) -> Tensor:
    total: Any = sum(output) if isinstance(output, tuple) else output
    return total


def whole(output: Any, sharding: cp.Sharding) -> float:
    """The loss of all ranks: outputs that are this rank's part are added up."""
    found = 0.0
    for value in output if isinstance(output, tuple) else (output,):
        total = value.detach().clone()
        if is_part(value):
            torch.distributed.all_reduce(total, group=sharding.group)
        found += total.item()
    return found


def sharded_step(mesh: DeviceMesh, names: tuple[str, ...], batch: dict[str, Tensor]) -> tuple[float, dict[str, Any]]:
    sharding = cp.Sharding(
        mesh, TOKENS, cp.DocumentIds("doc_ids"), "head_tail", "all_gather", inner="eager", across_documents=True
    )
    model = build(names)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        output = compiled(**local)
        total_loss(output).backward()
    cp.sum_gradients(model.parameters(), sharding)
    return whole(output, sharding), {k: p.grad.numpy() for k, p in model.named_parameters() if p.grad is not None}


RIGHT_GROUPS = sorted(set(groups(RIGHT).values()))


@pytest.mark.shared
@pytest.mark.parametrize("names", [names for names in RIGHT_GROUPS if len(names) > 1], ids="+".join)
def test_mutants_are_made_right(pool: Pool, names: tuple[str, ...]) -> None:
    check_right(pool, names, packed_batch(getattr(MUTANTS[names[0]], "rows", 1)))


@pytest.mark.shared
@pytest.mark.parametrize("name", [names[0] for names in RIGHT_GROUPS if len(names) == 1])
def test_mutant_is_made_right(name: str) -> None:
    check_on_threads(name, packed_batch(getattr(MUTANTS[name], "rows", 1)))


def check_on_threads(name: str, batch: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    sharding = ANNOTATED
    report = cp.check(MUTANTS[name](), sharding, batch)
    assert report.largest <= 1e-5, str(report)


def check_right(pool: Pool, names: tuple[str, ...], batch: dict[str, Tensor]) -> None:
    """Two ranks have the loss and gradients of one process."""
    model = build(names)
    loss = total_loss(model(**batch))
    loss.backward()
    for total, grads in pool.run(2, sharded_step, names, batch):
        assert total == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(torch.from_numpy(grads[key]), parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PADDING)
def test_mutant_counts_no_row_without_a_token(name: str) -> None:
    mutant = MUTANTS[name]
    verdict = judge(mutant())
    assert not verdict.refusals
    assert any(mutant.line in (insert.node.stack_trace or "") for insert in verdict.locality.inserts)
    batch = packed_batch(tokens=13)
    check_on_threads(name, batch | {"labels": batch["labels"].clamp(min=0)})


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_mutant_is_refused_or_right_where_sums_are_resolved(pool: Pool, name: str) -> None:
    batch = packed_batch(getattr(MUTANTS[name], "rows", 1))
    sharding = replace(ANNOTATED, exchange="all_gather")
    torch._dynamo.reset()
    try:
        report = cp.explain(MUTANTS[name](), sharding)(**batch)
    except ValueError as error:
        pytest.skip(f"no such batch: {error}")
    if report.ok:
        check_right(pool, (name,), batch)


def test_there_are_enough_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\n{len(MUTANTS)} mutants: {len(REFUSED)} refused when compiled, "
            f"{len(PADDING)} masked, {len(RIGHT)} made right"
        )
    assert len(MUTANTS) >= 190
