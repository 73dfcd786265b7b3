"""The scripts of examples/ under torchrun: what a user starts from."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
STEPS, TOKENS, RATE = 4, 501, 1e-3


def train(folder: Path, data: str, out: str) -> float:
    """The loss of held-out text after the last step, of two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = f"tiny --data {data} --out {out} --steps {STEPS} --tokens {TOKENS} --lr {RATE} --warmup 2 --inner eager"
    more = "--accumulation 2 --save-every 2 --eval-rows 2"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(ROOT / "examples" / "train_checkpoint.py"), *options.split(), *more.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout.split()[-1])


def train_alone(example: Any, folder: Path) -> tuple[Any, float]:
    """The same rows on the plain model, without this project: it, and its loss of held-out text."""
    transformers: Any = importlib.import_module("transformers")
    # With a cache, its default, transformers leaves the mask of packed documents out.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", use_cache=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tiny")
    args = SimpleNamespace(data=str(folder / "texts"))
    rows, held_out = (
        example.packed_rows(example.documents(args, tokenizer, held_out=held), TOKENS, skip=0) for held in (False, True)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * example.share_of_rate(step, 2, STEPS)
        mean_loss(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model, float(mean_loss(model, held_out))


def mean_loss(model: Any, rows: Iterator[dict[str, Tensor]]) -> Tensor:
    """Over the targets of two rows."""
    batches = [next(rows), next(rows)]
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
    return sum(model(**batch).loss * n for batch, n in zip(batches, counts, strict=True)) / sum(counts)  # type: ignore


@pytest.mark.slow
def test_a_checkpoint_trains_as_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on where it was stopped, from a data set that holds the same texts; `from_pretrained` reads the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    example: Any = importlib.import_module("train_checkpoint")
    page = (ROOT / "docs" / "guides" / "checkpoint.md").read_text()
    torch.manual_seed(0)
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
    before: Any = importlib.import_module("safetensors.torch").load_file("tiny/model.safetensors")

    held_out = train(tmp_path, "texts", "whole")
    model, expected = train_alone(example, tmp_path)
    assert held_out == pytest.approx(expected, rel=1e-5)
    read: Any = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained("whole/final")
    weights = dict(read.named_parameters())
    for name, weight in model.named_parameters():
        moved = float((weight.detach() - before[name]).norm())
        assert moved > 0
        assert float((weights[name] - weight).norm()) <= 1e-3 * moved, name
    ids = torch.arange(60)[None]
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)

    datasets: Any = importlib.import_module("datasets")
    datasets.Dataset.from_dict({"text": list(example.texts(SimpleNamespace(data="texts")))}).save_to_disk("set")
    shutil.copytree("whole/step-2", "stopped/step-2")
    Path("stopped/last").write_text("step-2")
    assert train(tmp_path, "set", "stopped") == held_out
    resumed: Any = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained("stopped/final")
    assert all(torch.equal(weights[name], weight) for name, weight in resumed.named_parameters())
