"""Models that look right and are not the same on a shard: each is refused with its reason, or made right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.packed_model import TOKENS, judge, packed_batch
from tests.helpers.pool import Pool
from tests.passes.mutants import MUTANTS

REFUSED = sorted(name for name, mutant in MUTANTS.items() if mutant.reason not in (None, "padding"))
PADDING = sorted(name for name, mutant in MUTANTS.items() if mutant.reason == "padding")
RIGHT = sorted(name for name, mutant in MUTANTS.items() if mutant.reason is None)


@pytest.mark.parametrize(
    "dynamic", [pytest.param(True, id="dynamic"), pytest.param(False, id="static", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", REFUSED)
def test_mutant_is_refused_with_its_reason_and_line(name: str, dynamic: bool) -> None:
    mutant = MUTANTS[name]
    if not dynamic and getattr(mutant, "dynamic_only", False):
        pytest.skip("a number computed from a fixed token count can't be told from a constant")
    batch = packed_batch(getattr(mutant, "rows", 1))
    if dynamic and getattr(mutant, "bakes_size", False):
        report = cp.explain(mutant(), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**batch)
        assert any(r.reason is cp.Reason.TOKEN_COUNT and mutant.line in r.detail for r in report.refusals), str(report)
        return
    verdict = judge(mutant(), batch, dynamic=dynamic, tables=True, padded_sums=True)
    named = [r for r in verdict.refusals if mutant.line in (r.node.stack_trace or "" if r.node else "")]
    assert any(refusal.reason.name.startswith(mutant.reason or "") for refusal in named), str(verdict)


def sharded_step(mesh: DeviceMesh, name: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Any]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), "head_tail", "all_gather", inner="eager")
    model = MUTANTS[name]()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        loss = compiled(**local)
        loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=sharding.group)
    return total.item(), {key: p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", RIGHT)
def test_mutant_is_made_right(pool: Pool, name: str) -> None:
    mutant = MUTANTS[name]
    batch = packed_batch(getattr(mutant, "rows", 1))
    assert not judge(mutant(), batch, tables=True, padded_sums=True).refusals
    model = mutant()
    loss = model(**batch)
    loss.backward()
    for total, grads in pool.run(2, sharded_step, name, batch):
        assert total == pytest.approx(loss.item(), rel=1e-5)
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(torch.from_numpy(grads[key]), parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PADDING)
def test_mutant_is_refused_where_ranks_have_rows_without_a_token(pool: Pool, name: str) -> None:
    mutant = MUTANTS[name]
    verdict = judge(mutant(), tables=True, padded_sums=True)
    assert not verdict.refusals
    assert any(mutant.line in (node.stack_trace or "") for node in verdict.locality.padded_sums)
    with pytest.raises(AssertionError, match="sums over tokens"):
        pool.run(2, sharded_step, name, packed_batch(tokens=13))


def test_there_are_enough_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\n{len(MUTANTS)} mutants: {len(REFUSED)} refused when compiled, "
            f"{len(PADDING)} at run time, {len(RIGHT)} made right"
        )
    assert len(MUTANTS) >= 190
