"""`experts="auto"`: what ranks choose for a model, and that they all do what they chose."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import cp_rewrite as cp
from cp_rewrite.experts.choose import choose, mixture_of
from cp_rewrite.experts.layers import SharedExperts, is_layer_of_experts
from cp_rewrite.planning.cost.constants import BESIDE_TENSORS
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.torch_internals import shards_over_some
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.experts.test_shared import LIMIT, STEPS, Routed, build, gradients
from tests.helpers.one_process import assert_gradients
from tests.helpers.pool import Pool

QUICK = replace(DEVICES["cpu"], name="quick", latency=1e-12, node_latency=1e-12, all_to_all=1e15)
"""Rows that travel take no time: as many ranks as can are to share."""
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def annotated(mesh: DeviceMesh, **how: Any) -> cp.Sharding:
    torch._dynamo.reset()
    how = {"speeds": QUICK, **how}
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager", **how)


def parts_of(model: nn.Module) -> int:
    """Ranks that share a set, of a model that was parallelized."""
    layer = next(layer for layer in model.modules() if is_layer_of_experts(layer))
    weight: Any = layer.down_proj
    assert isinstance(weight, DTensor)
    return layer.num_experts // weight.to_local().shape[0] if getattr(layer, "cp_group", "") else 1


def by_auto(mesh: DeviceMesh) -> tuple[float, dict[str, Any], int, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("cp_rewrite.experts.choose")
    log.addHandler(handler)
    try:
        with mock.patch.object(log, "level", logging.INFO):
            sharding = annotated(mesh)
            model = cp.parallelize(build("qwen3_moe"), mesh, sharding, experts="auto")
    finally:
        log.removeHandler(handler)
    with sharding.shard(make_batch([STEPS[0][0]]), shift_labels=True) as local:
        loss = model(**local).loss
    loss.backward()
    return loss.item(), gradients(model), parts_of(model), lines


def test_what_is_chosen_equals_one_process(pool: Pool) -> None:
    """Logged once, on the first rank."""
    model = build("qwen3_moe")
    loss = model(**make_batch([STEPS[0][0]])).loss
    loss.backward()
    for rank, (found, values, parts, lines) in enumerate(pool.run(2, by_auto)):
        assert found == pytest.approx(loss.item(), rel=LIMIT)
        assert_gradients(values, gradients(model), LIMIT)
        assert parts == 2
        assert len(lines) == (rank == 0)
        assert all("experts='auto' is experts=2: of 2 on nodes of 2, by the speeds of quick" in line for line in lines)


def without_sharing(mesh: DeviceMesh) -> dict[str, int | str]:
    """Ranks that share, or the error, for what shares nothing under `auto`."""
    tries: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
        "dense": (lambda: build("llama"), {}, {}),
        "own way": (lambda: build("jetmoe"), {}, {}),
        "5 experts": (lambda: build("qwen3_moe", num_experts=5), {}, {}),
        "ddp": (lambda: build("qwen3_moe"), {"data_parallel": "ddp"}, {}),
        "weights on the host": (lambda: build("qwen3_moe"), {"offload": ("weights",)}, {}),
        "slow rows": (lambda: build("qwen3_moe"), {}, {"speeds": "h200"}),
    }
    found: dict[str, int | str] = {}
    for name, (make, how, annotation) in tries.items():
        model = cp.parallelize(make(), mesh, annotated(mesh, **annotation), experts="auto", **how)
        found[name] = sum(bool(getattr(layer, "cp_group", "")) for layer in model.modules())
    sharding = annotated(mesh, speeds=("h200", QUICK)[mesh.get_rank()])
    with pytest.raises(RuntimeError) as differs:
        cp.parallelize(build("qwen3_moe"), mesh, sharding, experts="auto")
    found["differs"] = str(differs.value)
    return found


def test_what_can_not_be_shared_is_not(pool: Pool) -> None:
    for found in pool.run(2, without_sharing):
        differs = found.pop("differs")
        assert {*found.values()} == {0}, found
        assert len(found) == 6
        assert "share experts over another number of ranks than rank 0" in str(differs)


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """For 4 ranks: on one node and on two; 6 experts; weights of which half a layer's fits."""
    policy, found = MixedPrecisionPolicy(), dict[str, int]()

    def chosen(model: nn.Module, **how: Any) -> int:
        return choose(model, mesh, annotated(mesh, **how), policy, True)

    found["one node"] = chosen(build("qwen3_moe"))
    found["two nodes"] = chosen(build("qwen3_moe"), ranks_per_node=2)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        found["two nodes by torchrun"] = chosen(build("qwen3_moe"))
    found["6 experts"] = chosen(Routed())
    small = build("qwen3_moe")
    shared = [p for layer in small.modules() if is_layer_of_experts(layer) for p in layer.parameters()]
    held = sum(p.nbytes for p in small.parameters())  # for each of 4 ranks: weights, gradients and AdamW
    room = held + sum(p.numel() for p in shared[:2]) * (3 * 4 + 4) / 3
    tight = replace(QUICK, device_bytes=int(BESIDE_TENSORS + room))
    found["nothing else fits"] = chosen(small, ranks_per_node=2, speeds=tight)
    grid = DeviceMesh("cpu", mesh.mesh.view(2, 2), mesh_dim_names=("dp", "cp"))
    model = cp.parallelize(build("qwen3_moe"), grid, annotated(grid["cp"]), experts="auto", replicate="dp")
    found["copies of all weights"] = parts_of(model)
    return found


