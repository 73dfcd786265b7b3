"""Collectives that the pass inserts, through Inductor and over NCCL: one GPU's losses and gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_rewrite as cp
from cp_rewrite.batch.marks import is_part
from cp_rewrite.sharding import Inner
from tests.end_to_end import test_neighbours, test_picked, test_place_writes, test_resolved, test_token_counts
from tests.end_to_end.test_conformance_gpu import free_port
from tests.helpers.packed_model import packed_batch
from tests.helpers.pool import Pool

COUNTS = [name for name in test_token_counts.RIGHT if "fp32" not in name]
"""They are multiplied with each other: on many of them each rounding of Inductor's tells."""


def counting(names: Sequence[str]) -> nn.Module:
    return test_token_counts.Counting(*names)


FAMILIES: dict[str, tuple[Callable[[Sequence[str]], nn.Module], Sequence[str], Callable[[], dict[str, Any]]]] = {
    "sums": (test_resolved.Resolved, test_resolved.CASES, lambda: packed_batch(1, 14)),
    "picks": (test_picked.Picked, [*test_picked.LOSSES], lambda: test_picked.packed(1, 14)),
    "writes": (
        lambda names: test_place_writes.Writing(*names),
        [*test_place_writes.RIGHT],
        lambda: packed_batch(1, 14),
    ),
    **{f"counts {part}": (counting, COUNTS[part::3], lambda: packed_batch(1, 14)) for part in range(3)},
    "neighbours": (test_neighbours.Neighbours, test_neighbours.CASES, lambda: packed_batch(1, 14)),
}
CLOSE = 1e-6
"""Part of the norm of a loss or gradient. Models are in fp64; Inductor rounds some steps to fp32, without ranks too."""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_right_under_inductor(family: str) -> None:
    mp.spawn(run_rank, (2, free_port(), family), nprocs=2)  # type: ignore[no-untyped-call]


def run_rank(rank: int, world_size: int, port: int, family: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))
    with in_double():
        compare(init_device_mesh("cuda", (world_size,), mesh_dim_names=("cp",)), family)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_gives_each_trained_weight_a_gradient(family: str) -> None:
    """The comparison on GPUs asks for it; here it is tested without any."""
    make, names, draw = FAMILIES[family]
    model = make(names).double()
    with in_double():
        step(model, draw())
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_tests_without_gpus_see_none() -> None:
    assert not torch.cuda.is_available()


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name[-1] not in "12"])
def test_the_same_comparison_on_gloo(pool: Pool, family: str) -> None:
    pool.run(2, compare_few, family)


def compare_few(mesh: DeviceMesh, family: str) -> None:
    with in_double():
        torch._dynamo.reset()
        compare(mesh, family, "eager", every=3)


@contextmanager
def in_double() -> Generator[None]:
    """Inside, tensors that are made from whole numbers are fp64 too."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def compare(mesh: DeviceMesh, family: str, inner: Inner = "inductor", every: int = 1) -> None:
    make, names, draw = FAMILIES[family]
    names = names[::every]
    device = torch.device(mesh.device_type)
    batch = draw()
    alone, model = (make(names).double().to(device) for _ in range(2))
    expected = step(alone, moved(batch, device))
    tokens = {name: 1 for name in test_resolved.TOKENS if name in batch}
    sharding = cp.Sharding(mesh, tokens, cp.DocumentIds("doc_ids"), "head_tail", "all_gather", inner=inner)
    with sharding.shard(batch) as local:
        found = step(torch.compile(model, backend=cp.backend(sharding), fullgraph=True), moved(local, device))
    cp.sum_gradients(model.parameters(), sharding)
    for name, loss in expected.items():
        total = found[name].detach().clone()
        if is_part(found[name]):
            dist.all_reduce(total, group=sharding.group)
        assert close(total, loss), (name, total, loss)
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert close(q.grad, p.grad), (name, (q.grad - p.grad).norm(), p.grad.norm())


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= CLOSE * expected.norm())


def moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) for name, x in batch.items()}


def step(model: Callable[..., Any], batch: dict[str, Any]) -> dict[str, Tensor]:
    """Losses by name, after the backward of them all, each with a weight of its own."""
    out = model(**batch)
    found: dict[str, Tensor] = out if isinstance(out, dict) else {"": out}
    torch.stack([(1 + i / 7) * loss for i, loss in enumerate(found.values())]).sum().backward()
    return found
