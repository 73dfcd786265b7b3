"""A flat mesh over several nodes: heads inside of nodes, rows between them, and the bytes that cross."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.active import active_plan
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.choose_exchange import needed_bytes, scattered_bytes
from cp_rewrite.planning.cost.devices import DEVICES, Model
from cp_rewrite.planning.cost.load import load_of
from cp_rewrite.planning.names import part_of
from cp_rewrite.planning.routes.grid import outer_schedule
from cp_rewrite.torch_internals import process_group
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

from .test_end_to_end import LIMIT, TOKENS, make_batch, plain_step

LENGTHS = [40, 23, 1, 56, 900, 3, 17, 200]
LAYERS, HEADS, DIM = 2, (4, 2), 8
CASES: dict[str, tuple[int, int, str, str]] = {
    "rows": (4, 2, "needed", "needed"),
    "heads": (4, 2, "a2a+needed", "a2a+needed"),
    "chosen": (4, 2, "auto", "a2a+needed"),
}
"""By name: ranks, ranks of a node, the exchange that is asked for, and the one that runs."""
SLOW = replace(DEVICES["h200"], name="slow", node_link=1e5, link=1e6, all_to_all=1e6, latency=1e-9, node_latency=1e-9)


def planned_bytes(plan: BatchPlan, rank: int, size: int, name: str) -> float:
    """Bytes that a rank gets from other nodes in a forward by the plan, of fp32."""
    load, model, mask = load_of(plan.schedule(cp.PackedMask())), Model(HEADS, DIM, 4), cp.PackedMask()
    if name == "needed":
        return LAYERS * float(needed_bytes(load, model, size)[1][rank])
    places = load_of(outer_schedule(plan, mask, part_of(name) or size))
    return LAYERS * float(scattered_bytes(load, places, model, size)[1][rank])


def step(mesh: DeviceMesh, size: int, exchange: Any, runs: str) -> tuple[float, dict[str, Any], int, float, set[int]]:
    """(loss, gradients, bytes that came from other nodes in the forward, those of the plan, nodes among which heads are
    scattered)"""
    torch._dynamo.reset()
    packing, here = cp.PositionIds("position_ids"), mesh.get_local_rank() // size
    sharding = cp.Sharding(
        mesh, TOKENS, packing, exchange=exchange, ranks_per_node=size, speeds=SLOW, inner="eager",
        heads=HEADS, head_dim=DIM,
    )  # fmt: skip
    model, counted, plain = build_model("llama"), [0], dist.all_to_all_single
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)

    def count(out: Any, given: Any, out_sizes: list[int], *rest: Any, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        rows = sum(n for rank, n in zip(ranks, out_sizes, strict=True) if rank // size != here)
        counted[0] += rows * out.shape[1] * out.itemsize
        return plain(out, given, out_sizes, *rest, group=group)

    with (
        sharding.shard(make_batch([LENGTHS]), shift_labels=True) as local,
        patch.object(dist, "all_to_all_single", count),
    ):
        loss = sharding.whole(compiled(**local).loss)
        forward = counted[0]
        assert {site.exchange for site in active_plan(sharding).sites} == {runs}
        planned = planned_bytes(local.plan, sharding.rank, size, runs)
    loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    group = process_group(sharding.grid_groups(runs)[1]) if runs != "needed" else None
    nodes = {rank // size for rank in dist.get_process_group_ranks(group)} if group else {here}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads if sharding.rank == 0 else {}, forward, planned, nodes


@pytest.mark.parametrize("case", ["heads", *(pytest.param(x, marks=pytest.mark.slow) for x in CASES if x != "heads")])
def test_bytes_between_nodes_are_those_of_the_plan(pool: Pool, case: str) -> None:
    ranks, size, exchange, runs = CASES[case]
    expected, wanted = plain_step("llama", make_batch([LENGTHS]))
    found = pool.run(ranks, step, size, exchange, runs)
    for rank, (loss, _, counted, planned, nodes) in enumerate(found):
        assert loss == pytest.approx(expected, rel=LIMIT)
        assert counted == planned
        assert nodes == {rank // size}
    assert sum(counted for _, _, counted, _, _ in found) > 0
    for name, grad in wanted.items():
        assert float((found[0][1][name] - grad).norm() / grad.norm().clamp_min(1e-6)) <= LIMIT, name
