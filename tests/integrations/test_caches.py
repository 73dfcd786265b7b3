"""A second run of a program reads what torch's caches hold of the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_other_lengths_do_not() -> None:
    def steps() -> Any:
        torch._dynamo.reset()
        counters.clear()
        model = build_model("llama")
        sharding = cp.Sharding(1, TOKENS, cp.PositionIds("position_ids"))
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        for lengths in ([[13, 1, 7, 11]], [[5, 3, 9]]):
            with sharding.shard(make_batch(lengths), shift_labels=True) as local:
                compiled(**local).loss.backward()
        found = counters["aot_autograd"]
        assert counters["stats"]["unique_graphs"] == 1
        assert not found["autograd_cache_bypass"]
        return found["autograd_cache_miss"], found["autograd_cache_hit"]

    with fresh_cache():  # what is before the layers, a layer, what is behind them
        assert steps() == (3, 0)
        assert steps() == (0, 3)
