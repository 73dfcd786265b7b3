"""Models that no table names are tiled: what their layers do to tokens is proven, not looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.ops.tiles import REGIONS
from tests.helpers.packed_model import TOKENS, VOCAB, WIDTH, PackedModel
from tests.helpers.peak import largest_bytes
from tests.helpers.pool import Pool

SOURCE = Path(__file__).parent.parent.parent
LENGTH, DOCUMENTS = 8, 100


class MixtureOfSoftmaxes(PackedModel):
    """Each token has 12 softmaxes over the vocabulary, mixed by weights of its own."""

    def extra(self) -> None:
        self.prior, self.states, self.many = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 48), nn.Linear(4, 4 * VOCAB)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        h = F.pad(logits, (0, WIDTH - VOCAB))
        each = self.many(self.states(h).unflatten(-1, (12, 4)).tanh()).log_softmax(-1)
        mixed = (self.prior(h).log_softmax(-1)[..., None] + each).logsumexp(-2)
        return super().loss(mixed, labels, num_items)


class MaxoutTower(PackedModel):
    """The largest of 40 linear pieces, feature by feature."""

    def extra(self) -> None:
        self.pieces = nn.Linear(WIDTH, 40 * WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h + self.pieces(h).unflatten(-1, (40, WIDTH)).amax(-2)


class ProductKeyMemory(PackedModel):
    """Scores of 40 × 40 places, which are sums of two halves' scores; values of the 4 best."""

    def extra(self) -> None:
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40)
        self.values = nn.Parameter(torch.randn(1600, WIDTH) / 8)

    def mix(self, h: Tensor) -> Tensor:
        scores = (self.first(h)[..., :, None] + self.second(h)[..., None, :]).flatten(-2)
        best, places = scores.topk(4, dim=-1)
        return h + (best.softmax(-1)[..., None] * self.values[places]).sum(-2)


class RadialSplines(PackedModel):
    """Every feature on a grid of 50 bumps, checkpointed."""

    def extra(self) -> None:
        self.grid, self.back = nn.Parameter(torch.linspace(-2, 2, 50)), nn.Linear(50 * WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h + checkpoint(self.spread, h, use_reentrant=False)  # type: ignore[operator]

    def spread(self, h: Tensor) -> Tensor:
        return self.back((-(h.tanh()[..., None] - self.grid).square()).exp().flatten(-2))


class WeightsPerToken(PackedModel):
    """Each token makes the matrix that it is multiplied by."""

    def extra(self) -> None:
        self.maker = nn.Linear(WIDTH, WIDTH * WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h + torch.einsum("btd,btde->bte", h, self.maker(h).unflatten(-1, (WIDTH, WIDTH)).tanh())


MODELS = (MixtureOfSoftmaxes, MaxoutTower, ProductKeyMemory, RadialSplines, WeightsPerToken)


def make_batch() -> dict[str, Tensor]:
    """A row of equal documents."""
    ids = torch.randint(0, VOCAB, (1, LENGTH * DOCUMENTS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).repeat(DOCUMENTS)[None]
    documents = torch.arange(DOCUMENTS).repeat_interleave(LENGTH)[None]
    return {"input_ids": ids, "position_ids": positions, "doc_ids": documents, "labels": ids.roll(-1, 1),
            "num_items": torch.tensor(float(ids.numel()))}  # fmt: skip


def on_rank(mesh: DeviceMesh, kind: type[PackedModel], tile: int | None) -> tuple[int, int, float, list[Any]]:
    """How many regions ran in tiles, bytes of the largest tensor of a step, the rank's loss, the gradients."""
    model = kind().double()
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager", tile=tile)
    torch._dynamo.reset()
    REGIONS.clear()
    run: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    losses: list[float] = []

    def step() -> None:
        model.zero_grad()
        with sharding.shard(make_batch()) as local:
            loss = run(**local)
            loss.backward()
        losses.append(loss.item())

    step()
    largest = largest_bytes(step)
    cp.sum_gradients(model.parameters(), sharding)
    grads = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
    return len(REGIONS), largest, losses[-1], grads


@pytest.mark.parametrize("kind", [pytest.param(m, marks=pytest.mark.slow if i else ()) for i, m in enumerate(MODELS)])
def test_what_no_table_names_is_tiled(pool: Pool, kind: type[PackedModel]) -> None:
    alone = kind().double()
    loss = alone(**make_batch())
    loss.backward()
    at_once, tiled = pool.run(2, on_rank, kind, None), pool.run(2, on_rank, kind, 16)
    for (before, most, *_), (after, least, _, grads) in zip(at_once, tiled, strict=True):
        assert (before, after) == (0, 1)
        assert least < most / 2
        for ours, p in zip(grads, (p for p in alone.parameters() if p.grad is not None), strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), p.grad, rtol=1e-7, atol=1e-9)
    for found in (at_once, tiled):
        assert sum(part for _, _, part, _ in found) == pytest.approx(loss.item(), rel=1e-9)


def test_no_source_names_them() -> None:
    files = [*(SOURCE / "cp_rewrite").rglob("*.py"), *(SOURCE / "passes").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files).lower()
    assert "find_regions" in text
    assert not [kind.__name__ for kind in MODELS if kind.__name__.lower() in text.replace("_", "")]
