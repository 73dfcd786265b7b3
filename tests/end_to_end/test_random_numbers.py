"""`Sharding(random="per_rank")`: each rank draws the numbers of its own tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.packed_model import TOKENS, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

PACKING = cp.DocumentIds("doc_ids")


class Dropped(PackedModel):
    """Dropout on what tokens hold, and a loss that is linear in it: its mean over draws is that without dropout."""

    p = 0.5

    def mix(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.p)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return (logits * labels[..., None]).sum() / num_items


class DroppedWeights(PackedModel):
    """Dropout on a weight: one process draws once for all tokens."""

    def extra(self) -> None:
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return h * F.dropout(self.scale, 0.5)


def test_draws_for_tokens_are_refused_with_the_option_that_allows_them() -> None:
    report = cp.explain(Dropped(), cp.Sharding(2, TOKENS, PACKING))(**packed_batch())
    (refusal,) = report.refusals
    assert refusal.reason is cp.Reason.DROPOUT
    assert "Sharding(random='per_rank')" in refusal.detail
    assert cp.explain(Dropped(), cp.Sharding(2, TOKENS, PACKING, random="per_rank"))(**packed_batch()).ok


def test_draws_that_all_tokens_share_stay_refused() -> None:
    report = cp.explain(DroppedWeights(), cp.Sharding(2, TOKENS, PACKING, random="per_rank"))(**packed_batch())
    assert {refusal.reason for refusal in report.refusals} == {cp.Reason.DROPOUT}


def draws(mesh: DeviceMesh, count: int) -> Tensor:
    """(count, 1 + WIDTH) this rank's parts of the loss and of a weight's gradient."""
    sharding = cp.Sharding(mesh, TOKENS, PACKING, inner="eager", random="per_rank")
    model, found = Dropped(), list[Tensor]()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(packed_batch(tokens=13)) as local:
        for number in range(count):
            torch.manual_seed(1000 * mesh.get_local_rank() + number)
            loss = compiled(**local)
            (grad,) = torch.autograd.grad(loss, [model.out.bias])
            found.append(torch.cat([loss.detach()[None], grad]))
    return torch.stack(found)


def test_the_mean_over_draws_is_that_without_dropout(pool: Pool) -> None:
    model = Dropped()
    model.p = 0.0
    loss = model(**packed_batch(tokens=13))
    (grad,) = torch.autograd.grad(loss, [model.out.bias])
    parts = pool.run(2, draws, 400)
    assert not torch.equal(parts[0], parts[1])
    found = parts[0] + parts[1]
    off = (found.mean(0) - torch.cat([loss.detach()[None], grad])).abs()
    assert (off <= 5 * found.std(0) / len(found) ** 0.5 + 1e-6).all()
