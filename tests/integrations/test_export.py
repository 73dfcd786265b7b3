"""torch.export beside context parallelism: the plain model goes through, and what does not says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model

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


def test_an_exported_model_is_not_compiled_and_says_what_is() -> None:
    exported = torch.export.export(build_model("tiny"), (), BATCH, dynamic_shapes=SIZES).module()
    with pytest.raises(Unsupported) as raised:
        cp.explain(exported, SHARDING)(**BATCH)
    assert "compile the model itself" in " ".join(raised.value.__notes__)


def test_a_model_that_runs_sharded_is_not_exported() -> None:
    model = cp.context_parallel(SHARDING)(build_model("tiny"))
    with pytest.raises(RuntimeError, match="export the plain model"):
        torch.export.export(model, (), BATCH)
