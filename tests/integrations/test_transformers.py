"""The context-parallel Trainer on gloo processes against transformers' own on one: what is logged, and all weights."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import EvalPrediction, Trainer, TrainingArguments

from cp_rewrite.integrations.transformers import ContextParallelTrainer
from cp_rewrite.torch_internals import shards_over_some
from tests.experts.test_choose import QUICK
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

from .runs import FSDP, Run, compare, grid_of, launched, on_cpu, settings_of, sharding_of, trained

LENGTHS = ((13, 1, 29, 18), (7, 20, 34), (60, 1), (31, 30), (5, 5, 5, 5, 41), (2, 59), (33, 3, 25), (17, 44))
"""Documents of the rows: 61 tokens each, which no group divides. Rows have different numbers of targets."""


def packed_rows(count: int) -> list[dict[str, Tensor]]:
    rows: list[dict[str, Tensor]] = []
    for i, lengths in zip(range(count), itertools.cycle(LENGTHS)):
        positions = torch.cat([torch.arange(n) for n in lengths])
        ids = torch.randint(0, 64, positions.shape, generator=torch.Generator().manual_seed(i))
        labels = ids.masked_fill(positions == 0, -100)
        labels[20 : 20 + 7 * (i % 4)] = -100
        rows.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return rows


METRICS = ("eval_accuracy", "eval_confidence")


def token_accuracy(result: EvalPrediction) -> dict[str, float]:
    logits: Any = result.predictions
    labels: Any = result.label_ids
    real = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & real
    return {"accuracy": float(right.sum() / real.sum()), "confidence": float(abs(logits).mean())}


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    """Mixes tokens, as no loss inside of the model could."""
    scores = outputs.logits[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    scores = scores.masked_fill(labels[:, 1:] == -100, 0)
    return -(scores * scores.roll(1, -1)).sum() / num_items_in_batch


def train(mesh: DeviceMesh | None, folder: Path, options: dict[str, Any], extras: dict[str, Any]) -> Run:
    """Trains, then evaluates. `options` are TrainingArguments, `extras` arguments of the Trainer, and what one process
    does without: how many ranks share experts, and by what speeds they choose."""
    with launched(mesh):
        extras = {"train_dataset": packed_rows(8), "eval_dataset": packed_rows(3), **extras}
        made, resumed, experts, speeds = (
            extras.pop(*which) for which in (("model", "llama"), ("resume", None), ("experts", 1), ("speeds", None))
        )
        model = build_model(made, called=False) if isinstance(made, str) else made()
        args = on_cpu(TrainingArguments(**settings_of(str(folder), **options)))
        if mesh is None:
            trainer: Any = Trainer(model, args, **extras)
        else:
            trainer = ContextParallelTrainer(
                model, args, sharding=sharding_of(mesh, speeds=speeds), experts=experts, **extras
            )
        result = trained(trainer, resumed)
        if "compute_metrics" in extras:
            result.metrics = {name: value for name, value in trainer.evaluate().items() if name in METRICS}
        return result


def as_rank(mesh: DeviceMesh, *args: Any) -> Run:
    return train(mesh, *args)


def as_rank_of_grid(mesh: DeviceMesh, *args: Any) -> Run:
    return train(grid_of(mesh)["cp"], *args)


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize("weights", [CHECKPOINTED, FSDP], ids=["copied", "sharded"])
def test_training_with_accumulation_equals_one_process(pair: Pool, tmp_path: Path, weights: dict[str, Any]) -> None:
    """Two micro-batches with different numbers of targets; the norm of the gradients is cut, and shows factors that
    Adam or the cut would hide. With checkpoints DDP looks for no unused weights and returns outputs as they are."""
    options = {"gradient_accumulation_steps": 2}
    expected = train(None, tmp_path / "one", options, {})
    assert expected.logs[0]["grad_norm"] > 1
    for found in pair.run(2, as_rank, tmp_path / "two", {**options, **weights}, {}):
        compare(expected, found)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "many steps": ({"max_steps": 20, **CHECKPOINTED, "eval_strategy": "steps", "eval_steps": 7}, {}),
    "four micro-batches": ({"gradient_accumulation_steps": 4}, {}),
    "two rows": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, {}),
    "gradients as they are": ({"max_grad_norm": 0.0, "learning_rate": 0.03}, {}),
    "micro-batches left over": ({"gradient_accumulation_steps": 3, "max_steps": 4}, {}),
    "adam": ({"optim": "adamw_torch", "learning_rate": 1e-3, "include_num_input_tokens_seen": "all"}, {}),
    "each step's own mean": ({"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}, {}),
    "metrics": ({"per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1},
                {"compute_metrics": token_accuracy}),
    "label smoothing": ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, {}),
    "a loss function": ({"gradient_accumulation_steps": 2}, {"compute_loss_func": own_loss}),
    "losses of experts": ({"gradient_accumulation_steps": 2}, {"model": "qwen3_moe_aux_loss"}),
    "batches by length": ({"train_sampling_strategy": "group_by_length"}, {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(pair: Pool, tmp_path: Path, case: str) -> None:
    expected = train(None, tmp_path / "one", *CASES[case])
    for found in pair.run(2, as_rank, tmp_path / "two", *CASES[case]):
        compare(expected, found)


def masked_rows(count: int) -> list[dict[str, Tensor]]:
    """One document a row, and labels that stand where they are predicted, the first token's too."""
    rows = packed_rows(count)
    for row in rows:
        row["position_ids"] = torch.arange(61)
        row["labels"] = row["input_ids"].masked_fill(row["input_ids"] % 3 > 0, -100)
        row["labels"][0] = row["input_ids"][0]
    return rows


