"""The page and the script that train a checkpoint of Hugging Face, as a reader follows them, against one process."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.pages import ROOT, blocks_of, follow, run_line

PAGE = "docs/guides/checkpoint.md"
STEPS, TOKENS, RATE, WARMUP, EVAL_BATCHES = 4, 501, 1e-3, 10, 4
"""What the page's command says, and what it leaves to the script."""


def train_alone(example: Any) -> tuple[Any, float]:
    """The same rows on the plain model, without this project: it, and its loss of held-out text."""
    transformers: Any = importlib.import_module("transformers")
    # With a cache, its default, transformers leaves the mask of packed documents out.
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", use_cache=False)
    tokenizer, args = transformers.AutoTokenizer.from_pretrained("tiny"), SimpleNamespace(data="texts")
    rows, held_out = (
        example.packed_rows(example.documents(args, tokenizer, held_out=held), TOKENS, skip=0) for held in (False, True)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * example.share_of_rate(step, WARMUP, STEPS)
        model(**next(rows)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    batches = [next(held_out) for _ in range(EVAL_BATCHES)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    with torch.no_grad():
        losses = [float(model(**batch).loss) * count for batch, count in zip(batches, counts, strict=True)]
    return model, sum(losses) / sum(counts)


def held_out_loss(printed: str) -> float:
    return float(printed.split()[-1])


@pytest.mark.slow
def test_the_fsdp_script_ends_well(tmp_path: Path) -> None:
    command = (
        f"-m torch.distributed.run --standalone --nproc-per-node 2 examples/train_fsdp.py --steps 3 --out {tmp_path}"
    )
    run = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "step 3: loss" in run.stdout


@pytest.mark.slow
def test_a_checkpoint_trains_as_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on where it was stopped, from a data set that holds the same texts; `from_pretrained` reads the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    example: Any = importlib.import_module("train_checkpoint")
    from_pretrained: Any = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained
    torch.manual_seed(0)
    (said,) = follow(PAGE, tmp_path, {})
    model, expected = train_alone(example)
    assert held_out_loss(said) == pytest.approx(expected, rel=1e-5)
    before: Any = importlib.import_module("safetensors.torch").load_file("tiny/model.safetensors")
    read = from_pretrained("out/train_checkpoint/final")
    weights = dict(read.named_parameters())
    for name, weight in model.named_parameters():
        moved = float((weight.detach() - before[name]).norm())
        assert moved > 0
        assert float((weights[name] - weight).detach().norm()) <= 1e-3 * moved, name
    ids = torch.arange(60)[None]
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)

    datasets: Any = importlib.import_module("datasets")
    datasets.Dataset.from_dict({"text": list(example.texts(SimpleNamespace(data="texts")))}).save_to_disk("set")
    shutil.copytree("out/train_checkpoint/step-2", "stopped/step-2")
    Path("stopped/last").write_text("step-2")
    (command,) = (block.code for block in blocks_of(PAGE) if block.language == "sh" and not block.needs)
    again = run_line(command.strip().replace("--data texts", "--data set --out stopped"), tmp_path)
    assert held_out_loss(again) == held_out_loss(said)
    assert all(
        torch.equal(weights[name], weight) for name, weight in from_pretrained("stopped/final").named_parameters()
    )
