"""Benchmarks measure what a user runs: plans, exchanges and kernels of a compiled model, for the heads at hand."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.cost.devices import Model, SiteKind
from cp_rewrite.planning.layouts.options import LayoutOptions
from tests.helpers.pages import ROOT, run_line
from tests.helpers.pool import Pool

LENGTHS = (23, 122, 25, 51, 35)
"""They are laid out in another way for 8 and 8 heads of 16 in fp32 than for 64 and 8 of 128 in bf16."""
SHAPES = ((16, 2), (8, 8))
Found = list[tuple[str, str, list[int], list[int]]]


def bench(name: str) -> Any:
    folder = str(ROOT / "examples" / "bench")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def planned(mesh: DeviceMesh) -> Found:
    """Of each shape: exchange, kernel, and owners of tokens by the compiled layer, and by `plan` of the benchmark."""
    methods, pack = bench("methods"), bench("packs").Pack("pack", LENGTHS)
    found: Found = []
    for heads, heads_kv in SHAPES:
        group = mesh.get_group().group_name
        setup = methods.Setup(mesh.get_rank(), 2, group, heads, heads_kv, 16, torch.float32, "reference", "cpu")
        layer = methods.Layer(setup, "auto")
        compiled = layer.on(pack)
        exchange, kernel = layer.decision.exchange_name, layer.decision.kernel
        assert check_numbers(compiled, pack) < 1e-5
        for alone in (False, True):
            ops = methods.ops_of(compiled, pack, alone=alone)
            ops.forward()
            assert len(ops.q) == compiled.local["q"].shape[1]
            ops.backward()
        owners = [p.orders[0].rank_of().tolist() for p in (compiled.plan, methods.plan(pack, setup, exchange=exchange))]
        compiled.close()
        found.append((exchange, kernel, *owners))
    return found


def check_numbers(compiled: Any, pack: Any) -> float:
    """How far a compiled layer's whole output is from one process's."""
    whole = compiled.layer.sharding.unshard(compiled.forward().detach(), 1)
    batch = compiled._batch(pack)
    q, k, v = (batch[name].transpose(1, 2) for name in ("q", "k", "v"))
    same = batch["doc_ids"][:, None, :, None] == batch["doc_ids"][:, None, None, :]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril(), enable_gqa=True).transpose(1, 2)
    return float((whole - expected).norm() / expected.norm())


def test_a_compiled_layer_gets_the_plan_of_its_heads(pool: Pool) -> None:
    mine, others = pool.run(2, planned)
    assert mine == others
    documents = [bench("packs").Pack("pack", LENGTHS).documents]
    usual = plan_batch(documents, 2).orders[0].rank_of().tolist()
    for (heads, heads_kv), (exchange, kernel, owners, by_bench) in zip(SHAPES, mine, strict=True):
        assert (exchange, kernel) == ("needed", "reference")
        site = SiteKind(Model((heads, heads_kv), 16, 4), exchange)
        options = LayoutOptions(model=site.model, exchange=exchange)
        assert owners == plan_batch(documents, 2, options=options).orders[0].rank_of().tolist()
        assert by_bench == owners
    assert usual not in [owners for _, _, owners, _ in mine[1:]]


@pytest.mark.slow
def test_attention_prints_one_table(tmp_path: Path) -> None:
    line = "torchrun --nproc-per-node 2 examples/bench/attention.py --tiny --dim 16 --seed 7 --only"
    printed = run_line(f"{line} 'one 16K,drawn 1,drawn 5'", tmp_path).splitlines()
    table = [row.split(" | ") for row in printed if row.startswith("| ") and not row.startswith("| pack")]
    assert [row[1] for row in table] == ["64/8"] * 3 + ["32/32"] * 3
    assert [row[0][2:] for row in table[:3]] == [row[0][2:] for row in table[3:]]
    assert re.fullmatch(r"drawn 5 of 7: long_tail \d+K/GPU \(\d+ docs\)", table[2][0][2:])
    for row in table:
        assert row[2] == "needed, reference"
        assert all(re.fullmatch(r"\d+/\d+/\*\*\d+\*\*", row[i]) for i in (4, 6)), row
    assert re.fullmatch(r"seed 7, \d+ s", printed[-1])
    packs = bench("packs")
    assert len(packs.table_packs(2)) == len(packs.drawn_packs(2, 7)) == 6


@pytest.mark.slow
def test_host_time_says_from_where_on_the_host_is_no_limit(tmp_path: Path) -> None:
    line = "torchrun --nproc-per-node 2 examples/bench/host_time.py --tiny --dim 8 --heads 4 --heads-kv 2 --only one"
    *_, last = run_line(f"{line} --sizes 8,16", tmp_path).splitlines()
    assert re.match(r"the host is (not )?the limit (up to|from) ", last)


@pytest.mark.slow
def test_selective_scans_are_timed(tmp_path: Path) -> None:
    _, *rows = run_line("python examples/bench/selective.py --tiny", tmp_path).splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| one document, 96", "| 4 documents, 96"]


def test_tokens_from_which_on_the_host_is_no_limit() -> None:
    enough = bench("host_time").enough_tokens
    assert enough([(2048, 1.0, 0.5), (4096, 1.0, 1.5)]).endswith("from about 3,072 tokens a GPU on")
    assert enough([(2048, 1.0, 2.0), (4096, 1.0, 4.0)]).endswith("from 2,048 tokens a GPU on, or from fewer")
    assert enough([(2048, 1.0, 0.5), (4096, 1.0, 0.9)]) == "the host is the limit up to 4,096 tokens a GPU, or more"
    assert enough([]) == ""
