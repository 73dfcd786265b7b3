"""The script that README points to: it trains under torchrun, and goes on where its last checkpoint is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def train(out: Path, steps: int) -> str:
    """The last line that is printed: the step and its loss."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--steps", str(steps), "--save-every", "2", "--tokens", "501", "--inner", "eager", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(ROOT / "examples" / "train_fsdp.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4)
    assert whole.startswith("step 4: loss ")
    train(tmp_path / "stopped", 2)
    assert train(tmp_path / "stopped", 4) == whole
