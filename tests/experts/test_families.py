"""Every text model of transformers whose experts go through its interface, on 2 and 4 ranks against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.diagnose.check import floor_of
from tests.experts.test_shared import gradients
from tests.helpers.pool import Pool
from tests.sweep.cases import Case, batch_of, build, sharding_of, shifts
from tests.sweep.trial import LIMIT, difference, rounding, step

NAMES = (
    "Afmoe AXK1 Cohere2Moe DeepseekV2 DeepseekV3 Dots1 Ernie4_5_Moe ExaoneMoe FlexOlmo Gemma4 Glm4Moe Glm4MoeLite "
    "GptOss GraniteMoe GraniteMoeSWA GraniteMoeHybrid GraniteMoeShared HunYuanMoEV1 HYV3 Jamba KimiLinear Laguna "
    "Lfm2Moe Mellum MiMoV2Flash MiniMax MiniMaxM2 Mixtral NemotronH Olmoe Phimoe Qwen2Moe Qwen3_5Moe Qwen3Moe "
    "Qwen3Next SolarOpen "
).split()


def on_ranks(mesh: DeviceMesh, case: Case) -> tuple[float, dict[str, Tensor]]:
    torch._dynamo.reset()
    sharding = sharding_of(case, mesh)
    model = cp.parallelize(build(case).model, mesh, sharding, experts=mesh.size())
    with sharding.shard(batch_of(case), shift_labels=shifts(case)) as local:
        loss = model(**local).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_right(pool: Pool, name: str, ranks: int) -> None:
    """Up to four times what one process's gradients in fp32 are from those in fp64."""
    case = Case(f"{name}ForCausalLM", "causal")
    model, whole = build(case).model, batch_of(case)
    loss, grads = step(model, whole)
    noise, floor = rounding(model, whole, grads), floor_of(grads.values())
    for found, values in pool.run(ranks, on_ranks, case):
        assert found == pytest.approx(loss, rel=LIMIT)
        assert values.keys() == grads.keys()
        for key, grad in grads.items():
            error = difference(values[key], grad, floor)
            assert error <= max(LIMIT, 4 * noise[key]), f"{key}: {error:.1e}, of fp32 itself {noise[key]:.1e}"