@pytest.mark.slow
def test_a_loss_that_does_not_shift_counts_all_labels(pair: Pool, tmp_path: Path) -> None:
    extras = {"model": "modernbert", "train_dataset": masked_rows(8), "eval_dataset": masked_rows(3)}
    options = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "remove_unused_columns": False,
    }
    expected = train(None, tmp_path / "one", options, extras)
    for found in pair.run(2, as_rank, tmp_path / "two", options, extras):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replicas_of_groups_equal_one_process(pool: Pool, tmp_path: Path, accumulation: int) -> None:
    """Each of two groups gets every other row. Three rows to evaluate leave one group without its last."""
    options = {"gradient_accumulation_steps": accumulation, "include_num_input_tokens_seen": "all"}
    extras: dict[str, Any] = {"compute_metrics": token_accuracy, "train_dataset": packed_rows(12)}
    one = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    expected = train(None, tmp_path / "one", {**options, **one}, extras)
    for found in pool.run(4, as_rank_of_grid, tmp_path / "four", options, extras):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_groups_under_fsdp_equal_one_process(pool: Pool, tmp_path: Path, accumulation: int) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    extras: dict[str, Any] = {"compute_metrics": token_accuracy, "train_dataset": packed_rows(12)}
    one = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    expected = train(None, tmp_path / "one", {**options, **one}, extras)
    for found in pool.run(4, as_rank_of_grid, tmp_path / "four", {**options, **FSDP}, extras):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        CHECKPOINTED,
        {"label_smoothing_factor": 0.1},
        {"fsdp_config": {"reshard_after_forward": False}},
        {"fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
        {"optim": "adamw_torch", "learning_rate": 1e-3},
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "max_steps": 3,
            "save_steps": 1,
            "load_best_model_at_end": True,
            "save_strategy": "steps",
        },
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_under_fsdp(pair: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    alone = {name: value for name, value in options.items() if name != "fsdp_config"}
    expected = train(None, tmp_path / "one", alone, {})
    for found in pair.run(2, as_rank, tmp_path / "two", {**FSDP, **options}, {}):
        compare(expected, found)


def compare_resumed(expected: Run, whole: list[Run], resumed: list[Run]) -> None:
    """Compare each rank's whole run with one process, and its run that went on from a checkpoint with the whole one."""
    for before, after in zip(whole, resumed, strict=True):
        compare(expected, before)
        assert all(torch.equal(before.weights[name], weight) for name, weight in after.weights.items())
        assert before.logs[:4] == after.logs[:4]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_run_under_fsdp_is_saved_and_resumed(pair: Pool, tmp_path: Path, kind: str) -> None:
    """The whole weights, as a checkpoint's model file has them, are those of one process too."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    expected = train(None, tmp_path / "one", options, {})
    config = {**FSDP["fsdp_config"], "state_dict_type": kind}
    options = {**options, **FSDP, "fsdp_config": config}
    whole = pair.run(2, as_rank, tmp_path / "two", options, {})
    extras = {"resume": str(tmp_path / "two" / "checkpoint-2")}
    resumed = pair.run(2, as_rank, tmp_path / "resumed", options, extras)
    compare_resumed(expected, whole, resumed)
    if kind == "FULL_STATE_DICT":
        saved = load_file(tmp_path / "two" / "checkpoint-4" / "model.safetensors")
        assert all(torch.equal(saved[name], weight) for name, weight in whole[0].weights.items() if name in saved)
        assert len(saved) > 10


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_not_stopped(pair: Pool, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1,
               "optim": "adamw_torch", "learning_rate": 1e-3}  # fmt: skip
    expected = train(None, tmp_path / "one", options, {})
    whole = pair.run(2, as_rank, tmp_path / "two", options, {})
    extras = {"resume": str(tmp_path / "two" / "checkpoint-2")}
    resumed = pair.run(2, as_rank, tmp_path / "resumed", options, extras)
    compare_resumed(expected, whole, resumed)
    # The checkpoint is a Trainer's own: one process goes on from it.
    alone = train(None, tmp_path / "alone", options, extras)
    del expected.logs[-1], alone.logs[-1]  # the mean over the steps of this call
    del expected.gradients[:2]
    compare(expected, alone)


HALF = {"bf16": True, "max_grad_norm": 0.0, "learning_rate": 0.03}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FSDP], ids=["ddp", "fsdp"])
def test_half_precision(pair: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Master weights are fp32. What changed of each weight is compared, to the rounding of bf16: FSDP rounds the
    weights themselves, autocast products alone."""
    expected = train(None, tmp_path / "one", HALF, {})
    before = dict(build_model("llama", called=False).named_parameters())
    for found in pair.run(2, as_rank, tmp_path / "two", {**HALF, **options}, {}):
        assert found.logs[0]["loss"] == pytest.approx(expected.logs[0]["loss"], rel=1e-2)
        assert found.logs[0]["grad_norm"] == pytest.approx(expected.logs[0]["grad_norm"], rel=2e-2)
        for name, weight in expected.weights.items():
            assert found.weights[name].dtype == torch.float32
            change = (weight - before[name].detach()).norm()
            error = float((found.weights[name] - weight).norm() / change)
            assert error < 0.1, f"{name}: {error:.1e}"


def with_adapters(options: dict[str, Any], name: str = "llama", targets: Sequence[str] = ("q_proj", "up_proj")) -> Any:
    peft = importlib.import_module("peft")
    torch.manual_seed(1)
    targets = peft.LoraConfig(r=4, target_modules=[*targets], init_lora_weights=False, **options)
    return peft.get_peft_model(build_model(name, called=False), targets)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "lora and the head"])
