"""A model of images and text whose encoder of images is frozen, and one whose experts are spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import cp_rewrite as cp
from tests.helpers.models import SMALL, VOCAB
from tests.helpers.packed_model import PackedModel, judge
from tests.helpers.pool import Pool
from tests.helpers.versions import traces_images

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
IMAGE = VOCAB - 1


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 16}
    tower = CLIPVisionConfig(**sizes, num_hidden_layers=3, patch_size=8, projection_dim=32)
    config = LlavaConfig(
        vision_config=tower, text_config=LlamaConfig(**SMALL), image_token_index=IMAGE, use_cache=False
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def batch() -> dict[str, Tensor]:
    """Two documents, each with an image of four patches."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, IMAGE, (1, 31), generator=generator)
    ids[:, 2:6] = ids[:, 20:24] = IMAGE
    positions = torch.cat([torch.arange(n) for n in (14, 17)])[None]
    labels = ids.masked_fill((positions == 0) | (ids == IMAGE), -100)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "pixel_values": images}


def step(mesh: DeviceMesh) -> tuple[float, dict[str, Tensor]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager")
    torch._dynamo.reset()
    model = cp.parallelize(llava(), mesh, sharding)
    with sharding.shard(batch(), shift_labels=True) as local:
        loss = model(**local).loss
    loss.backward()
    return float(loss), {name: p.grad.full_tensor() for name, p in model.named_parameters() if has_gradient(p)}


def has_gradient(parameter: nn.Parameter) -> bool:
    return isinstance(parameter.grad, DTensor)


@pytest.mark.slow
@traces_images
def test_a_frozen_tower_trains_as_on_one_process(pool: Pool) -> None:
    """Under FSDP: each rank encodes all images; the text's tokens are cut."""
    model = llava()
    loss = model(**batch()).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not any("vision_tower" in name for name in expected)
    for found, grads in pool.run(2, step):
        assert found == pytest.approx(loss.item(), rel=1e-5)
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            assert float((grads[name] - grad).norm()) <= 1e-5 * float(grad.norm()), name


class SpreadExperts(PackedModel):
    """Tokens travel to the ranks that have their experts, and back."""

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        half = [x.shape[0] // 2] * 2
        there = torch.ops._c10d_functional.all_to_all_single(x, half, half, "0")
        return h + torch.ops._c10d_functional.wait_tensor(there).relu().view_as(h)


def test_experts_that_are_spread_over_ranks_are_refused() -> None:
    verdict = judge(SpreadExperts())
    assert verdict.reasons == {"TOKEN_MIXING"}
    assert "a collective of the model's own" in str(verdict)
