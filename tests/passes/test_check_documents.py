"""Attention that sees more than the packing tells apart: refused where a batch has it, unless it is meant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite import Reason

TOKENS = {"x": 1, "pos": 1}
SHARDING = cp.Sharding(2, TOKENS, cp.PositionIds("pos"))
TREE = cp.Sharding(2, {"x": 1, "prompt": 1, "answer": 1}, cp.Tree("prompt", completion="answer"))


def no_mask(x: Tensor, **_: Tensor) -> Tensor:
    h = x[:, None]
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)


def windows(x: Tensor, **_: Tensor) -> Tensor:
    h, i = x[:, None], torch.arange(x.shape[1])
    return F.scaled_dot_product_attention(h, h, h, (i[:, None] >= i) & (i[:, None] - i < 3))


def prompts(x: Tensor, prompt: Tensor, answer: Tensor) -> Tensor:
    """Keeps prompts apart, and not the answers behind one."""
    h = x[:, None]
    return F.scaled_dot_product_attention(h, h, h, (prompt[:, :, None] == prompt[:, None]).tril()[:, None])


def packed(*lengths: int) -> dict[str, Tensor]:
    pos = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"x": torch.randn(1, pos.shape[1], 4), "pos": pos}


def tree(*answers: int) -> dict[str, Tensor]:
    answer = torch.tensor(answers)[None]
    return {"x": torch.randn(*answer.shape, 4), "prompt": torch.zeros_like(answer), "answer": answer}


def reasons(model: Any, sharding: cp.Sharding, batch: dict[str, Tensor]) -> set[Reason]:
    torch._dynamo.reset()
    return {refusal.reason for refusal in cp.explain(model, sharding)(**batch).refusals}


SEEN = {Reason.DOCUMENTS_SEEN}


def test_whole_rows_are_refused_where_they_hold_documents() -> None:
    for model in (no_mask, windows):
        assert reasons(model, SHARDING, packed(9, 7)) == SEEN
        assert reasons(model, SHARDING, packed(16)) == set()
        assert reasons(model, replace(SHARDING, across_documents=True), packed(9, 7)) == set()
    assert reasons(no_mask, replace(SHARDING, packing=cp.WholeRows()), packed(9, 7)) == set()
    assert reasons(no_mask, replace(SHARDING, assume_mask=cp.PackedMask(packed=False)), packed(9, 7)) == set()
    captured = replace(SHARDING, capacity=cp.Capacity(8, 8, 64))
    assert reasons(no_mask, captured, packed(16)) == SEEN  # steps that are replayed check no batch


def test_trees_need_a_mask_of_paths() -> None:
    branches, chain = tree(0, 0, 1, 1, 2, 2), tree(0, 0, 1, 1, 1, 1)
    for model in (no_mask, prompts):
        assert reasons(model, TREE, branches) == SEEN
        assert reasons(model, TREE, chain) == set()
        assert reasons(model, replace(TREE, across_documents=True), branches) == set()


def test_a_later_batch_is_refused_too() -> None:
    sharding = replace(SHARDING, mesh=1, inner="eager")
    torch._dynamo.reset()
    compiled = torch.compile(no_mask, backend=cp.backend(sharding), fullgraph=True)
    batch = packed(16)
    with sharding.shard(batch) as local:
        torch.testing.assert_close(sharding.unshard(compiled(**local), 2), no_mask(**batch))
    with sharding.shard(packed(9, 7)) as local, pytest.raises(cp.RewriteRefused, match="DOCUMENTS_SEEN"):
        compiled(**local)


def test_a_cache_of_transformers_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config)
    ids = packed(9, 7)["pos"]
    batch = {"input_ids": ids, "position_ids": ids}
    sharding = replace(SHARDING, tokens=dict.fromkeys(batch, 1), packing=cp.PositionIds("position_ids"))
    torch._dynamo.reset()
    (refusal,) = cp.explain(model, sharding)(**batch).refusals
    assert refusal.reason is Reason.DOCUMENTS_SEEN
    assert "use_cache=False" in str(refusal)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(Exception, match="incompatible with gradient checkpointing") as raised:
        cp.explain(model.train(), sharding)(**batch)
    assert "pass use_cache=False" in " ".join(raised.value.__notes__)
    model.config.use_cache = False
    assert cp.explain(model, sharding)(**batch).ok


def test_dry_runs_do_not_count_as_compiles() -> None:
    torch._dynamo.reset()
    for _ in range(9):  # Dynamo compiles a function 8 times at most
        assert cp.explain(no_mask, SHARDING)(**packed(16)).ok