def test_adapters_under_fsdp(pair: Pool, tmp_path: Path, adapters: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    options, extras = {"gradient_accumulation_steps": 2}, {"model": partial(with_adapters, adapters)}
    expected = train(None, tmp_path / "one", options, dict(extras))
    for found in pair.run(2, as_rank, tmp_path / "two", {**options, **FSDP}, dict(extras)):
        compare(expected, found)


MOE = "qwen3_moe_aux_loss"
OF_EXPERTS = {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "model", "experts"),
    [
        ({"gradient_accumulation_steps": 2}, MOE, 2),
        ({"gradient_accumulation_steps": 2}, MOE, "auto"),
        ({"gradient_accumulation_steps": 2, **CHECKPOINTED}, MOE, 2),
        ({"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 0.0}, MOE, 2),
        ({"gradient_accumulation_steps": 2}, partial(with_adapters, {}, MOE, ["q_proj"]), 2),
    ],
    ids=["sgd", "auto", "checkpointed", "adam", "adapters beside"],
)
def test_shared_experts_equal_one_process(
    pair: Pool, tmp_path: Path, options: dict[str, Any], model: Any, experts: Any
) -> None:
    expected = train(None, tmp_path / "one", options, {"model": model})
    extras = {"model": model, "experts": experts, "speeds": QUICK}
    for found in pair.run(2, as_rank, tmp_path / "two", {**options, **OF_EXPERTS}, extras):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.skipif(not shards_over_some(), reason="FSDP of this torch shards weights over all ranks of a mesh")
@pytest.mark.parametrize("shared", [2, 4])
def test_shared_experts_of_groups_equal_one_process(pool: Pool, tmp_path: Path, shared: int) -> None:
    options, extras = {"gradient_accumulation_steps": 2}, {"train_dataset": packed_rows(12), "model": "qwen3_moe"}
    one = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    expected = train(None, tmp_path / "one", {**options, **one}, extras)
    for found in pool.run(
        4, as_rank_of_grid, tmp_path / "four", {**options, **OF_EXPERTS}, {**extras, "experts": shared}
    ):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_shared_experts_are_saved_and_resumed(pair: Pool, tmp_path: Path, kind: str) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    expected = train(None, tmp_path / "one", options, {"model": MOE})
    options |= {**OF_EXPERTS, "fsdp_config": {**OF_EXPERTS["fsdp_config"], "state_dict_type": kind}}
    extras: dict[str, Any] = {"model": MOE, "experts": 2}
    whole = pair.run(2, as_rank, tmp_path / "two", options, extras)
    extras["resume"] = str(tmp_path / "two" / "checkpoint-2")
    compare_resumed(expected, whole, pair.run(2, as_rank, tmp_path / "resumed", options, extras))
    if kind == "FULL_STATE_DICT":
        saved = load_file(tmp_path / "two" / "checkpoint-4" / "model.safetensors")
        assert all(torch.equal(saved[name], weight) for name, weight in whole[0].weights.items() if name in saved)
        assert any("experts" in name for name in saved)
