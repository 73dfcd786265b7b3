"""Drawn models, tiled on two processes beside one: heads, losses, MLPs, routed experts, adapters, checkpoints."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from cp_rewrite.ops.tiles import REGIONS
from tests.helpers.one_process import compare
from tests.helpers.packed_model import WIDTH, PackedModel
from tests.helpers.pool import Pool

from .test_tiles import Mean, Picked, Shifted, Smoothed, SoftCap, Transposed, Wide, ZLoss

LOSSES = (Wide, Mean, Smoothed, SoftCap, ZLoss, Picked, Shifted, Transposed)
MLPS = ("none", "gated", "plain", "experts", "routed", "picked", "adapted")
EXPERTS = 4


class Drawn(PackedModel):
    """`mlp`: what stands behind attention; `again`: it is checkpointed."""

    mlp, again, times = "none", False, 4

    def extra(self) -> None:
        super().extra()
        inside = self.times * WIDTH
        self.up, self.gate, self.down = (nn.Linear(WIDTH, inside), nn.Linear(WIDTH, inside), nn.Linear(inside, WIDTH))
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, inside, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.first_weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, inside) / 8)
        self.last_weights = nn.Parameter(torch.randn(EXPERTS, inside, WIDTH) / 8)

    def mix(self, h: Tensor) -> Tensor:
        if self.mlp == "none":
            return h
        out: Any = checkpoint(self.block, h, use_reentrant=False) if self.again else self.block(h)
        return out

    def block(self, h: Tensor) -> Tensor:
        x = F.layer_norm(h, h.shape[-1:])
        if self.mlp == "gated":
            return h + self.down(F.silu(self.gate(x)) * self.up(x))
        if self.mlp == "plain":
            return h + self.down(F.gelu(self.up(x)))
        if self.mlp == "experts":
            share = self.router(x).softmax(-1)
            return h + self.down(share[..., :1] * self.up(x).relu() + share[..., 1:2] * torch.tanh(self.gate(x)))
        if self.mlp in ("routed", "picked"):
            weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
            return h + (self.routed if self.mlp == "routed" else self.picked)(x, weights, chosen)
        return h + self.down(F.silu(self.up(x).detach() + self.b(self.a(x))))

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts for each token, of which two count."""
        share = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype).scatter(-1, chosen, weights)
        inside = F.silu(torch.einsum("btd,edi->btei", x, self.first_weights))
        return torch.einsum("btei,eid,bte->btd", inside, self.last_weights, share)

    def picked(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weights of each token's experts, picked."""
        inside = F.silu(torch.einsum("btd,btkdi->btki", x, self.first_weights[chosen]))
        return torch.einsum("btki,btkid,btk->btd", inside, self.last_weights[chosen], weights)


def drawn(seed: int) -> type[PackedModel]:
    draw = random.Random(seed)
    options = {"mlp": draw.choice(MLPS), "again": draw.random() < 0.5, "times": draw.choice((2, 4, 10))}
    return type(f"Drawn{seed}", (Drawn, draw.choice(LOSSES)), options)


def model_of(seed: int) -> nn.Module:
    return drawn(seed)()


def tiled(_: DeviceMesh) -> int:
    """How many regions ran tile by tile since the last call."""
    found = len(REGIONS)
    REGIONS.clear()
    return found


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed < 3 else pytest.mark.sweep) for seed in range(60)]
)
def test_drawn_models_tiled_are_as_on_one_process(pool: Pool, seed: int) -> None:
    pool.run(2, tiled)
    layout = ("balanced", "head_tail", "contiguous")[seed % 3]
    compare(pool, model_of, seed, 2, layout, 1 + seed % 2, 23, tile=3 + seed % 4)
    assert min(pool.run(2, tiled)) > 0, "nothing was tiled"
