"""Text models of transformers whose experts go through its interface, on 2 and 4 ranks against one process.

Not Gemma 4, which writes into a view that FSDP gives its blocks: torch refuses that, with experts shared or not.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.diagnose.check import floor_of
from cp_rewrite.experts.families import FAMILIES, means_the_same
from tests.experts.test_shared import gradients
from tests.helpers.pool import Pool
from tests.sweep.cases import Case, batch_of, build, sharding_of, shifts
from tests.sweep.trial import LIMIT, difference, in_double, step

NAMES = (
    "Afmoe AXK1 Cohere2Moe DeepseekV2 DeepseekV3 Dots1 Ernie4_5_Moe ExaoneMoe FlexOlmo Glm4Moe Glm4MoeLite "
    "GptOss GraniteMoe GraniteMoeSWA GraniteMoeHybrid GraniteMoeShared HunYuanMoEV1 HYV3 Jamba KimiLinear Laguna "
    "Lfm2Moe Mellum MiMoV2Flash MiniMax MiniMaxM2 Mixtral NemotronH Olmoe Phimoe Qwen2Moe Qwen3_5Moe Qwen3Moe "
    "Qwen3Next SolarOpen "
).split()


def on_ranks(mesh: DeviceMesh, case: Case, double: bool) -> tuple[float, dict[str, Tensor]]:
    torch._dynamo.reset()
    model, sharding = build(case).model, sharding_of(case, mesh)
    with in_double(model) if double else nullcontext():
        model = cp.parallelize(model.double() if double else model, mesh, sharding, experts=mesh.size())
        with sharding.shard(batch_of(case), shift_labels=shifts(case)) as local:
            loss = model(**local).loss
        loss.backward()
    return loss.item(), gradients(model)


def alone(case: Case) -> tuple[bool, float, dict[str, Tensor]]:
    """(runs in fp64, loss, gradients) of one process, in fp32 where a model mixes that with fp64."""
    model, whole = build(case).model, batch_of(case)
    try:
        with in_double(model):
            return True, *step(model.double(), whole)
    except RuntimeError:
        return False, *step(build(case).model, whole)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_right(pool: Pool, name: str, ranks: int) -> None:
    case = Case(f"{name}ForCausalLM", "causal", training=name != "Phimoe")  # whose router draws noise in training
    double, loss, grads = alone(case)
    floor = floor_of(grads.values())
    for found, values in pool.run(ranks, on_ranks, case, double):
        assert found == pytest.approx(loss, rel=LIMIT)
        assert values.keys() == grads.keys()
        for key, grad in grads.items():
            assert difference(values[key], grad, floor) <= LIMIT, key


@pytest.mark.parametrize("name", FAMILIES)
def test_another_meaning_of_a_class_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another version of transformers: outputs that are doubled, and a class that takes something else."""
    module, _, kind = name.rpartition(".")
    known = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    assert means_the_same.__wrapped__(known)
    forward = known.forward

    def doubled(*given: Any) -> Any:
        found = forward(*given)
        return 2 * found if isinstance(found, Tensor) else (2 * found[0], *found[1:])

    for other in (doubled, lambda self: None):
        monkeypatch.setattr(known, "forward", other)
        assert not means_the_same.__wrapped__(known)
