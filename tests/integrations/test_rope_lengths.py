"""Trainings whose batches cross the length at which RoPE changes its frequencies, on gloo against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

from .test_parallelize import KINDS, Recorded, annotate, compare, targets, train

STEPS = [[[rows]] for rows in ([15, 9], [16, 9], [17, 8], [9, 21, 4], [16, 9], [19, 4], [15, 9], [3, 18])]
"""Below, at and above 16 positions: dynamic frequencies grow twice, stay as they are, and are as at first again."""
MODELS = ("phi3_longrope", "llama_dynamic", "hunyuan_dynamic", "gemma3_dynamic")
Kept = list[dict[str, list[float]]]
"""Per step: frequencies, and the longest row that they are of."""


def kept(model: nn.Module) -> dict[str, list[float]]:
    rope = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    names = [name for name in dir(rope) if name.endswith(("inv_freq", "max_seq_len_cached"))]
    values = {name: rope._buffers.get(name, getattr(rope, name)) for name in names}
    return {name: torch.as_tensor(value).double().flatten().tolist() for name, value in values.items()}


def run(model: Any, call: Any, owner: nn.Module) -> tuple[Recorded, Kept]:
    found: Kept = []

    def loss_of(batch: dict[str, Tensor], count: Tensor) -> Tensor:
        loss = call(batch, count)
        found.append(kept(owner))
        return loss

    return train(model, loss_of, STEPS), found


def alone(name: str) -> tuple[Recorded, Kept]:
    model = build_model(name).eval()
    return run(model, lambda batch, count: model(**batch).loss * targets([batch]) / count, model)


def on_ranks(mesh: DeviceMesh, name: str, kind: str, inner: str) -> tuple[Recorded, Kept, int]:
    sharding = annotate(mesh, inner=inner)
    plain = build_model(name).eval()
    model: Any = cp.parallelize(plain, mesh, sharding, **KINDS[kind])
    counters.clear()

    def call(batch: dict[str, Tensor], count: Tensor) -> Tensor:
        with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local:
            return model(**local).loss

    recorded, found = run(model, call, plain)
    return recorded, found, counters["stats"]["unique_graphs"]


def same(expected: tuple[Recorded, Kept], found: tuple[Recorded, Kept]) -> None:
    compare(expected[0], found[0])
    for step, values in zip(*(kept for _, kept in (expected, found)), strict=True):
        for name, value in step.items():
            if name in values:
                assert values[name] == pytest.approx(value, rel=1e-6), name


CASES = [
    *((name, "by blocks", "eager") for name in MODELS),
    ("llama_dynamic", "ddp", "aot_eager"),
    ("phi3_longrope", "ddp", "inductor"),
    ("llama_dynamic", "whole", "inductor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "inner"), CASES)
def test_a_training_across_the_switch_equals_one_process(pair: Pool, name: str, kind: str, inner: str) -> None:
    """Losses, all gradients, weights, and what RoPE keeps, after each step; one graph serves all lengths."""
    expected = alone(name)
    for *found, graphs in pair.run(2, on_ranks, name, kind, inner):
        same(expected, (found[0], found[1]))
        assert graphs == 1
