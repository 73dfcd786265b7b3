"""Logits that a trainer does not read are in no graph: they are made tile by tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainingArguments

from cp_rewrite.integrations.transformers import ContextParallelTrainer
from cp_rewrite.ops.tiles import REGIONS
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

from .runs import launched, on_cpu, settings_of, sharding_of
from .test_transformers import packed_rows


def losses(mesh: DeviceMesh, folder: Path, tile: int | None) -> tuple[list[float], int]:
    """The losses of two steps, and how many regions ran tile by tile."""
    REGIONS.clear()
    with launched(mesh):
        args = on_cpu(TrainingArguments(**settings_of(str(folder))))
        model = build_model("llama")
        model.lm_head = torch.nn.Linear(model.config.hidden_size, 40 * model.config.vocab_size, bias=False)  # type: ignore[assignment, union-attr]
        model.config.vocab_size *= 40  # type: ignore[union-attr]
        model.vocab_size = model.config.vocab_size  # type: ignore[assignment, union-attr]
        trainer = ContextParallelTrainer(
            model, args, train_dataset=packed_rows(2), sharding=sharding_of(mesh, tile=tile)
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], len(REGIONS)


@pytest.mark.slow
def test_a_trainer_that_reads_the_loss_alone_tiles_its_head(pair: Pool, tmp_path: Path) -> None:
    plain, none = pair.run(2, losses, tmp_path, None)[0]
    for tiled, regions in pair.run(2, losses, tmp_path, 4):
        assert tiled == pytest.approx(plain, rel=1e-5)
        assert regions > 0 == none
