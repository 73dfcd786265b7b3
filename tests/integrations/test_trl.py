"""TRL's SFT and DPO, context-parallel on gloo processes against TRL's own on one: all metrics, and all weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import EvalPrediction, PreTrainedTokenizerFast

import cp_rewrite as cp
from cp_rewrite.integrations.transformers import ContextParallelMixin
from tests.helpers.models import VOCAB, build_model
from tests.helpers.pool import Pool

from .runs import FSDP, TOKENS, Run, compare, grid_of, launched, on_cpu, settings_of, sharding_of, trained

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

LENGTHS = (13, 29, 18, 61, 7, 20, 34, 60, 31, 30, 5, 41, 2, 59, 33, 25, 17, 44, 51, 9, 11, 12)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id of the small models."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # it comes with transformers

    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(length: int, seed: int) -> str:
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def token_accuracy(result: EvalPrediction) -> dict[str, float]:
    predictions: Any = result.predictions
    labels: Any = result.label_ids
    real = labels[:, 1:] != -100
    return {"accuracy": float(((predictions[:, :-1] == labels[:, 1:]) & real).sum() / real.sum())}


def best(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


def with_adapters(**options: Any) -> Any:
    peft = importlib.import_module("peft")
    torch.manual_seed(1)
    options = {"init_lora_weights": False, **options}
    targets = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **options)
    return peft.get_peft_model(build_model("llama", called=False), targets)


def tune(
    mesh: DeviceMesh | None,
    folder: Path,
    options: dict[str, Any],
    resume: str | None = None,
    adapters: dict[str, Any] | None = None,
) -> Run:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    from cp_rewrite.integrations.trl import ContextParallelSFTTrainer

    with launched(mesh):
        metrics = {"compute_metrics": token_accuracy, "preprocess_logits_for_metrics": best}
        extras: dict[str, Any] = metrics if options.get("eval_strategy") else {}
        extras["processing_class"] = tokenizer()
        extras["train_dataset"] = Dataset.from_dict({"text": [text(n, n) for n in LENGTHS]})
        extras["eval_dataset"] = Dataset.from_dict({"text": [text(n, n) for n in LENGTHS[:5]]})
        if options.get("completion_only_loss"):
            extras["train_dataset"] = Dataset.from_dict(
                {"prompt": [text(n, n) for n in LENGTHS], "completion": [text(n % 9 + 1, n) for n in LENGTHS]}
            )
        args = on_cpu(SFTConfig(**settings_of(str(folder), **{"max_length": 61, **options})))
        model = build_model("llama") if adapters is None else with_adapters(**adapters)
        if mesh is None:
            trainer = SFTTrainer(model, args, **extras)
        else:
            trainer = ContextParallelSFTTrainer(model, args, sharding=sharding_of(mesh), **extras)
        return trained(trainer, resume)


def on_disk(folder: Path, rows: dict[str, list[str]]) -> Any:
    """A data set whose cache all processes share, as TRL takes for granted where it reads the reference once."""
    from datasets import Dataset, load_from_disk

    with PartialState().main_process_first():
        if not folder.exists():
            Dataset.from_dict(rows).save_to_disk(folder)
    return load_from_disk(folder)


def prefer(mesh: DeviceMesh | None, folder: Path, options: dict[str, Any], adapters: bool = False) -> Run:
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found]

    from cp_rewrite.integrations.forward import forward_of
    from cp_rewrite.integrations.trl import ContextParallelDPOTrainer

    with launched(mesh):
        rows = {
            "prompt": [text(9 + i, i) for i in range(8)],
            "chosen": [" " + text(20 - i, 50 + i) for i in range(8)],
            "rejected": [" " + text(12 + 2 * i, 90 + i) for i in range(8)],
        }
        args = on_cpu(DPOConfig(**settings_of(str(folder), **{"per_device_train_batch_size": 2, **options})))
        model, reference = build_model("llama"), build_model("llama")
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.01)
        if adapters:
            model, reference = with_adapters(), None  # the reference is the model without them
        extras: dict[str, Any] = {
            "processing_class": tokenizer(),
            "train_dataset": on_disk(folder / "train", rows),
            "eval_dataset": on_disk(folder / "eval", {name: values[:3] for name, values in rows.items()}),
        }
        if mesh is None:
            trainer = DPOTrainer(model, reference, args, **extras)
        else:
            trainer = ContextParallelDPOTrainer(model, reference, args, sharding=sharding_of(mesh), **extras)
        result = trained(trainer)
        if args.fsdp and not adapters:
            forward: Any = forward_of(trainer.ref_model)
            assert len(forward.blocks) == 2  # the reference too is cut over the group's ranks
        return result


def judge(mesh: DeviceMesh | None, folder: Path, options: dict[str, Any]) -> Run:
    """KTO: each answer is good or bad."""
    from trl import KTOConfig, KTOTrainer  # type: ignore[import-not-found]

    from cp_rewrite.integrations.trl import ContextParallelKTOTrainer

    with launched(mesh):
        rows: dict[str, Any] = {
            "prompt": [text(9 + i, i) for i in range(8)],
            "completion": [" " + text(20 - i, 50 + i) for i in range(8)],
            "label": [i % 3 > 0 for i in range(8)],
        }
        args = on_cpu(KTOConfig(**settings_of(str(folder), **{"per_device_train_batch_size": 4, **options})))
        model, reference = build_model("llama"), build_model("llama")
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.01)
        extras: dict[str, Any] = {
            "processing_class": tokenizer(),
            "train_dataset": on_disk(folder / "train", rows),
        }
        if mesh is None:
            return trained(KTOTrainer(model, reference, args, **extras))
        return trained(ContextParallelKTOTrainer(model, reference, args, sharding=sharding_of(mesh), **extras))


def judge_as_rank(mesh: DeviceMesh, *args: Any) -> Run:
    return judge(mesh, *args)


def tune_as_rank(mesh: DeviceMesh, *args: Any) -> Run:
    return tune(mesh, *args)


def tune_as_rank_of_grid(mesh: DeviceMesh, *args: Any) -> Run:
    return tune(grid_of(mesh)["cp"], *args)


def prefer_as_rank(mesh: DeviceMesh, *args: Any) -> Run:
    return prefer(mesh, *args)


EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
TUNING: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, **EVALUATION},
    "packed, 2 micro-batches": {"packing": True, "gradient_accumulation_steps": 2},
    "packed, 4 micro-batches": {"packing": True, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    "packed, cut anywhere": {"packing": True, "packing_strategy": "wrapped"},
    "padding-free": {"padding_free": True, "max_length": None, "per_device_train_batch_size": 3},
    "padded": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "completions": {"packing": True, "completion_only_loss": True, "gradient_accumulation_steps": 2},
    "another loss": {"packing": True, "loss_type": "dft", "gradient_checkpointing": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TUNING)
def test_sft_equals_one_process(pair: Pool, tmp_path: Path, case: str) -> None:
    expected = tune(None, tmp_path / "one", TUNING[case])
    assert "mean_token_accuracy" in expected.logs[0]
    for found in pair.run(2, tune_as_rank, tmp_path / "two", TUNING[case]):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["packed", "packed, 2 micro-batches", "another loss"])
def test_sft_under_fsdp_equals_one_process(pair: Pool, tmp_path: Path, case: str) -> None:
    """With the weights of each block sharded over all ranks."""
    expected = tune(None, tmp_path / "one", TUNING[case])
    for found in pair.run(2, tune_as_rank, tmp_path / "two", {**TUNING[case], **FSDP}):
        compare(expected, found)


@pytest.mark.slow
def test_sft_under_fsdp_in_groups(pool: Pool, tmp_path: Path) -> None:
    options = {"packing": True, "gradient_accumulation_steps": 2}
    expected = tune(None, tmp_path / "one", {**options, "per_device_train_batch_size": 2})
    for found in pool.run(4, tune_as_rank_of_grid, tmp_path / "four", {**options, **FSDP}):
        compare(expected, found)


@pytest.mark.slow
def test_sft_in_replicas_of_groups_equals_one_process(pool: Pool, tmp_path: Path) -> None:
    """Each of two groups gets every other row, and both count the tokens of both."""
    options = {"packing": True, "gradient_accumulation_steps": 2}
    expected = tune(None, tmp_path / "one", {**options, "per_device_train_batch_size": 2})
    for found in pool.run(4, tune_as_rank_of_grid, tmp_path / "four", options):
        compare(expected, found)


@pytest.mark.slow
def test_a_resumed_sft_equals_one_that_was_not_stopped(pair: Pool, tmp_path: Path) -> None:
    options = {"packing": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch",
               "learning_rate": 1e-3, "gradient_accumulation_steps": 2}  # fmt: skip
    whole = pair.run(2, tune_as_rank, tmp_path / "two", options)
    resumed = pair.run(2, tune_as_rank, tmp_path / "resumed", options, str(tmp_path / "two" / "checkpoint-2"))
    for before, after in zip(whole, resumed, strict=True):
        assert all(torch.equal(before.weights[name], weight) for name, weight in after.weights.items())


PREFERENCES: dict[str, dict[str, Any]] = {
    "many steps": {"max_steps": 20, **EVALUATION, "eval_steps": 10, "per_device_eval_batch_size": 2},
    "accumulated": {"gradient_accumulation_steps": 2, "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]},
    "lengths desensitised": {"ld_alpha": 0.5, "use_weighting": True},
    "reference read once": {"precompute_ref_log_probs": True, **EVALUATION},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PREFERENCES)
def test_dpo_equals_one_process(pair: Pool, tmp_path: Path, case: str) -> None:
    expected = prefer(None, tmp_path / "one", PREFERENCES[case])
    for found in pair.run(2, prefer_as_rank, tmp_path / "two", PREFERENCES[case]):
        compare(expected, found, 1e-6 * max(10, PREFERENCES[case].get("max_steps", 0)))  # rounding adds up


@pytest.mark.slow
def test_dpo_under_fsdp_equals_one_process(pair: Pool, tmp_path: Path) -> None:
    expected = prefer(None, tmp_path / "one", PREFERENCES["accumulated"])
    for found in pair.run(2, prefer_as_rank, tmp_path / "two", {**PREFERENCES["accumulated"], **FSDP}):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FSDP], ids=["ddp", "fsdp"])
def test_kto_equals_one_process(pair: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = judge(None, tmp_path / "one", {"max_steps": 3})
    for found in pair.run(2, judge_as_rank, tmp_path / "two", {"max_steps": 3, **options}):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FSDP], ids=["ddp", "fsdp"])
def test_adapters_equal_one_process(pair: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    """With checkpoints, TRL's default, and frozen embeddings. DPO switches the adapters off for its reference."""
    expected = prefer(None, tmp_path / "one", {"max_steps": 3}, True)
    assert expected.logs[-2]["loss"] != pytest.approx(expected.logs[0]["loss"], rel=1e-2)
    for found in pair.run(2, prefer_as_rank, tmp_path / "two", {"max_steps": 3, **options}, True):
        compare(expected, found)
    expected = tune(None, tmp_path / "tuned", {"packing": True}, None, {})
    for found in pair.run(2, tune_as_rank, tmp_path / "tuned by two", {"packing": True, **options}, None, {}):
        compare(expected, found)


