"""Token locality of models from transformers, and what the check costs on a long one."""

from __future__ import annotations

import time

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.locality.walk import check_locality
from cp_rewrite.passes.match.find_sites import match_sites
from tests.helpers.packed_model import capture, judge

pytestmark = pytest.mark.long


def transformers_model(family: str, layers: int) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
        **({"sliding_window": 8} if family == "Mistral" else {}),
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def transformers_batch(tokens: int = 48) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (1, tokens))
    positions = torch.cat([torch.arange(tokens - 20), torch.arange(20)])[None]
    labels = {"labels": ids, "shift_labels": ids.clone()}
    return {"input_ids": ids, "position_ids": positions, **labels, "num_items_in_batch": torch.tensor(40.0)}


TRANSFORMERS = cp.Sharding(
    4, {"input_ids": 1, "position_ids": 1, "labels": 1, "shift_labels": 1}, cp.PositionIds("position_ids")
)


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Mistral")), "Mixtral"]
)
def test_transformers_models_are_proven(family: str) -> None:
    verdict = judge(transformers_model(family, 2), transformers_batch(), TRANSFORMERS)
    assert not verdict.refusals, str(verdict)
    assert len(verdict.sites) == 2


def test_transformers_loss_without_shift_labels_is_refused_with_the_hint() -> None:
    batch = transformers_batch()
    del batch["shift_labels"]
    sharding = cp.Sharding(4, {"input_ids": 1, "position_ids": 1, "labels": 1}, cp.PositionIds("position_ids"))
    verdict = judge(transformers_model("Llama", 1), batch, sharding)
    assert verdict.reasons == {"TOKEN_MIXING"}
    assert "shift_labels=True" in str(verdict)


@pytest.mark.slow
def test_the_proof_of_64_layers_costs_little_more_than_four_times_that_of_16() -> None:
    def look(gm: fx.GraphModule) -> float:
        tokens = TokenAxis.read(gm, TRANSFORMERS).unified()
        sites = match_sites(gm, TRANSFORMERS, tokens).sites
        start = time.process_time()
        report = check_locality(gm, TRANSFORMERS, sites, tokens)
        assert not report.refusals
        return time.process_time() - start

    def seconds(layers: int) -> float:
        return capture(transformers_model("Llama", layers), transformers_batch(), look, dict(TRANSFORMERS.tokens))

    seconds(1)  # imports and caches
    assert seconds(64) < 6 * min(seconds(16), seconds(16))
