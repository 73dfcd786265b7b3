"""What is done before or after `parallelize` in the wrong order, and meshes that lack a dim: errors, not models that
stand still or drift apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_rewrite as cp
from tests.batch.test_steps import TOKENS, Model
from tests.helpers.pool import Pool


def slips_on(mesh: DeviceMesh) -> None:
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"an optimizer \(AdamW\) was made of this model's weights"):
        cp.parallelize(model, mesh, sharding)
    del optimizer
    model = cp.parallelize(model, mesh, sharding)
    assert isinstance(model, Model)
    model.second = nn.Linear(8, 1)
    batch = {"x": torch.randn(1, 7, 4), "position_ids": torch.arange(7)[None]}
    with sharding.shard(batch) as local, pytest.raises(RuntimeError, match="put in or taken out after parallelize"):
        model(**local)
    groups = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "cp"))
    alone = cp.Sharding(groups["cp"], TOKENS, cp.PositionIds("position_ids"), inner="eager")
    with pytest.raises(ValueError, match=r"slice \('cp',\) of a mesh \('dp', 'cp'\) of 2 processes"):
        cp.parallelize(Model(), groups["cp"], alone)


def test_slips_around_parallelize_are_errors(pair: Pool) -> None:
    pair.run(2, slips_on)
