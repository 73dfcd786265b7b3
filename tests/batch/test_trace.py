"""Scalars of each batch over a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.trace import Traffic
from cp_rewrite.planning.batch_plan import plan_batch
from tests.helpers.pool import Pool

LENGTHS = (20, 5, 7)
WINDOW = cp.PackedMask(window=(3, 0))


def model(x: Tensor, pos: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    document = (pos == 0).cumsum(-1)
    mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return q


def run(mesh: DeviceMesh) -> tuple[list[dict[str, float]], int]:
    sharding = cp.Sharding(mesh, {"x": 1, "pos": 1}, cp.PositionIds("pos"), exchange="needed", inner="eager")
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    torch.manual_seed(0)
    batch = {"x": torch.randn(1, 32, 8), "pos": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    most = 0
    with cp.trace() as trace:
        for _ in range(2):
            with sharding.shard(batch) as local:
                compiled(**local)
                most = int(local.plan.schedule(cp.PackedMask()).received.sum(1).max())
        assert trace.last == trace.steps[-1]
    with sharding.shard(batch) as local:  # the trace is closed
        compiled(**local)
    return trace.steps, most


def test_ranks_record_the_same_of_each_batch(pool: Pool) -> None:
    found = pool.run(2, run)
    (steps, most), (others, _) = found
    assert len(steps) == 2
    assert most > 0
    for step, other in zip(steps, others, strict=True):
        assert step.pop("planning_ms") > 0
        other.pop("planning_ms")
        assert step == other
        assert step["tokens"] == 32
        assert step["documents"] == 3
        assert step["imbalance"] >= 1
        assert step["received_rows"] == most
        assert step["received_bytes"] == 2 * most * 2 * (2 * 4) * 4  # layers, rows, keys and values of 2 heads, fp32


@pytest.mark.parametrize(
    ("exchange", "rows", "size"),
    [
        ("all_gather", 48, 480),
        ("p2p", 48, 480),
        ("a2a", 0, 16 * 3 * 110 // 4),
        ("needed", None, None),
        ("push", None, None),
    ],
)
def test_what_travels_is_what_the_exchange_moves(exchange: str, rows: int | None, size: int | None) -> None:
    plan = plan_batch([cp.Documents.from_lengths([40, 24])], 4)
    most = int(plan.schedule(cp.PackedMask()).received.sum(1).max())
    expected = (most, 10 * most) if rows is None else (rows, size)
    assert Traffic(cp.PackedMask(), exchange, 10, 100).received(plan) == expected


def test_a_run_is_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with cp.trace() as trace:
        assert trace.last == {}
        plan = plan_batch([cp.Documents.from_lengths([40, 24])], 4)
        trace.note(plan, [Traffic(cp.PackedMask(), "needed", 10, 100), Traffic(WINDOW, "needed", 10, 100)], 0.001)
        trace.note(plan, [], 0.003)  # a replayed step
    first, second = trace.steps
    assert first["received_bytes"] == second["received_bytes"] > 0
    assert first["imbalance"] == max(plan.imbalance(), plan.imbalance(WINDOW))
    table = str(trace)
    assert table.startswith("2 batches")
    assert table.splitlines()[-1].split() == ["planning_ms", "2.000", "1.000", "3.000"]
    trace.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