def test_what_generates_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    class Mine(ContextParallelMixin, GRPOTrainer):
        pass

    options = {"num_generations": 2, "per_device_train_batch_size": 2}
    extras: dict[str, Any] = {"train_dataset": Dataset.from_dict({"prompt": ["w3"]}), "processing_class": tokenizer()}
    model, sharding = build_model("llama"), cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"))
    with launched(None):
        args = on_cpu(GRPOConfig(**settings_of(str(tmp_path), **options)))
        with pytest.raises(ValueError, match=r"GRPO, RLOO.* does not go"):
            Mine(model, reward_funcs=len, args=args, sharding=sharding, **extras)


def test_a_trainer_of_rewards_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer  # type: ignore[import-not-found]

    class Mine(ContextParallelMixin, RewardTrainer):
        pass

    pairs = Dataset.from_dict({"chosen": ["w3 w4"], "rejected": ["w5"]})
    config: Any = build_model("llama").config
    config.num_labels = 1
    model, sharding = (
        AutoModelForSequenceClassification.from_config(config),
        cp.Sharding(2, TOKENS, cp.PositionIds("position_ids")),
    )
    with launched(None):
        args = on_cpu(RewardConfig(**settings_of(str(tmp_path))))
        with pytest.raises(ValueError, match="a trainer of rewards does not go with context parallelism"):
            Mine(model, args=args, sharding=sharding, train_dataset=pairs, processing_class=tokenizer())
