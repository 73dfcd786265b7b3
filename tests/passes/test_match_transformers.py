"""Masks that transformers makes."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason, Refusal
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from cp_rewrite.passes.values.state import Site
from tests.helpers.matching import BATCH, match_model, reasons, the_site
from tests.passes.mask_spellings import POSITIONS, capture

pytestmark = pytest.mark.long


def llama(layers: int, family: str = "Llama", **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attn_implementation="sdpa", **options,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config)


TOKENS = {"input_ids": 1, "position_ids": 1}


def packed_batch() -> dict[str, Any]:
    return {k: BATCH[k] for k in TOKENS} | {"use_cache": False}


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("Llama", {}, PackedMask()),
        pytest.param("Mistral", {"sliding_window": 5}, PackedMask(window=(4, 0)), marks=pytest.mark.slow),
        ("Qwen3", {"head_dim": 8}, PackedMask()),
    ],
)
def test_transformers_packed(family: str, options: Any, expected: PackedMask) -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    model = llama(2, family, **options).eval()
    found = match_model(model, sharding, batch=packed_batch())
    assert [f.mask for f in found if isinstance(f, Site)] == [expected] * 2, found
    assert all(f.key.meta["example_value"].shape[1] == 2 for f in found if isinstance(f, Site))


def test_transformers_without_positions_sees_one_document() -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    batch = {"input_ids": BATCH["input_ids"], "use_cache": False}
    site = the_site(llama(1), sharding, batch=batch)
    assert site.mask == PackedMask(packed=False)


def test_transformers_four_dim_mask_is_opaque() -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    batch = packed_batch() | {"attention_mask": torch.ones(2, 1, 12, 12, dtype=torch.bool)}
    assert reasons(llama(1), sharding, batch=batch) == {Reason.MASK_OPAQUE}


def every_fifth_key(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k % 5 == 0) & (q < k)


@pytest.mark.parametrize(
    ("given", "packing", "reason", "file", "code"),
    [
        (
            every_fifth_key, POSITIONS, Reason.MASK_NOT_PACKED,
            "test_match_transformers.py", "return (k % 5 == 0) & (q < k)",
        ),
        (
            None, cp.DocumentIds("doc_ids"), Reason.MASK_WRONG_SOURCE,
            "modeling_llama.py", "causal_mask = create_causal_mask(",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_line_that_makes_the_mask(
    given: Any, packing: Any, reason: Reason, file: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function that a mask of transformers was given, else the model's line that asks for the mask."""
    model = llama(1).eval()
    modeling: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    if given is not None:
        plain = modeling.create_causal_mask
        monkeypatch.setattr(modeling, "create_causal_mask", lambda **kw: plain(**kw, or_mask_function=given))
    sharding = cp.Sharding(2, {**TOKENS, "doc_ids": 1}, packing)
    (refusal,) = match_model(model, sharding, batch=packed_batch())
    assert isinstance(refusal, Refusal)
    assert refusal.reason is reason
    assert file in refusal.where
    assert refusal.where.endswith(f"`{code}`")


@pytest.mark.slow
def test_matching_32_layers_costs_little_more_than_four_times_8() -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)

    def seconds(layers: int) -> float:
        gm = capture(llama(layers), packed_batch(), dynamic=None)
        tokens = TokenAxis.read(gm, sharding).unified()
        match_sites(gm, sharding, tokens)
        start = time.process_time()
        assert len(match_sites(gm, sharding, tokens).sites) == layers
        return time.process_time() - start

    assert seconds(32) < 8 * min(seconds(8), seconds(8))
