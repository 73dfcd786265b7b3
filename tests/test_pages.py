"""Every block of code in README and docs/ is run as it is written, on CPUs: a page's blocks from top to bottom.

What a page can't define itself (a model, a batch, how many ranks there are) comes from here. Pages that need ranks run
on gloo processes, with eager execution in Inductor's place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import make_batch
from tests.helpers import images
from tests.helpers.gpts import ROW, VOCAB, NanoChat, NanoGPT
from tests.helpers.models import SMALL, build_model
from tests.helpers.pages import PAGES, blocks_of, follow, name_of
from tests.helpers.pool import Pool

Names = dict[str, Any]
LEFT_OUT = {
    ("docs/guides/checkpoint.md", "needs GPUs"),
    ("docs/guides/code_bases.md", "needs litgpt"),
    ("docs/guides/code_bases.md", "needs torchtitan"),
    ("docs/guides/experts.md", "needs GPUs"),
    ("docs/guides/hybrids.md", "needs GPUs"),
    ("docs/reference/usage.md", "needs GPUs"),
}
"""Blocks that say why they don't run here. tests/end_to_end/test_recipes.py does what those of other packages do."""
ALONE = ["README.md", "docs/getting_started.md", "docs/guides/checkpoint.md", "docs/guides/fsdp.md"]
"""Pages of shell, README's Python is for ranks. checkpoint.md runs in tests/integrations/test_example.py."""


def a_model(**more: Any) -> Names:
    return {"device": "cpu", "model": build_model("llama"), "batch": make_batch([[13, 1, 7, 11]]), **more}


