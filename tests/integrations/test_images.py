"""Trainers of Qwen VL with images, on rows as processors give them: loss and all gradients against one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainingArguments

import cp_rewrite as cp
from cp_rewrite.integrations.forward import GlobalForward, Switch
from cp_rewrite.integrations.transformers import ContextParallelTrainer
from tests.helpers.images import KINDS, Document, Step, build, kinds_of, rows, same, with_video
from tests.helpers.one_process import gradients_of
from tests.helpers.pool import Pool
from tests.helpers.versions import traces_images

from .runs import Run, compare, launched, on_cpu, settings_of, sharding_of, trained

pytestmark = traces_images
BATCHES: dict[str, dict[str, Tensor]] = {
    "padded": rows((3, (4, 4), 2, (2, 6), 9), (9, (2, 2), 7), pad=3),
    "whole": rows((3, (4, 4), 20), (9, (2, 6), 1, (4, 4), 10)),
    "text": rows((12,), (21,), pad=1),
}


def step(model: Any, batch: dict[str, Tensor]) -> Step:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), gradients_of(model)


def on_ranks(mesh: DeviceMesh, kind: str) -> list[Step]:
    torch._dynamo.reset()
    model = build(kind)
    GlobalForward(model, sharding_of(mesh), Switch(on=True, loss_only=True)).install()
    found = [step(model, batch) for batch in BATCHES.values()]
    for _, grads in found:
        for grad in grads.values():
            torch.distributed.all_reduce(grad, group=mesh.get_group())
            grad /= mesh.size()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_processors_in_turn(pool: Pool, kind: str) -> None:
    """Padded rows, whole ones and text alone: positions are made of whole rows."""
    model = build(kind)
    expected = [step(model, batch) for batch in BATCHES.values()]
    for found in pool.run(3, on_ranks, kind):
        same(expected, found)


def with_video_on_ranks(mesh: DeviceMesh, kind: str) -> Step | str:
    """Loss and gradients on ranks, or the text of the refusal."""
    torch._dynamo.reset()
    model = build(kind)
    batch = with_video(model)
    batch["mm_token_type_ids"] = kinds_of(batch["input_ids"])
    del batch["position_ids"]
    GlobalForward(model, sharding_of(mesh), Switch(on=True, loss_only=True)).install()
    try:
        loss, grads = step(model, batch)
    except cp.RewriteRefused as refused:
        return str(refused)
    for grad in grads.values():
        torch.distributed.all_reduce(grad, group=mesh.get_group())
        grad /= mesh.size()
    return loss, grads


@pytest.mark.slow
def test_rows_of_processors_with_images_and_videos(pool: Pool) -> None:
    """Rows of Qwen3-VL are refused, with the line."""
    for kind in ("Qwen2VL", "Qwen2_5_VL"):
        model = build(kind)
        for found in pool.run(2, with_video_on_ranks, kind):
            same([step(model, with_video(model))], [found])
    for found in pool.run(2, with_video_on_ranks, "Qwen3VL"):
        assert "image_mask[visual_pos_masks]" in found


DOCUMENTS: list[Document] = [(3, (4, 4), 2, (2, 6), 9), (9, (2, 2), 7), (22,), (1, (8, 4), 12)]


def collated(documents: Sequence[Document]) -> dict[str, Tensor]:
    return rows(*documents, pad=1, seed=len(documents[0]))


def train(mesh: DeviceMesh | None, folder: Path, options: dict[str, Any]) -> Run:
    """Evaluates after each step."""
    with launched(mesh):
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2}
        args = on_cpu(TrainingArguments(**settings_of(str(folder), **evaluated, **options)))
        given: dict[str, Any] = {"train_dataset": DOCUMENTS, "eval_dataset": DOCUMENTS[::2], "data_collator": collated}
        if mesh is None:
            return trained(Trainer(build("Qwen2_5_VL"), args, **given))
        return trained(ContextParallelTrainer(build("Qwen2_5_VL"), args, sharding=sharding_of(mesh), **given))


BLOCKS = ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": BLOCKS}}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["copied", "sharded"])
def test_a_trainer_with_images_equals_one_process(pair: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = train(None, tmp_path, {})
    for found in pair.run(2, train, tmp_path, options):
        compare(expected, found)


def test_images_whose_tokens_are_not_marked_are_an_error() -> None:
    torch._dynamo.reset()
    model = build("Qwen2VL")
    GlobalForward(model, sharding_of(1), Switch(on=True)).install()  # type: ignore[arg-type]
    batch = {name: x for name, x in BATCHES["whole"].items() if name != "mm_token_type_ids"}
    with pytest.raises(ValueError, match="no mm_token_type_ids"):
        model(**batch)
