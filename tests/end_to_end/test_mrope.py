"""Positions in several planes, (3 or 4, B, T), as Qwen2.5-VL's text model takes them, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import LIMIT
from tests.helpers.one_process import step_of_ranks
from tests.helpers.pool import Pool

pytestmark = pytest.mark.slow
VOCAB = 19
PACKINGS: dict[int, Any] = {3: cp.WholeRows(), 4: cp.PositionIds("position_ids")}


class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """The text model, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        config = Qwen2_5_VLTextConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, rope_parameters=rope, use_cache=False,
            initializer_range=0.2,
        )  # fmt: skip
        self.model = Qwen2_5_VLTextModel(config)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")


def make_batch(planes: int) -> dict[str, Tensor]:
    """Two rows of 31 tokens with an image of 3 x 4 patches in each document; the first row begins inside of one."""
    text = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([14, 17], [20, 11])])
    text[0, :14] += 5
    image = (text >= 6) & (text < 18)
    patch = (text - 6).clamp(min=0)
    grid = [torch.where(image, 6, text), torch.where(image, 6 + patch // 4, text), 6 + patch % 4]
    grid[2] = torch.where(image, grid[2], text)
    positions = torch.stack([text, *grid] if planes == 4 else grid)
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(3, VOCAB, (2, 2, 31), generator=generator).unbind(0)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def sharding_of(mesh: DeviceMesh | int, planes: int) -> cp.Sharding:
    tokens = {"input_ids": 1, "position_ids": 2, "labels": 1}
    return cp.Sharding(mesh, tokens, PACKINGS[planes], inner="eager")


def step(mesh: DeviceMesh, planes: int) -> tuple[float, dict[str, Tensor]]:
    sharding = sharding_of(mesh, planes)
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(make_batch(planes)) as local:
        assert local["position_ids"].shape[:2] == (planes, 2)
        loss = compiled(**local)
    return step_of_ranks(model, loss, sharding)


@pytest.mark.parametrize("planes", PACKINGS)
def test_positions_in_planes_match_one_process(pool: Pool, planes: int) -> None:
    model = Model()
    loss = model(**make_batch(planes))
    loss.backward()
    total, grads = pool.run(2, step, planes)[0]
    assert abs(total - loss.item()) <= LIMIT * abs(loss.item())
    for key, p in model.named_parameters():
        assert p.grad is not None
        assert float((grads[key] - p.grad).norm() / p.grad.norm().clamp(min=1e-3)) <= LIMIT, key


@pytest.mark.parametrize("planes", PACKINGS)
def test_the_first_plane_tells_documents_apart(planes: int) -> None:
    report = cp.explain(Model(), sharding_of(2, planes))(**make_batch(planes))
    assert report.ok, report
    assert {site.mask for site in report.sites} == {str(cp.PackedMask(packed=planes == 4))}