def rows_of_a_gpt() -> Names:
    ids = torch.randint(0, VOCAB, (2, ROW + 1), generator=torch.Generator().manual_seed(0))
    return {"device": "cpu", "x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous(), "model": NanoGPT()}


def texts() -> Names:
    trl_tests: Any = importlib.import_module("tests.integrations.test_trl")
    datasets: Any = importlib.import_module("datasets")
    found = datasets.Dataset.from_dict({"text": [trl_tests.text(n, n) for n in (13, 29, 18, 61, 7, 20)]})
    pairs = {
        "prompt": [trl_tests.text(9 + i, i) for i in range(4)],
        "chosen": [" " + trl_tests.text(20 - i, 50 + i) for i in range(4)],
        "rejected": [" " + trl_tests.text(12 + 2 * i, 90 + i) for i in range(4)],
    }
    return a_model(
        texts=found,
        tokenizer=trl_tests.tokenizer(),
        pairs=datasets.Dataset.from_dict(pairs),
        reference=build_model("llama"),
    )


def rows_of_images() -> Names:
    model = images.build("Qwen3VL")
    batch = images.rows((3, (4, 4), 20), (9, (2, 6), 1, (4, 4), 10))
    return {"device": "cpu", "ranks": 4, "model": model, "batch": batch}


def has_images_gradients(names: Names) -> None:
    alone: Any = images.build("Qwen3VL")
    alone(**images.rows((3, (4, 4), 20), (9, (2, 6), 1, (4, 4), 10))).loss.backward()
    for ours, theirs in zip(names["model"].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)


def trained(names: Names) -> None:
    assert all(bool(p.grad is None) for p in names["model"].parameters())  # the last step's are set to None
    assert names["loss"].isfinite()


def has_gradients(names: Names) -> None:
    alone: Any = build_model("llama")
    alone(**names["batch"]).loss.backward()
    for ours, theirs in zip(names["model"].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def trains_two_nodes(names: Names) -> None:
    compiled = torch.compile(names["model"], backend=cp.backend(names["sharding"]), fullgraph=True)
    with names["sharding"].shard(names["batch"], shift_labels=True) as local:
        loss = names["sharding"].whole(compiled(**local).loss)
    expected: Any = build_model("llama")
    torch.testing.assert_close(loss, expected(**names["batch"]).loss, rtol=1e-5, atol=0)


def clips(names: Names) -> None:
    """QK-clip of largest logits that a step noted; and GRPO's mask and loss on a row of two prompts."""
    prompts, completions = torch.tensor([[1, 1, 1, 1, 2, 2]]), torch.tensor([[0, 0, 1, 2, 0, 1]])
    seen = names["mask"](prompts, completions)[0, 0]
    assert seen[3].tolist() == [True, True, False, True, False, False]
    old, labels = -torch.rand(1, 6), torch.tensor([[-100, 3, 4, 5, -100, 2]])
    assert names["loss"](torch.randn(1, 6, 9), labels, old, torch.rand(1, 6), 4).isfinite()
    tokens = {"input_ids": 1, "position_ids": 1, "labels": 1}
    sharding = cp.Sharding(names["mesh"], tokens, cp.PositionIds("position_ids"), max_logits=True)
    compiled = torch.compile(names["model"], backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(names["batch"], shift_labels=True) as local:
        compiled(**local)
    before = names["model"].model.layers[0].self_attn.q_proj.weight.clone()
    names["qk_clip"](names["model"], sharding, kv_heads=2, tau=1e-3)
    assert float(names["model"].model.layers[0].self_attn.q_proj.weight.norm()) < float(before.norm())


def is_the_pages_smear(names: Names) -> None:
    """nanochat's model with the page's lines in the place of its own."""
    model = NanoChat(published=True)
    assert names["smear"](model, torch.randn(1, 5, model.smear_gate.in_features)).shape[1] == 5


ON_RANKS: dict[str, tuple[Callable[[], Names], Callable[[Names], None]]] = {
    "README.md": (lambda: a_model(batches=[make_batch([[13, 1, 7, 11]]), make_batch([[20, 9]])]), trained),
    "docs/guides/own_loop.md": (lambda: a_model(ranks=4), has_gradients),
    "docs/guides/images.md": (rows_of_images, has_images_gradients),
    "docs/guides/many_nodes.md": (lambda: a_model(nodes=2, ranks_of_a_node=2), trains_two_nodes),
    "docs/guides/recipes.md": (lambda: a_model(mesh=DeviceMesh("cpu", [0, 1, 2, 3])), clips),
    "docs/guides/code_bases.md": (rows_of_a_gpt, is_the_pages_smear),
    "docs/guides/trainers.md": (texts, lambda names: None),
    "docs/reference/integrations.md": (lambda: a_model(batches=[make_batch([[13, 1, 7, 11]])]), trained),
}
"""Page -> what it begins with, and what is asked of the names that it leaves."""


def forwards(names: Names) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(9, 32), nn.Linear(32, 96), nn.Linear(32, 9)

    ids = torch.arange(6)[None]
    assert names["forward"](Model(), ids, ids // 3, ids).isfinite()


def plans(names: Names) -> None:
    assert names["p"].world_size == 4
    assert Path("plan.png").exists()


def hybrid_plans(names: Names) -> None:
    """Check what the page's comment says of both plans."""
    model: Any = {"heads": (16, 2), "head_dim": 256}
    both, attention = (cp.plan([8192], 2, states=states, **model).rank_of for states in (names["states"], None))
    assert both.tolist() == [0] * 4096 + [1] * 4096
    assert sorted(zip(*np.unique(attention[::2048], return_counts=True), strict=True)) == [(0, 2), (1, 2)]
    assert attention[0] == attention[-1]


def gives_rows(names: Names) -> None:
    assert names["y"].shape == (10, 32)
    assert names["y"].isfinite().all()


IN_ONE_PROCESS: dict[str, tuple[Names, Callable[[Names], None]]] = {
    "docs/guides/experts.md": ({"cp": cp, "torch": torch}, gives_rows),
    "docs/guides/hybrids.md": ({"cp": cp}, hybrid_plans),
    "docs/guides/memory.md": (
        {"cp": cp, "mesh": 2, "tokens": {"ids": 1}, "packing": cp.WholeRows()},
        lambda names: None,
    ),
    "docs/internals/architecture.md": ({"F": F}, forwards),
    "docs/internals/planner.md": ({}, plans),
    "docs/versions.md": ({}, lambda names: None),
}


def test_each_block_runs_or_says_what_it_needs() -> None:
    pages = {page: blocks_of(page) for page in map(name_of, PAGES)}
    assert {(page, block.needs) for page, blocks in pages.items() for block in blocks if block.needs} == LEFT_OUT
    run = {*ALONE, *ON_RANKS, *IN_ONE_PROCESS}
    assert {page for page, blocks in pages.items() if any(not block.needs for block in blocks)} == run
    for page in pages:  # a fence that is read otherwise would be left out in silence
        fences = re.findall(
            r"^\s*```(?:python|py|sh|bash|console)\b", (PAGES[0].parent / page).read_text(), re.MULTILINE
        )
        assert len(fences) == len(pages[page]), page


SLOW = ("docs/guides/memory.md",)


@pytest.mark.parametrize("page", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in IN_ONE_PROCESS])
def test_pages_run_in_one_process(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_model("llama").config.save_pretrained(tmp_path / "path/to/config_folder")
    begin, ask = IN_ONE_PROCESS[page]
    follow(page, tmp_path, names := dict(begin))
    ask(names)


def run_as_rank(mesh: DeviceMesh, page: str, folder: Path) -> None:
    """The page's Python, on four ranks."""
    begin, ask = ON_RANKS[page]
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = mock.patch("cp_rewrite.entry.lookup_backend", return_value=lambda gm, *_, **__: gm)
    with contextlib.chdir(folder), eager, launched(mesh, page):
        follow(page, folder, names := begin(), languages=("python",))
        ask(names)


@contextlib.contextmanager
def launched(mesh: DeviceMesh, page: str) -> Generator[None]:
    """For a page of trainers, or of accelerate, what torchrun sets, and what a trainer must be told where there is no
    GPU."""
    if page not in ("docs/guides/trainers.md", "docs/reference/integrations.md"):
        yield
        return
    trl: Any = importlib.import_module("trl")
    quiet = {"use_cpu": True, "bf16": False, "max_steps": 2, "report_to": [], "save_strategy": "no"}
    configs: Any = {name: functools.partial(getattr(trl, name), **quiet) for name in ("SFTConfig", "DPOConfig")}
    runs: Any = importlib.import_module("tests.integrations.runs")
    without_gpus = mock.patch.dict("os.environ", ACCELERATE_USE_CPU="true")
    with runs.launched(mesh), mock.patch.multiple(trl, **configs), without_gpus:
        yield


@pytest.mark.slow
@pytest.mark.parametrize("page", ON_RANKS)
def test_pages_run_on_ranks(pool: Pool, page: str, tmp_path: Path) -> None:
    pool.run(4, run_as_rank, page, tmp_path)


@pytest.mark.slow
def test_the_first_page_trains_alike_on_one_process_and_on_two(tmp_path: Path) -> None:
    """As a newcomer follows it, to its last command, which reads a folder of a model."""
    transformers: Any = importlib.import_module("transformers")
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path / "path/to/config_folder")
    *runs, explained = follow("docs/getting_started.md", tmp_path, {})
    losses = [[float(loss) for loss in re.findall(r"step \d loss ([\d.]+)", text)] for text in runs]
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    assert explained


@pytest.mark.sweep
def test_the_page_of_fsdp_trains(tmp_path: Path) -> None:
    (said,) = follow("docs/guides/fsdp.md", tmp_path, {})
    assert re.search(r"step 2: loss \d\.\d+$", said.strip())


def test_readmes_commands_are_there(tmp_path: Path) -> None:
    assert follow("README.md", tmp_path, {}, languages=("sh",)) == []
