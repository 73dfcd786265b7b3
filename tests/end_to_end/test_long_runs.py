"""Long runs: ranks that are killed go on from their last checkpoint with the same losses.

torchrun --nproc-per-node 2 --max-restarts 3 -m tests.end_to_end.test_long_runs FOLDER 200 kills
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parent.parent.parent
EVERY = 20
"""Steps between checkpoints."""
KILLS = [(37, 1, "in a batch"), (93, 0, "before a batch"), (151, 1, "behind a backward")]
"""Step, rank and moment."""
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With gloo, torch 2.13 else finds addresses of the processes before a restart in the launcher's store."""


class Loader:
    """Rows of one to five documents of four tokens or more, which go on where they were."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __next__(self) -> dict[str, Tensor]:
        count = int(torch.randint(1, 6, (), generator=self.generator))
        return make_batch([torch.randint(4, 40, (count,), generator=self.generator).tolist()])


class Run:
    """A training run and its parts that a checkpoint holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        self.sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager")
        self.model = cp.parallelize(build_model("llama"), mesh, self.sharding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader, self.step = Loader(), 0
        self.saves: Any = dist.new_group(backend="gloo")  # of its own: it runs beside the steps
        self.saving: Any = None
        kept = sorted(folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))
        if kept:
            self.load(kept[-1].parent)

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        loader = self.loader.generator.get_state()
        return {"model": weights, "optimizer": moments, "loader": loader, "step": torch.tensor(self.step)}

    def load(self, at: Path) -> None:
        found = self.state()
        dcp.load(found, checkpoint_id=at)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        self.loader.generator.set_state(found["loader"])
        self.step = int(found["step"])

    def save(self) -> None:
        if self.saving is not None:
            self.saving.result()
        self.saving = dcp.async_save(self.state(), checkpoint_id=self.folder / f"{self.step}", process_group=self.saves)

    def train(self, dies: str) -> float:
        """One step's loss; this rank `dies` at a moment of it, or at none."""
        batch = next(self.loader)
        if dies == "before a batch":
            os.kill(os.getpid(), signal.SIGKILL)
        with self.sharding.shard(batch, shift_labels=True) as local:
            if dies == "in a batch":
                os.kill(os.getpid(), signal.SIGKILL)
            loss: Tensor = self.model(**local).loss
        loss.backward()
        if dies == "behind a backward":
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()


def main(folder: Path, steps: int, way: str) -> None:
    """Rank 0 writes a line for each step."""
    dist.init_process_group("gloo")
    run, tried, rank = Run(folder), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    kill = KILLS[tried] if way == "kills" and tried < len(KILLS) else (-1, -1, "")
    with (folder / "log").open("a") as log:
        while run.step < steps:
            step = run.step
            loss = run.train(kill[2] if kill[:2] == (step, rank) else "")
            if rank == 0:
                print(json.dumps({"step": step, "loss": loss}), file=log, flush=True)
            if run.step % EVERY == 0:
                run.save()
    if run.saving is not None:
        run.saving.result()
    dist.destroy_process_group()


def launch(folder: Path, steps: int, way: str) -> list[dict[str, Any]]:
    """The lines of a run of two ranks: of each step the last one, in order."""
    folder.mkdir()
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {len(KILLS)}"
    words = [*command.split(), "-m", __name__, str(folder), str(steps), way]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=850,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NEW_STORE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return [*{line["step"]: line for line in lines}.values()]


def test_killed_ranks_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Three kills in 200 steps, checkpoints that are written beside the steps, and a loader that goes on."""
    whole = launch(tmp_path / "whole", 200, "undisturbed")
    killed = launch(tmp_path / "killed", 200, "kills")
    assert [line["step"] for line in killed] == [line["step"] for line in whole] == [*range(200)]
    assert [line["loss"] for line in killed] == pytest.approx([line["loss"] for line in whole], rel=1e-5)
    said = (tmp_path / "killed" / "log").read_text().splitlines()
    assert len(said) > 200 + len(KILLS), "no rank was killed"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
