"""Training arguments that the context-parallel Trainer refuses, and what it does about readers of data."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainingArguments

from cp_rewrite.integrations.accelerator import refused_settings
from cp_rewrite.integrations.forward import forward_of
from cp_rewrite.integrations.transformers import ContextParallelTrainer
from tests.experts.test_choose import QUICK
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

from .runs import FSDP, launched, on_cpu, settings_of, sharding_of
from .test_transformers import packed_rows


def refused(mesh: DeviceMesh, folder: Path, options: dict[str, Any]) -> str:
    sharding = sharding_of(mesh, **options.pop("sharding", {}))
    with launched(mesh):
        args, model = on_cpu(TrainingArguments(**settings_of(str(folder), **options))), build_model("llama")
        with pytest.raises(ValueError, match="does not go with context parallelism") as error:
            ContextParallelTrainer(model, args, train_dataset=packed_rows(1), sharding=sharding)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"torch_compile": True}, "torch_compile"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"sharding": {"rows": "own"}}, "rows='own'"),
        ({"eval_use_gather_object": True}, "eval_use_gather_object"),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "gradient_checkpointing=True"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "cpu_offload"),
        ({"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True}}, "cpu_ram_efficient_loading"),
    ],
)
def test_arguments_that_would_be_wrong_are_refused(
    pair: Pool, tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    for message in pair.run(2, refused, tmp_path, options):
        assert name in message


def refused_on_cpus(mesh: DeviceMesh, folder: Path) -> str:
    with launched(mesh):
        args, model = TrainingArguments(**settings_of(str(folder), **FSDP)), build_model("llama")
        with pytest.raises(ValueError, match="does not go with context parallelism") as error:
            ContextParallelTrainer(model, args, train_dataset=packed_rows(1), sharding=sharding_of(mesh))
    return str(error.value)


def test_weights_that_accelerate_would_not_shard_are_refused(pair: Pool, tmp_path: Path) -> None:
    assert all("leave out fsdp=True, or use_cpu=True" in message for message in pair.run(2, refused_on_cpus, tmp_path))


EXPERTS: list[tuple[Any, dict[str, Any], str]] = [
    (2, {}, "experts=2 goes with FSDP alone"),
    (3, FSDP, "experts=3 must divide the 2 ranks"),
    (0, FSDP, "experts=0 must divide the 2 ranks"),
    ("2", FSDP, "experts must be how many ranks"),
]


def experts_refused(mesh: DeviceMesh, folder: Path) -> list[str]:
    found: list[str] = []
    for experts, options, _ in EXPERTS:
        with launched(mesh):
            args, how = on_cpu(TrainingArguments(**settings_of(str(folder), **options))), {"experts": experts}
            with pytest.raises((TypeError, ValueError)) as error:
                ContextParallelTrainer(build_model("llama"), args, sharding=sharding_of(mesh), **how)
            found.append(str(error.value))
    return found


def test_experts_that_these_ranks_can_not_share_are_refused(pair: Pool, tmp_path: Path) -> None:
    for messages in pair.run(2, experts_refused, tmp_path):
        assert all(words in found for found, (*_, words) in zip(messages, EXPERTS, strict=True))


def other_trainer(mesh: DeviceMesh, folder: Path) -> str:
    """The first copies the weights, the second asks that ranks share experts."""
    model: Any = build_model("qwen3_moe")
    for experts, options in ((1, {}), (2, FSDP)):
        with launched(mesh):
            args, how = on_cpu(TrainingArguments(**settings_of(str(folder), **options))), {"experts": experts}
            accelerator: Any = ContextParallelTrainer(model, args, sharding=sharding_of(mesh), **how).accelerator
            if experts > 1:
                with pytest.raises(ValueError, match="load it once more") as error:
                    accelerator.prepared(model)
                return str(error.value)
            accelerator.prepared(model)
    raise AssertionError


def test_experts_are_not_shared_by_a_second_trainer(pair: Pool, tmp_path: Path) -> None:
    for message in pair.run(2, other_trainer, tmp_path):
        assert "experts=2: a trainer before had this model with experts=1" in message


def ranks_by_auto(mesh: DeviceMesh, folder: Path) -> list[int | None]:
    """Ranks that share: of a dense model, with copied weights, and of experts; there of a second trainer too."""
    found: list[int | None] = []
    model = build_model("qwen3_moe")
    for made, options in [(build_model("llama"), FSDP), (build_model("qwen3_moe"), {}), (model, FSDP), (model, FSDP)]:
        with launched(mesh):
            args = on_cpu(TrainingArguments(**settings_of(str(folder), **options)))
            sharding = sharding_of(mesh, speeds=QUICK)
            accelerator: Any = ContextParallelTrainer(made, args, sharding=sharding, experts="auto").accelerator
            accelerator.prepared(made)
        forward = forward_of(made)
        assert forward is not None
        found.append(None if forward.shared is None else forward.shared.size)
    return found


def test_auto_shares_experts_where_it_can(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(2, ranks_by_auto, tmp_path) == [[None, None, 2, 2]] * 2


def test_the_first_fsdp_is_refused() -> None:
    plugin = SimpleNamespace(
        fsdp_version=1, cpu_offload=None, activation_checkpointing=False, cpu_ram_efficient_loading=False,
        ignored_modules=None,
    )  # fmt: skip
    given, what_to_do = refused_settings(plugin)["FSDP of version 1"]
    assert given
    assert "fsdp_config={'version': 2}" in what_to_do


def copied(mesh: DeviceMesh, folder: Path) -> None:
    """A copy would run the model that it was copied from, as the reference of a next trainer too."""
    with launched(mesh):
        args, model = on_cpu(TrainingArguments(**settings_of(str(folder), max_steps=1))), build_model("llama")
        trainer = ContextParallelTrainer(model, args, train_dataset=packed_rows(2), sharding=sharding_of(mesh))
        trainer.train()
        with pytest.raises(RuntimeError, match="once a trainer has it: the copy would run this one"):
            copy.deepcopy(model)


@pytest.mark.slow
def test_a_model_that_a_trainer_has_is_not_copied(pair: Pool, tmp_path: Path) -> None:
    pair.run(2, copied, tmp_path)


def seeds_of_readers(mesh: DeviceMesh, folder: Path) -> Any:
    with launched(mesh):
        args = TrainingArguments(**settings_of(str(folder), dataloader_num_workers=2))
        extras: dict[str, Any] = {"train_dataset": packed_rows(2), "sharding": sharding_of(mesh)}
        loader: Any = ContextParallelTrainer(build_model("llama"), args, **extras).get_train_dataloader()
        return loader.worker_init_fn.keywords


def test_reading_processes_of_a_group_draw_alike(pair: Pool, tmp_path: Path) -> None:
    """Collators of masked language models draw in them."""
    assert pair.run(2, seeds_of_readers, tmp_path) == [{"num_workers": 2, "rank": 0}] * 2


def test_no_sharding_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="sharding must be"):
        ContextParallelTrainer(build_model("llama"), TrainingArguments(str(tmp_path)), sharding=2)  # type: ignore[arg-type]