def test_nodes_and_numbers_of_experts(pool: Pool) -> None:
    some = shards_over_some()
    expected = {
        "one node": 4, "two nodes": 2 if some else 1, "two nodes by torchrun": 2 if some else 1,
        "6 experts": 2 if some else 1, "nothing else fits": 4,
        "copies of all weights": 1,
    }  # fmt: skip
    assert all(found == expected for found in pool.run(4, sizes_of))


@pytest.mark.parametrize(("frozen", "checkpointed"), [(False, False), (True, True)])
def test_the_sizes_that_are_weighed(frozen: bool, checkpointed: bool) -> None:
    model: Any = build("qwen3_moe")
    layers = [layer for layer in model.modules() if is_layer_of_experts(layer)]
    for p in [p for layer in layers for p in layer.parameters()]:
        p.requires_grad_(not frozen)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config, found = model.config, mixture_of(model, layers, HALF, again=True)
    experts = 3 * config.num_experts * config.hidden_size * config.moe_intermediate_size * len(layers)
    assert (found.layers, found.chosen) == (config.num_hidden_layers, config.num_experts_per_tok)
    assert (found.gathered, found.summed) == (2 * 2 * experts, 0 if frozen else 4 * experts)
    assert (found.row, found.trips) == (2 * config.hidden_size * len(layers), 6 if checkpointed else 4)
    others = sum(p.numel() for p in model.parameters()) - experts - model.get_input_embeddings().weight.numel()
    assert found.flops == 6 * (others + experts * config.num_experts_per_tok / config.num_experts)
    assert mixture_of(model, layers, HALF, again=False).gathered == 2 * experts


def test_a_model_of_one_s_own_tells_no_choices() -> None:
    model = Routed()
    found = mixture_of(model, [model.experts, model.again], MixedPrecisionPolicy(), again=False)
    assert (found.chosen, found.layers) == (8, 2)
    assert found.gathered == sum(p.nbytes for p in model.experts.parameters())  # both layers have the same


def test_the_checks_are_those_of_a_number(pool: Pool) -> None:
    assert all(pool.run(1, alone))


def alone(mesh: DeviceMesh) -> bool:
    """One rank shares with none."""
    with pytest.raises(ValueError, match="none of its layers"):
        SharedExperts(build("llama"), mesh, 2)
    return choose(build("qwen3_moe"), mesh, annotated(mesh), HALF, True) == 1
