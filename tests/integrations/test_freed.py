"""A parallelized model goes with its last user: what was compiled of it does not hold its weights."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef  # holds no memory, and knows when it was freed

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model
from tests.helpers.pool import Pool


def train_and_drop(mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> tuple[list[Any], weakref.ref[Any]]:
    """A step of a model that nothing holds afterwards. Returns what knows of its weights' memory, and of itself."""
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager", tile=4)
    plain: Any = build_model("llama")
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    model = cp.parallelize(plain, mesh, sharding, data_parallel=kind, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    with sharding.shard(make_batch([[13, 1, 7, 11]]), shift_labels=True) as local:
        model(**local).loss.backward()
    optimizer.step()
    weights = [w.to_local() if hasattr(w, "to_local") else w for w in model.parameters()]
    return [StorageWeakRef(w.untyped_storage()) for w in weights], weakref.ref(plain)


def freed(mesh: DeviceMesh, kind: str, options: dict[str, Any]) -> list[int]:
    """Weights that are there once models are gone, of more models than Dynamo compiles one code for."""
    left: list[int] = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            memory, model = train_and_drop(mesh, kind, options)
            gc.collect()
            assert memory
            left.append(sum(not x.expired() for x in memory) + (model() is not None))
    return left


@pytest.mark.parametrize(("kind", "options"), [("fsdp", {"offload": ("checkpoints",)}), ("ddp", {})])
def test_weights_go_with_the_model(pair: Pool, kind: str, options: dict[str, Any]) -> None:
    for left in pair.run(2, freed, kind, options):
        assert left == [0, 0]
