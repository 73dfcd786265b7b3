"""Beside other parallelism, on four gloo processes as 2 x 2: DDP replicas or FSDP2 shards, times context-parallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.end_to_end.test_models import difference
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

ROWS = ([[13, 1, 7, 11]], [[5, 3, 9, 2, 6, 7]])
"""The packed row of each replica: equally many targets would hide a mean of means, so they differ."""


def targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def one_process(name: str) -> dict[str, Tensor]:
    """Gradients of the mean over the targets of both replicas' rows."""
    model, batches = build_model(name), [make_batch(rows) for rows in ROWS]
    count = sum(map(targets, batches))
    for batch in batches:
        (model(**batch).loss * targets(batch) / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(mesh: DeviceMesh, wrap: Any, name: str, inner: Any = "aot_eager", **options: Any) -> tuple[Any, nn.Module]:
    """One backward of a wrapped model on a (dp, cp) mesh."""
    torch._dynamo.reset()
    grid = DeviceMesh("cpu", mesh.mesh.view(2, 2), mesh_dim_names=("dp", "cp"))
    sharding = cp.Sharding(grid["cp"], TOKENS, cp.PositionIds("position_ids"), inner=inner, **options)
    batch = make_batch(ROWS[grid.get_local_rank("dp")])
    count = sum(targets(make_batch(rows)) for rows in ROWS)
    plain = build_model(name)
    model = wrap(plain, grid, cp.backend(sharding))
    with sharding.shard(batch, shift_labels=True) as local:
        local["num_items_in_batch"] = torch.tensor(count)
        # Both wrappers average over all four ranks, and each rank's loss is its part of a sum.
        loss: Tensor = model(**local).loss * mesh.size()
    loss.backward()
    return model, plain


def with_ddp(model: nn.Module, grid: DeviceMesh, backend: Any) -> Any:
    # One bucket: Dynamo would cut the graph, and with it the mask's proof, at bucket borders.
    torch._dynamo.config.optimize_ddp = False
    model.compile(backend=backend, fullgraph=True)
    return DistributedDataParallel(model)


def with_fsdp(model: nn.Module, grid: DeviceMesh, backend: Any) -> Any:
    # Parameters are sharded over both dims: context-parallel ranks hold equal weights, so they are replicas too.
    flat: Any = grid["dp", "cp"]._flatten("dp_cp")
    model.compile(backend=backend, fullgraph=True)
    return fully_shard(model, mesh=flat)


def with_fsdp_by_blocks(model: Any, grid: DeviceMesh, backend: Any) -> Any:
    """Each block is sharded and compiled alone: its weights are gathered, used and dropped before the next one's."""
    flat: Any = grid["dp", "cp"]._flatten("dp_cp")
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=True)
        fully_shard(layer, mesh=flat)
    return fully_shard(model, mesh=flat)


BLOCKS = {
    "assume_mask": cp.PackedMask(),
    "block_tokens": {"hidden_states": 1, "position_embeddings[0]": 1, "position_embeddings[1]": 1},
}
KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "ddp": (with_ddp, "tiny", {}),
    "fsdp by blocks": (with_fsdp_by_blocks, "llama", {"inner": "eager", **BLOCKS}),
    "ddp, torchtitan": (with_ddp, "torchtitan", {}),
    "fsdp": (with_fsdp, "torchtitan", {}),
    "fsdp by blocks, aot": (with_fsdp_by_blocks, "llama", BLOCKS),
}


def gradients_of(mesh: DeviceMesh, kind: str) -> dict[str, Tensor]:
    wrap, name, options = KINDS[kind]
    _, plain = step(mesh, wrap, name, **options)
    grads = {name: p.grad for name, p in plain.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items() if g is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_one_process(pool: Pool, kind: str) -> None:
    expected = one_process(KINDS[kind][1])
    for found in pool.run(4, gradients_of, kind):
        assert found.keys() == expected.keys()
        assert max(difference(found[name], grad, expected) for name, grad in expected.items()) <= 1e-5


def save_under_cp(mesh: DeviceMesh, folder: str) -> dict[str, Tensor]:
    """A step of SGD, then a checkpoint. Returns the weights."""
    model, plain = step(mesh, with_fsdp, "tiny")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dcp.save({"model": plain.state_dict()}, checkpoint_id=folder)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in plain.named_parameters()}


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_loads_into_one_process(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(4, save_under_cp, str(tmp_path))[0]
    model = copy.deepcopy(build_model("tiny"))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    model.load_state_dict(state["model"])
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), saved[name])
    assert not dist.is_initialized()
