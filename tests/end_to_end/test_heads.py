"""Encoders of transformers, and heads that classify tokens or sequences: as on one process, with no word of the user.

Their mean losses are summed over ranks, and the tokens that a head reads come from the ranks that have them. Their
masks ignore `position_ids` where they are not causal: the whole row is one document, on one process too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import LIMIT, make_batch
from tests.end_to_end.test_models import difference
from tests.helpers.models import SMALL
from tests.helpers.pool import Pool

CLASSES = 5
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout", "dropout"), 0.0
) | {"classifier_dropout": 0.0, "mlp_dropout": 0.0}
ESM = {"position_embedding_type": "rotary", "mask_token_id": 5}
HEADS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama tokens": ("Llama", "ForTokenClassification", {}),
    "llama sequences": ("Llama", "ForSequenceClassification", {}),
    "llama reward": ("Llama", "ForSequenceClassification", {"num_labels": 1}),
    "bert": ("Bert", "ForMaskedLM", {}),
    "bert sequences": ("Bert", "ForSequenceClassification", {}),
    "roberta": ("Roberta", "ForMaskedLM", {}),
    "roberta tokens": ("Roberta", "ForTokenClassification", {}),
    "eurobert": ("EuroBert", "ForMaskedLM", {"mask_token_id": 5}),
    "eurobert sequences": ("EuroBert", "ForSequenceClassification", {"mask_token_id": 5}),
    "esm": ("Esm", "ForMaskedLM", {**ESM, "token_dropout": False}),
    "esm that scales by masked tokens": ("Esm", "ForMaskedLM", {**ESM, "token_dropout": True}),
    "modernbert sequences": ("ModernBert", "ForSequenceClassification", {"cls_token_id": 1, "sep_token_id": 2}),
    "electra": ("Electra", "ForMaskedLM", {"embedding_size": 32}),
    "distilbert": ("DistilBert", "ForMaskedLM", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48}),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    transformers: Any = importlib.import_module("transformers")
    family, head, options = HEADS[name]
    given = {**SMALL, **NO_DROPOUT, "num_labels": CLASSES, **options}
    config = getattr(transformers, f"{family}Config")(**given, attn_implementation="sdpa")
    return getattr(transformers, family + head)(config)


def batch_of(name: str, rows: int, tokens: int) -> dict[str, Tensor]:
    """Rows of two documents each, in each row of other lengths; their labels are as the head wants them."""
    batch = make_batch([[tokens - 5 - i, 5 + i] for i in range(rows)])
    head = HEADS[name][1]
    if head == "ForTokenClassification":
        batch["labels"] = batch["labels"] % CLASSES
    if head == "ForSequenceClassification":
        batch["labels"] = torch.arange(rows) % CLASSES
    if HEADS[name][2].get("num_labels") == 1:
        batch["labels"] = batch["labels"].float()
    return batch


def tokens_of(name: str) -> dict[str, int]:
    of_rows = HEADS[name][1] == "ForSequenceClassification"
    return {"input_ids": 1, "position_ids": 1} | ({} if of_rows else {"labels": 1})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def sharded_step(mesh: DeviceMesh, name: str, batch: dict[str, Tensor], layout: Any) -> tuple[float, Any]:
    sharding = cp.Sharding(
        mesh, tokens_of(name), cp.PositionIds("position_ids"), layout, inner="eager", across_documents=True
    )
    torch._dynamo.reset()
    model = build(name)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        loss = compiled(**local).loss
        total = sharding.whole(loss).item()
    loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    return total, gradients(model)


def compare(pool: Pool, name: str, ranks: int, layout: str, rows: int, tokens: int) -> None:
    batch, model = batch_of(name, rows, tokens), build(name)
    loss = model(**batch).loss
    loss.backward()
    expected = gradients(model)
    for found, grads in pool.run(ranks, sharded_step, name, batch, layout):
        assert found == pytest.approx(loss.item(), rel=LIMIT)
        assert grads.keys() == expected.keys()
        largest = max(float(grad.norm()) for grad in expected.values())
        for key, grad in expected.items():
            if float(grad.norm()) < LIMIT * largest:  # zero in exact arithmetic, as of the bias of keys
                assert float(grads[key].norm()) < LIMIT * largest, key
            else:
                assert difference(grads[key], grad, expected) < LIMIT, key


@pytest.mark.slow
def test_a_head_of_sequences_is_that_of_one_process(pool: Pool) -> None:
    compare(pool, "llama sequences", 2, "balanced", 1, 13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "rows", "tokens"), [(2, "balanced", 2, 21), (3, "contiguous", 1, 22), (4, "head_tail", 2, 23)]
)
@pytest.mark.parametrize("name", HEADS)
def test_heads_and_encoders_are_those_of_one_process(
    pool: Pool, name: str, ranks: int, layout: str, rows: int, tokens: int
) -> None:
    compare(pool, name, ranks, layout, rows, tokens)
