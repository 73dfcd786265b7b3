"""Hybrids on rows of each rank's own, joined to one batch over a mesh of two dims: states and convolutions end with
their row, as on one process that takes the rows in turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_rewrite as cp
from tests.helpers.pool import Pool
from tests.helpers.recurrent_model import WIDTH, RecurrentModel, packed

TOKENS = {"input_ids": 1, "labels": 1, "position_ids": 1}
ROWS: Sequence[Sequence[int]] = ((13, 70, 7), (30, 3), (1,), (66, 1))
"""Documents of each rank's row."""


class Hybrid(RecurrentModel):
    """Its layers begin with a convolution over four tokens, and with a gate that reads the token before."""

    def __init__(self) -> None:
        super().__init__(("gated_delta_rule", "ssd"))
        self.taps = torch.nn.Parameter(torch.rand(WIDTH, 1, 4))

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        h = self.embed(input_ids)
        for number, kind in enumerate(self.kinds):
            x = F.conv1d(F.pad(h.mT, (3, 0)), self.taps, groups=WIDTH).mT
            h = h + self.layer(kind, number, x * F.pad(h, (0, 0, 1, -1)).sigmoid(), None)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="sum")


def row_of(lengths: Sequence[int]) -> dict[str, Tensor]:
    batch = packed(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}


def step(mesh: DeviceMesh) -> tuple[float, dict[str, Tensor]]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), rows="own", inner="eager")
    model = Hybrid().double()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(row_of(ROWS[sharding.rank])) as local:
        loss = compiled(**local)
        value = sharding.whole(loss).item()
    loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    return value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_rows_of_four_ranks_equal_one_process(pool: Pool) -> None:
    model = Hybrid().double()
    loss = torch.stack([model(**row_of(lengths)) for lengths in ROWS]).sum()
    loss.backward()
    for value, grads in pool.run(4, step):
        assert value == pytest.approx(loss.item(), rel=1e-9)
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert (grads[name] - p.grad).norm() <= 1e-8 * p.grad.norm(), name
