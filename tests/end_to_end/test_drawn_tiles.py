"""Drawn models, tiled beside one process: heads, losses, MLPs, experts, adapters, checkpoints."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_rewrite.ops.tiles.region import REGIONS
from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import WIDTH, PackedModel

from .test_tiles import Mean, Picked, Shifted, Smoothed, SoftCap, Transposed, Wide, ZLoss

LOSSES = (Wide, Mean, Smoothed, SoftCap, ZLoss, Picked, Shifted, Transposed)
MLPS = ("none", "gated", "plain", "experts", "adapted")


class Drawn(PackedModel):
    """`mlp`: what stands behind attention; `again`: it is checkpointed."""

    mlp, again, times = "none", False, 4

    def extra(self) -> None:
        super().extra()
        inside = self.times * WIDTH
        self.up, self.gate, self.down = (nn.Linear(WIDTH, inside), nn.Linear(WIDTH, inside), nn.Linear(inside, WIDTH))
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, inside, bias=False)
        self.router = nn.Linear(WIDTH, 2)

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
            return h + self.down(share[..., :1] * self.up(x).relu() + share[..., 1:] * torch.tanh(self.gate(x)))
        return h + self.down(F.silu(self.up(x).detach() + self.b(self.a(x))))


def drawn(seed: int) -> type[PackedModel]:
    draw = random.Random(seed)
    options = {"mlp": draw.choice(MLPS), "again": draw.random() < 0.5, "times": draw.choice((2, 4, 10))}
    return type(f"Drawn{seed}", (Drawn, draw.choice(LOSSES)), options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_models_tiled_are_as_on_one_process(seed: int) -> None:
    REGIONS.clear()
    assert check_or_refuse(drawn(seed)(), rows=1 + seed % 2, tile=3 + seed % 4) is None
    assert REGIONS, "nothing was tiled"
