"""A model on ranks beside the same model on one process: loss and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.active.marks import is_part
from tests.helpers.packed_model import TOKENS, packed_batch
from tests.helpers.pool import Pool

Model = Callable[..., nn.Module]


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


def check_or_refuse(model: nn.Module, rows: int = 1, tokens: int = 13, **how: Any) -> str | None:
    """What a refusal says; None: the model is right on 2 ranks. Anything else is an error."""
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
