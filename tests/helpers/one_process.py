"""A model on ranks beside the same model on one process: loss and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.gradients import group_of_threads
from cp_rewrite.batch.marks import is_part
from cp_rewrite.diagnose.check import (
    GROUP,
    CheckReport,
    ThreadSharding,
    _compare,
    _Runner,
    tensors_of,  # pyright: ignore
    thread_group,
)
from tests.helpers.packed_model import TOKENS, packed_batch
from tests.helpers.pool import Pool

Model = Callable[..., nn.Module]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name, of those of the weights that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step_of_ranks(model: nn.Module, loss: Tensor, sharding: cp.Sharding) -> tuple[float, dict[str, Tensor]]:
    """The sum of all ranks' parts of a loss and of its gradients, after its backward."""
    loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=sharding.group)
    return float(total), gradients_of(model)


def step_of_losses(model: Callable[..., dict[str, Tensor]], batch: dict[str, Tensor]) -> dict[str, float]:
    """Losses by name, after the backward of them all, each with a weight of its own."""
    found = model(**batch)
    torch.stack([(1 + i / 7) * loss for i, loss in enumerate(found.values())]).sum().backward()
    return {name: loss.item() for name, loss in found.items()}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """The same, up to a relative norm error."""
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = float((found[name] - grad).norm() / grad.norm())
        assert error <= limit, f"{name}: {error:.1e}"


def compare(pool: Pool, model: Model, names: Any, ranks: int, layout: str, rows: int, tokens: int, **how: Any) -> None:
    """`model(names)`, in fp64; it is made anew on every rank. how: more arguments of the annotation."""
    batch = packed_batch(rows, tokens)
    alone = model(names).double()
    loss = alone(**batch)
    loss.backward()
    results = pool.run(ranks, _sharded_step, model, names, batch, layout, how)
    assert sum(part for part, _ in results) == pytest.approx(loss.item(), rel=1e-9)
    for _, grads in results:
        for key, p in alone.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(torch.from_numpy(grads[key]), p.grad, rtol=1e-7, atol=1e-9, msg=key)


def check_all(model: nn.Module, sharding: cp.Sharding, batches: Sequence[dict[str, Tensor]]) -> list[CheckReport]:
    """Reports of `cp.check`, one for each batch, of a model that is compiled as it is in training: once."""
    runner = _Runner(model, ThreadSharding.like(sharding), batches[0], {"shift_labels": False, "drop": []})
    found: list[CheckReport] = []
    with thread_group(sharding.world_size) as run, group_of_threads(GROUP):
        for batch in batches:
            runner.batch, runner.captured = batch, False
            expected = runner.step(tensors_of(model(**batch)), None)
            runner.compile()
            found.append(_compare(expected, run(runner.rank_step), runner.dim))
    return found


def check_or_refuse(model: nn.Module, rows: int = 1, tokens: int = 13, **how: Any) -> str | None:
    """Text of the refusal; None: the model is right on 2 ranks. Anything else is an error."""
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), "head_tail", **how)
    torch._dynamo.reset()
    try:
        assert cp.check(model.double(), sharding, packed_batch(rows, tokens)).largest <= 1e-9
    except cp.RewriteRefused as refused:
        return str(refused)
    return None


def _sharded_step(
    mesh: DeviceMesh, model: Model, names: Any, batch: dict[str, Tensor], layout: Any, how: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), layout, "all_gather", inner="aot_eager", **how)
    torch._dynamo.reset()
    ours = model(names).double()
    with sharding.shard(batch) as local:
        loss = torch.compile(ours, backend=cp.backend(sharding), fullgraph=True)(**local)
        loss.backward()
    cp.sum_gradients(ours.parameters(), sharding)
    # A mean is the whole on every rank, a sum this rank's part.
    whole = 1 if is_part(loss) else mesh.size()
    return loss.item() / whole, {key: p.grad.numpy() for key, p in ours.named_parameters() if p.grad is not None}
