"""Trainers' batches on two ranks beside `model(batch)` on one process, loss and all gradients. `tests/sweep/trainer.py`
has what a model is called with, of every class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.integrations.forward import GlobalForward, Switch
from tests.helpers.one_process import gradients_of
from tests.helpers.pool import Pool
from tests.sweep.configs import class_of, small_config

from .runs import sharding_of

PAD = 0
NAMES = {
    "whole": ["RobertaForMaskedLM", "CamembertForMaskedLM", "RobertaForCausalLM"],
    "padded": ["LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM", "EsmForMaskedLM"],
    "padded experts": [
        *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "PhimoeForCausalLM", "GptOssForCausalLM")
    ],
    "packed": ["MixtralForCausalLM"],
    "padded classes": ["LlamaForSequenceClassification", "BertForSequenceClassification"],
    "padded, both ways": ["ElectraForCausalLM", "GPT2LMHeadModel"],
    "choices": ["RobertaForMultipleChoice"],
    "padded choices": ["BertForMultipleChoice", "DistilBertForMultipleChoice"],
}
"""Positions from `padding_idx` on, experts whose loss takes in all tokens, and models beside which these would show."""


def batch_of(kind: str) -> dict[str, Tensor]:
    """Rows of 21 tokens: whole ones; padded ones with a mask; or documents by their positions."""
    ids = torch.randint(5, 40, (2, 21), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind.startswith("padded"):
        shown = torch.arange(21) < torch.tensor([[11], [21]])
        ids[~shown], batch["labels"][~shown] = PAD, -100
        batch["attention_mask"] = shown.long()
        batch["labels"] = torch.tensor([1, 0]) if kind == "padded classes" else batch["labels"]
    elif kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (8, 1, 12)]).expand(2, 21)
        batch["position_ids"], batch["labels"] = positions, ids.masked_fill(positions == 0, -100)
    if kind.endswith("choices"):
        batch = {name: torch.stack([value, value.flip(0), value], 1) for name, value in batch.items()}
        batch["input_ids"][:, 2, 3] = 5
        batch["labels"] = torch.tensor([1, 2])
    return batch


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    kind = class_of(name)
    config = small_config(kind.config_class)
    config.pad_token_id = PAD if config.pad_token_id is None else config.pad_token_id
    if hasattr(config, "output_router_logits"):
        config.output_router_logits, config.router_aux_loss_coef = True, 0.3
    return kind(config).eval()


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), gradients_of(model)


def on_ranks(mesh: DeviceMesh, names: list[str], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        torch._dynamo.reset()
        model = model_of(name)
        sharding = sharding_of(mesh)
        if kind.endswith("choices"):
            sharding = replace(sharding, tokens=dict.fromkeys(sharding.tokens, 2))
        GlobalForward(model, sharding, Switch(on=True, loss_only=True)).install()
        loss, grads = step(model, batch_of(kind))
        for grad in grads.values():
            torch.distributed.all_reduce(grad, group=mesh.get_group())
        found[name] = loss, {key: (grad / mesh.size()).numpy() for key, grad in grads.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(x, marks=[pytest.mark.sweep] * ("experts" in x)) for x in NAMES])
def test_a_trainers_batch_is_as_on_one_process(pool: Pool, kind: str) -> None:
    for results in pool.run(2, on_ranks, NAMES[kind], kind):
        for name, found in results.items():
            loss, grads = step(model_of(name), batch_of(kind))
            assert found[0] == pytest.approx(loss, rel=1e-6), name
            assert found[1].keys() == grads.keys(), name
            least = 1e-3 * max(float(grad.norm()) for grad in grads.values())  # biases of keys have none
            for key, grad in grads.items():
                error = float((torch.from_numpy(found[1][key]) - grad).norm()) / max(float(grad.norm()), least)
                assert error <= 1e-4, f"{name} {key}: {error:.1e}"


def logits_on_ranks(mesh: DeviceMesh) -> tuple[Any, Any]:
    torch._dynamo.reset()
    model = model_of("LlamaForCausalLM")
    GlobalForward(model, sharding_of(mesh), Switch(on=True, loss_only=True)).install()
    logits = model(input_ids=batch_of("whole")["input_ids"]).logits
    logits.square().mean().backward()
    return logits.detach().numpy(), model.lm_head.weight.grad.numpy()


@pytest.mark.slow
def test_a_loss_outside_of_the_model_gets_all_logits_on_every_rank(pool: Pool) -> None:
    """There are 21 tokens, so that one of two ranks has a row without one."""
    model = model_of("LlamaForCausalLM")
    logits = model(input_ids=batch_of("whole")["input_ids"]).logits
    logits.square().mean().backward()
    found = pool.run(2, logits_on_ranks)
    for ours, _ in found:
        torch.testing.assert_close(torch.from_numpy(ours), logits.detach(), rtol=1e-5, atol=1e-5)
    mean = torch.stack([torch.from_numpy(grad) for _, grad in found]).mean(0)
    torch.testing.assert_close(mean, model.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
