"""A checkpoint of one layout of ranks goes on with others: same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_rewrite as cp
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

from .test_end_to_end import TOKENS, make_batch

ROWS = [[13, 1, 7], [30, 3], [5, 3], [9, 2, 12]]
"""Documents of the row of each rank, which groups of ranks join."""
LAYOUTS = ["cp 4", "dp 2, cp 2", "one plan"]


def joined(rows: list[list[int]]) -> dict[str, Tensor]:
    """One packed row of several, each with tokens of its own."""
    batches = [make_batch([row]) for row in rows]
    return {name: torch.cat([batch[name] for batch in batches], 1) for name in batches[0]}


def start(mesh: DeviceMesh, layout: str) -> tuple[Any, cp.Sharding, list[list[int]], int]:
    """(model, annotation, rows of this rank's batch, groups that average their losses)"""
    torch._dynamo.reset()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")) if layout == "dp 2, cp 2" else mesh
    ours = grid["cp"] if grid.ndim == 2 else mesh
    options: Any = {"rows": "own"} if layout == "one plan" else {}
    sharding = cp.Sharding(ours, TOKENS, cp.PositionIds("position_ids"), inner="eager", **options)
    rank = dist.get_rank()
    mine = {"cp 4": ROWS, "dp 2, cp 2": ROWS[rank // 2 * 2 :][:2], "one plan": ROWS[rank : rank + 1]}[layout]
    return cp.parallelize(build_model("llama"), grid, sharding), sharding, mine, grid.size() // ours.size()


def run(mesh: DeviceMesh, layout: str, folder: str, saves: bool) -> list[float]:
    """Losses of two steps behind the checkpoint, which is made after two others where it `saves`."""
    model, sharding, mine, groups = start(mesh, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not saves:
        weights, moments = get_state_dict(model, optimizer)
        loaded: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    losses: list[float] = []
    for step in range(4 if saves else 2):
        if saves and step == 2:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
            losses.clear()
        batch, every = joined(mine), joined(ROWS)
        # A rank's own targets are summed over ranks; elsewhere losses of groups are averaged.
        own = sharding.rows == "own"
        count: Tensor = ((batch if own else every)["labels"][:, 1:] != -100).sum()
        with sharding.shard({**batch, "num_items_in_batch": count if own else count / groups}, shift_labels=True) as x:
            loss: Tensor = model(**x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.size())
    return losses


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_layouts(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(4, run, LAYOUTS[0], str(tmp_path / "at"), True)[0]
    assert expected[1] < expected[0]
    for layout in LAYOUTS:
        for found in pool.run(4, run, layout, str(tmp_path / "at"), False):
            assert found == pytest.approx(expected, rel=1e-5), layout
