"""torch.export beside context parallelism: before and after it, and what does not go through says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

BATCH = make_batch([[13, 1, 7, 11]])
SHARDING = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), inner="eager")
SIZES = {name: {1: torch.export.Dim.AUTO} for name in BATCH}


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=cp.backend(SHARDING), fullgraph=True)


def test_the_plain_model_is_exported_beside_the_compiled_one() -> None:
    model = build_model("tiny")
    compiled(model)
    program: Any = torch.export.export(model, (), BATCH, dynamic_shapes=SIZES).module()
    rows = make_batch([[5, 30, 2]])
    torch.testing.assert_close(program(**rows).loss, model(**rows).loss)


def exported(sizes: Any) -> Any:
    return torch.export.export(build_model("tiny"), (), BATCH, dynamic_shapes=sizes).module()


def test_an_exported_model_is_proven_or_refused_as_the_model_is() -> None:
    """Refusals reach the caller, past the handlers that torch.export's modules have."""
    model = exported(SIZES)
    assert cp.explain(model, SHARDING)(**BATCH).ok
    wrong = cp.Sharding(2, TOKENS, cp.StartOfDocument("input_ids", 3), inner="eager")
    torch._dynamo.reset()
    run = torch.compile(model, backend=cp.backend(wrong), fullgraph=True)
    with pytest.raises(cp.RewriteRefused) as raised, wrong.shard(BATCH) as local:
        run(**local)
    assert [refusal.reason for refusal in raised.value.refusals] == [cp.Reason.MASK_WRONG_SOURCE]


def test_an_exported_model_of_fixed_sizes_says_what_to_do() -> None:
    model = exported(None)
    assert "dynamic_shapes" in str(cp.explain(model, SHARDING)(**BATCH))
    with pytest.raises(cp.RewriteRefused, match="dynamic_shapes"), SHARDING.shard(BATCH) as local:
        compiled(model)(**local)


def steps(mesh: DeviceMesh) -> list[tuple[float, float]]:
    """Relative differences of loss and gradients of an exported model and the model itself, for rows of three sizes."""
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager")
    model, alone = exported(SIZES), build_model("tiny")
    torch._dynamo.reset()
    run, found = torch.compile(model, backend=cp.backend(sharding), fullgraph=True), list[tuple[float, float]]()
    for rows in (BATCH, make_batch([[5, 30, 2]]), make_batch([[50, 31, 3, 3]])):
        with sharding.shard(rows) as local:
            loss = run(**local).loss
        loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        expected = alone(**rows).loss
        expected.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        errors = [_error(gradients[name], weight.grad) for name, weight in alone.named_parameters()]
        found.append((_error(loss, expected), max(errors)))
        model.zero_grad()
        alone.zero_grad()
    return found


def _error(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow
def test_an_exported_model_trains_as_on_one_process(pair: Pool) -> None:
    for found in pair.run(2, steps):
        assert all(loss <= 1e-6 and gradient <= 1e-5 for loss, gradient in found)


def test_a_model_that_runs_sharded_is_not_exported() -> None:
    model = cp.context_parallel(SHARDING)(build_model("tiny"))
    with pytest.raises(RuntimeError, match="export the plain model"):
        torch.export.export(model, (), BATCH)
