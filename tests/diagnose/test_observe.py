"""Logs, counters, artifacts, and compile caches that never hand out old gradients."""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.calls import observe
from cp_rewrite.ops import attention
from cp_rewrite.ops.attention import register_attention
from tests.helpers.pool import Pool


def sharding_of(mesh: DeviceMesh | int = 1, **options: Any) -> cp.Sharding:
    return cp.Sharding(mesh, {"x": 1, "pos": 1}, cp.PositionIds("pos"), **options)


def model(x: Tensor, pos: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def sorting(x: Tensor, pos: Tensor) -> Tensor:
    return model(torch.fft.fft(x, dim=1).real, pos)


def run(function: Any = model, **options: Any) -> Tensor:
    """The gradient of x."""
    torch._dynamo.reset()
    values: dict[str, Any] = {"inner": "eager", **options}
    sharding = sharding_of(**values)
    compiled = torch.compile(function, backend=cp.backend(sharding), fullgraph=True)
    x = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with sharding.shard({"x": x, "pos": torch.arange(12)[None]}) as local:
        (grad,) = torch.autograd.grad(compiled(**local).square().sum(), x)
    return grad


def test_counters_tell_sites_exchanges_and_refusals() -> None:
    counters["cp_rewrite"].clear()
    run()
    assert dict(counters["cp_rewrite"]) == {
        "graphs rewritten": 1,
        "sites": 1,
        "exchange local": 1,
        "kernel reference": 1,
    }
    with pytest.raises(cp.RewriteRefused):
        run(sorting)
    assert counters["cp_rewrite"]["graphs refused"] == 1
    assert counters["cp_rewrite"]["refused TOKEN_MIXING"] == 1


def test_log_shows_each_pass_with_time_and_ops(caplog: pytest.LogCaptureFixture) -> None:
    torch._logging.set_logs(modules={"cp_rewrite": logging.DEBUG})
    logging.getLogger("cp_rewrite").addHandler(caplog.handler)
    try:
        run()
    finally:
        logging.getLogger("cp_rewrite").removeHandler(caplog.handler)
        torch._logging.set_logs()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("cp_rewrite")]
    for name in ("match_attention", "check_token_locality", "rewrite_sites"):
        assert any(line.startswith(f"{name}: ") and " ms, " in line and line.endswith(" ops") for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("value", ["+cp_rewrite", "+dynamo"])
def test_the_environment_variable_switches_the_log_on(value: str) -> None:
    environment = {**os.environ, "TORCH_LOGS": value, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    command = [sys.executable, "-c", "from tests.diagnose.test_observe import run; run()"]
    log = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    for name in ("match_attention", "check_token_locality", "rewrite_sites"):
        shown = re.search(rf"\b{name}: \d+\.\d ms, [+-]\d+ ops$", log, re.MULTILINE)
        assert bool(shown) == (value == "+cp_rewrite"), log


def ranges(mesh: DeviceMesh, exchange: Any) -> set[str]:
    """Names of the NVTX ranges of a forward and a backward, on a CPU that is taken for a GPU."""
    names: set[str] = set()
    inside: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cp_rewrite.kernels.cuda._has_nvtx", lambda: True)
        patch.setattr(torch.cuda.nvtx, "range_push", inside.append)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: names.add(inside.pop().removeprefix("cp_rewrite::")))
        run(mesh=mesh, exchange=exchange)
    assert not inside
    return names


def test_profilers_see_exchange_and_attention(pool: Pool) -> None:
    moved = {"exchange", "attention", "attention_backward"}
    assert pool.run(2, ranges, "p2p") == [moved] * 2
    assert pool.run(2, ranges, "needed") == [moved | {"exchange_backward"}] * 2


def test_artifacts_reach_the_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def listen(kind: str, metadata_fn: Any, payload_fn: Any, **_: Any) -> None:
        seen[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(observe, "trace_structured", listen)
    run()
    assert "scaled_dot_product_attention" in seen["cp_rewrite_before"]
    assert "cp_rewrite.packed_attention" in seen["cp_rewrite_after"]
    with pytest.raises(cp.RewriteRefused):
        run(sorting)
    assert "TOKEN_MIXING" in seen["cp_rewrite_refused"]


def test_the_hash_covers_all_sources() -> None:
    root = Path(observe.__file__).parent.parent
    assert (root / "passes" / "rewrite" / "rewrite_sites.py").exists()
    assert re.fullmatch("[0-9a-f]{16}", observe.source_hash())


OTHERS: dict[str, Any] = {
    "tokens": {"x": 1, "pos": 1, "labels": 1}, "packing": cp.DocumentIds("pos"), "exchange": "all_gather",
    "kernel": "reference", "exchange_at": "attention", "keep_kv": True, "ranks_per_node": 1, "speeds": "h200",
    "keep_outputs": True,
    "capacity": cp.Capacity(documents=8, pieces=8, rows=64), "deterministic": True, "inner": "aot_eager", "tile": 64,
    "strict": False, "resolve": False, "random": "per_rank", "assume_mask": cp.PackedMask(), "across_documents": True,
    "reset_states": True,
    "spans": cp.Spans("x"), "masks": {"mask": None}, "local_ops": ("my::op",), "verify": "first_step",
    "max_logits": True, "block_tokens": {"hidden_states": 1},
}  # fmt: skip
"""By field that a compiled graph depends on: a value beside the usual one."""


def tag_of(sharding: cp.Sharding) -> str:
    with observe.cache_key(sharding):
        return str(torch.compiler.config.cache_key_tag)


def test_caches_tell_annotations_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = sharding_of()
    assert OTHERS.keys() == usual.graph_options.keys()
    found = [tag_of(usual), tag_of(sharding_of(2)), *(tag_of(replace(usual, **{k: v})) for k, v in OTHERS.items())]
    assert len({*found}) == len(found)
    assert tag_of(usual) == found[0]
    monkeypatch.setattr(observe, "source_hash", lambda: "of other sources")
    assert tag_of(usual) not in found
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.slow
def test_a_changed_backward_is_no_stale_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(x: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attention._backward(x, 2 * dout)

    def hits() -> int:
        return counters["aot_autograd"]["autograd_cache_hit"]

    functorch_config: Any = importlib.import_module("torch._functorch.config")
    with fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        first, before = run(inner="inductor"), hits()
        try:
            register_attention(attention.packed_attention, doubled)
            stale = run(inner="inductor")
            assert hits() == before + 1  # this is what the hash is for
            assert torch.equal(stale, first)
            assert torch.equal(run(inner="inductor", verify="first_step"), 2 * first)  # another annotation
            assert hits() == before + 1
            monkeypatch.setattr(observe, "source_hash", lambda: "of other sources")
            assert torch.equal(run(inner="inductor"), 2 * first)
            assert hits() == before + 1
        finally:
            register_attention(attention.packed_attention, attention._backward)
