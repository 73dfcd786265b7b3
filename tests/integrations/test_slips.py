"""Steps before or after `parallelize` in the wrong order, and meshes that lack a dim: errors, not models that stand
still or drift apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

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


def other_models_on(mesh: DeviceMesh, kind: str) -> str:
    """The error where data-parallel groups of one rank begin with other weights, or with other buffers."""
    groups = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "cp"))
    sharding = cp.Sharding(groups["cp"], TOKENS, cp.PositionIds("position_ids"), inner="eager")
    model = Model()
    model.register_buffer("bias", torch.ones(3))
    with torch.no_grad():
        (model.get_buffer("bias") if kind == "buffer" else next(model.parameters())).add_(mesh.get_rank())
    with pytest.raises(RuntimeError) as raised:
        cp.parallelize(model, groups, sharding, data_parallel="ddp" if kind == "ddp" else "fsdp")
    return str(raised.value)


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "buffer"])
def test_groups_that_begin_with_other_models_are_errors(pair: Pool, kind: str) -> None:
    """Nor are parts of weights, as of tensor parallelism, stitched into one model."""
    for said in pair.run(2, other_models_on, kind):
        assert "ranks [1] of the group have other weights or buffers than rank 0" in said
        assert "data-parallel groups" in said


def parts_on(mesh: DeviceMesh) -> None:
    groups = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("cp", "tp"))
    sharding = cp.Sharding(groups["cp"], TOKENS, cp.PositionIds("position_ids"), inner="eager")
    model = parallelize_module(Model(), groups["tp"], {"*": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"weight is a DTensor.*tensor parallelism"):
        cp.parallelize(model, groups, sharding)


def test_tensor_parallel_weights_are_an_error(pair: Pool) -> None:
    pair.run(2, parts_on)


def odd_step(optimizer: torch.optim.Optimizer, odd: bool, slip: str) -> None:
    """A step in which an odd rank leaves something out; `None`: harmless, as all do the same."""
    if not (odd and slip == "step"):
        optimizer.step()
    if slip.startswith("kept") and odd:
        return
    optimizer.zero_grad(set_to_none=slip != "kept zeros")


def skipped_on(mesh: DeviceMesh, slip: str) -> str:
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager")
    model = cp.parallelize(Model(), mesh, sharding)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    try:
        for step in range(5):
            batch = {"x": torch.randn(1, 7, 4, generator=torch.Generator().manual_seed(step))}
            with sharding.shard({**batch, "position_ids": torch.arange(7)[None]}) as local:
                loss = model(**local)
            loss.backward()
            odd = step == 1 and (sharding.rank == 1 or slip == "kept by all")
            odd_step(optimizer, odd, slip)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("slip", "says"),
    [
        ("step", "ranks [1] of the group did not change their shards of the weights"),
        ("kept", "gradients that ranks had before a call are not of the same steps"),
        ("kept zeros", "gradients that ranks had before a call are not of the same steps"),
        ("kept by all", ""),
    ],
)
def test_a_rank_that_skips_a_step_or_keeps_gradients_is_named(pair: Pool, slip: str, says: str) -> None:
    for error in pair.run(2, skipped_on, slip):
        assert says in error if says else not error, error
