"""The page and the script that train a checkpoint of Hugging Face, as a reader follows them, against one process."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.models import build_model
from tests.helpers.pages import ROOT, blocks_of, follow, run_line
from tests.helpers.pool import Pool

PAGE = "docs/guides/checkpoint.md"
STEPS, TOKENS, RATE, WARMUP, EVAL_BATCHES = 4, 501, 1e-3, 10, 4
"""Numbers that the page's command gives, and those that it leaves to the script."""
WIDE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "head_dim": 64, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Llama-3.2-1B's widths, half of its layers."""


def train_alone(example: Any, device: str = "cpu", tokens: int = TOKENS, steps: int = STEPS) -> tuple[Any, float]:
    """The same rows on the plain model, without this project: it, and its loss of held-out text. On GPUs in bf16 over
    fp32 weights."""
    transformers: Any = importlib.import_module("transformers")
    # With a cache, its default, transformers leaves the mask of packed documents out.
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny", use_cache=False, dtype=torch.float32)
    model.to(device)
    tokenizer, args = transformers.AutoTokenizer.from_pretrained("tiny"), SimpleNamespace(data="texts")
    rows, held_out = (
        example.packed_rows(example.documents(args, tokenizer, held_out=held), tokens, skip=0) for held in (False, True)
    )

    def loss_of(batch: dict[str, torch.Tensor]) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(**{name: value.to(device) for name, value in batch.items()}).loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * example.share_of_rate(step, WARMUP, steps)
        loss_of(next(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    batches = [next(held_out) for _ in range(EVAL_BATCHES)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    with torch.no_grad():
        losses = [float(loss_of(batch)) * count for batch, count in zip(batches, counts, strict=True)]
    return model, sum(losses) / sum(counts)


def weights_of_experts(mesh: DeviceMesh, folder: str) -> dict[str, torch.Tensor]:
    """Those that the script loads of files that name single experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        example: Any = importlib.import_module("train_checkpoint")
        args = SimpleNamespace(folder=folder, checkpointing=False, offload=[])
        sharding = cp.Sharding(mesh, example.TOKENS, cp.PositionIds("position_ids"), inner="eager")
        model = example.load(args, mesh, sharding)
        return {name: x.full_tensor() for name, x in model.named_parameters()}


@pytest.mark.slow
def test_files_of_single_experts_are_loaded(pair: Pool, tmp_path: Path) -> None:
    model = build_model("qwen3_moe", called=False)
    model.save_pretrained(tmp_path)
    assert any("experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    for found in pair.run(2, weights_of_experts, str(tmp_path)):
        assert all(torch.equal(found[name], x) for name, x in model.named_parameters())


@pytest.mark.parametrize(
    ("files", "lacks"), [((), "config.json and no *.safetensors"), (("config.json",), "*.safetensors")]
)
def test_a_folder_without_weights_ends_before_ranks_meet(
    files: tuple[str, ...], lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    monkeypatch.syspath_prepend(ROOT / "examples")
    example: Any = importlib.import_module("train_checkpoint")
    monkeypatch.setattr(sys, "argv", ["train_checkpoint.py", str(tmp_path), "--data", "texts"])
    monkeypatch.setattr(example, "start", lambda: pytest.fail("ranks met"))
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert str(ended.value).startswith(f"{tmp_path} holds no {lacks}: give the folder of a whole checkpoint")


def held_out_loss(printed: str) -> float:
    return float(printed.split()[-1])


@pytest.mark.sweep
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

    datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": list(example.texts(SimpleNamespace(data="texts")))}).save_to_disk("set")
    shutil.copytree("out/train_checkpoint/step-2", "stopped/step-2")
    Path("stopped/last").write_text("step-2")
    (command,) = (block.code for block in blocks_of(PAGE) if block.language == "sh" and not block.needs)
    again = run_line(command.strip().replace("--data texts", "--data set --out stopped"), tmp_path)
    assert held_out_loss(again) == held_out_loss(said)
    assert all(
        torch.equal(weights[name], weight) for name, weight in from_pretrained("stopped/final").named_parameters()
    )


@pytest.mark.gpu
def test_a_checkpoint_of_llama_widths_trains_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the loss of held-out text falls as far on 2 GPUs as on one without this project; that of the folder that
    was saved is the same."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    example: Any = importlib.import_module("train_checkpoint")
    transformers: Any = importlib.import_module("transformers")
    (making, *_) = (block.code for block in blocks_of(PAGE) if block.language == "python")
    exec(making, {})
    config = transformers.AutoConfig.from_pretrained("tiny")
    config.update(dict(WIDE))
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("tiny")
    _, before = train_alone(example, "cuda", 8192, 0)
    _, alone = train_alone(example, "cuda", 8192, 8)
    torch.cuda.empty_cache()
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    options = f"tiny --data texts --tokens 8192 --steps 8 --lr {RATE} --checkpointing"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_NVLS_ENABLE": "0"}
    environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    words = f"{command} {ROOT}/examples/train_checkpoint.py {options}".split()
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    said = held_out_loss(run.stdout)
    shutil.rmtree("tiny")
    Path("out/train_checkpoint/final").rename("tiny")
    _, saved = train_alone(example, "cuda", 8192, 0)
    print(f"held-out loss: {before:.4f} before, {alone:.4f} on one GPU alone, {said:.4f} on 2, {saved:.4f} as saved")
    assert alone < before - 1
    assert said == pytest.approx(alone, abs=0.02 * (before - alone))
    assert saved == pytest.approx(said, abs=0.01 * (before - alone))
