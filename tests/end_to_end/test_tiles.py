"""Regions that run tile by tile give what they give at once; the wide tensors of all rows are not there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.ops.tiles import REGIONS, RowDim, run_tiles
from tests.helpers.one_process import check_or_refuse, compare
from tests.helpers.packed_model import TOKENS, VOCAB, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

WIDE = 40 * VOCAB
"""Entries of a head that is worth a tile: the model's own has fewer than its rows of hidden states."""


class Wide(PackedModel):
    """A head with `WIDE` entries a row, and a loss that subclasses write in their own way."""

    def extra(self) -> None:
        self.head = nn.Linear(WIDTH, WIDE)


class Mean(Wide):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Smoothed(Wide):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        flat = logits.flatten(0, 1)
        return F.cross_entropy(flat, labels.flatten(), reduction="sum", label_smoothing=0.1) / num_items


class SoftCap(Wide):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(30 * torch.tanh(logits / 30), labels, num_items)


class ZLoss(Wide):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        z = (logits.logsumexp(-1) ** 2 * (labels != -100)).sum()
        return super().loss(logits, labels, num_items) + 1e-2 * z / num_items


class Picked(Wide):
    """Log-probabilities of the tokens that came, and the entropy beside them, as GRPO and DPO have them."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        shown = labels != -100
        logp = logits.log_softmax(-1)
        picked = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return ((picked - 0.1 * entropy) * shown).sum() / num_items


class Shifted(Wide):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        flat = logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / num_items


class Chunks(Wide):
    """A loss in a loop, as people write it to save memory: its chunks are joined, then tiled."""

    def forward(self, input_ids: Any, position_ids: Any, doc_ids: Any, labels: Any, num_items: Any) -> Any:
        h = self.inputs(input_ids, position_ids)
        h = self.attended(h, self.mask(h, doc_ids, position_ids, input_ids))
        parts = zip(h.chunk(4, 1), labels.chunk(4, 1), strict=True)
        return sum(super(Chunks, self).loss(self.head(a), b, num_items) for a, b in parts)


class Tied(PackedModel):
    """The head is the table of embeddings: its gradient comes from both."""

    def extra(self) -> None:
        self.embed = nn.Embedding(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, WIDE, bias=False)
        self.head.weight = self.embed.weight


class TwoHeads(Wide):
    def extra(self) -> None:
        super().extra()
        self.second = nn.Linear(WIDTH, WIDE)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        other = F.cross_entropy(self.second(logits[..., :WIDTH]).flatten(0, 1), labels.flatten(), reduction="sum")
        return super().loss(logits, labels, num_items) + other / num_items


class GatedMLP(PackedModel):
    """A block whose inside is wide: rows go in and come out, the inside is computed again for the gradients."""

    def extra(self) -> None:
        self.up, self.gate = nn.Linear(WIDTH, 10 * WIDTH), nn.Linear(WIDTH, 10 * WIDTH)
        self.down = nn.Linear(10 * WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return h + self.down(F.silu(self.gate(h)) * self.up(h))


class HeadsApart(PackedModel):
    """Rows that lie in memory as attention left them: what views them later views what the tiles give."""

    def extra(self) -> None:
        self.wide = nn.Linear(WIDTH // 2, 20 * WIDTH)
        self.back = nn.Linear(20 * WIDTH, WIDTH // 2)

    def mix(self, h: Tensor) -> Tensor:
        heads = h.unflatten(-1, (2, -1)).transpose(1, 2)
        heads = heads + self.back(self.wide(heads.contiguous()).tanh().transpose(1, 2)).transpose(1, 2)
        return heads.transpose(1, 2).reshape(*h.shape)


class Transposed(Wide):
    """Logits with their tokens last, as losses over dims take them, and a weight that comes turned."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / num_items


class Constants(Wide):
    """Regions that differ in nothing but numbers of a list."""

    def mix(self, h: Tensor) -> Tensor:
        for entries in ([1, 3], [2, 5]):
            picked = self.head(h).sin()[..., entries].sum(-1, keepdim=True)
            h = self.attended(h + picked, self.seen)
        return h

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        self.seen = super().mask(h, doc_ids, position_ids, input_ids)
        return self.seen


class Autocast(Wide):
    """The head in another dtype than the rest: which ops run is decided where the region is traced."""

    def forward(self, *args: Any, **batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return super().forward(*args, **batch)


class InCheckpoint(PackedModel):
    """A block that is computed again: its MLP runs tile by tile inside, though it is no wider than usual."""

    def extra(self) -> None:
        self.up, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return checkpoint(self.block, h, use_reentrant=False)  # type: ignore[return-value]

    def block(self, h: Tensor) -> Tensor:
        x = F.layer_norm(h, h.shape[-1:])
        return h + self.down(F.silu(self.gate(x)) * self.up(x))


class SizesAsked(InCheckpoint):
    """Products that ask for their operand's sizes, as GPT-2's do: who asks reads no row."""

    def block(self, h: Tensor) -> Tensor:
        return h + self.product(self.product(F.layer_norm(h, h.shape[-1:]), self.up).tanh(), self.down)

    def product(self, x: Tensor, weights: nn.Linear) -> Tensor:
        sizes = (*x.size()[:-1], weights.out_features)
        return torch.addmm(weights.bias, x.view(-1, x.size(-1)), weights.weight.t()).view(sizes)


class CheckpointedAutocast(InCheckpoint):
    """Contexts that are open around a checkpoint are open in its tiles."""

    def mix(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float64, enabled=False):
            return super().mix(h)


class CheckpointedLoss(Wide):
    """A head and its loss that are computed again."""

    def forward(self, input_ids: Any, position_ids: Any, doc_ids: Any, labels: Any, num_items: Any) -> Any:
        h = self.inputs(input_ids, position_ids)
        h = self.attended(h, self.mask(h, doc_ids, position_ids, input_ids))
        return checkpoint(lambda x: super(CheckpointedLoss, self).loss(self.head(x), labels, num_items), h,
                          use_reentrant=False)  # fmt: skip


MODELS = [
    Wide,
    Mean,
    Smoothed,
    SoftCap,
    ZLoss,
    Picked,
    Shifted,
    Chunks,
    Tied,
    TwoHeads,
    GatedMLP,
    Autocast,
    InCheckpoint,
    SizesAsked,
    CheckpointedAutocast,
    CheckpointedLoss,
]


QUICK = [Mean, ZLoss, Chunks, GatedMLP, HeadsApart, Constants, InCheckpoint, SizesAsked]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("model", "rows"),
    [(model, 1) if model in QUICK else pytest.param(model, 2, marks=pytest.mark.slow) for model in MODELS],
)
def test_tiles_give_what_all_rows_at_once_give(model: type[PackedModel], rows: int) -> None:
    REGIONS.clear()
    assert check_or_refuse(model(), rows=rows, tile=3) is None
    assert REGIONS, "nothing was tiled"


def test_narrow_models_are_left_alone() -> None:
    REGIONS.clear()
    assert check_or_refuse(PackedModel(), tile=3) is None
    assert not REGIONS


def test_nothing_of_a_tile_is_held_while_the_next_runs() -> None:
    """A gradient of the head is as large as the head."""
    given = list[weakref.ref[Tensor]]()

    def run(part: str, tile: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        assert all(x() is None for x in given)
        found = [2 * tile[0], tile[0].sum(0)]
        given.extend(map(weakref.ref, found))
        return found

    region: Any = SimpleNamespace(run=run, row_dims=(RowDim(0),), result_dims=(RowDim(0), None), chunks=0)
    x = torch.arange(20.0).view(10, 2)
    twice, total = run_tiles(region, [x], [], 3)
    assert len(given) == 2 * 4
    assert twice.equal(2 * x)
    assert total.equal(x.sum(0))


class Returned(Wide):
    """Logits that come back beside the loss."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items), logits


class ReturnedCopy(Wide):
    """In a dict, as a copy that nothing else reads and as they are, from a head with a soft cap."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        logits = 30 * torch.tanh(logits / 30)
        return {"loss": super().loss(logits, labels, num_items), "wide": logits.to(torch.float32), "logits": logits}


class ReturnedTied(Tied):
    """Tokens first, log-probabilities and states of the last layer too; the head is the table of embeddings."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return super().loss(logits, labels, num_items), logits.log_softmax(-1), logits.transpose(0, 1).contiguous()


class ReturnedMean(ReturnedTied):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.log_softmax(-1)


class ReturnedTurned(Returned):
    """States and the weight of the head lie in memory the other way around."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDE) / 5)

        def forward(self, h: Tensor) -> Tensor:
            return F.linear(h, self.weight.t())

    def extra(self) -> None:
        self.head = self.Head()

    def mix(self, h: Tensor) -> Tensor:
        return h.transpose(1, 2).contiguous().transpose(1, 2)


SLOW = [(ReturnedCopy, 2), (ReturnedMean, 1)]


@pytest.mark.parametrize(
    ("model", "rows"),
    [(Returned, 1), (ReturnedTied, 1), (ReturnedTurned, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)],
)
def test_what_is_returned_beside_a_loss_is_left_out(model: type[PackedModel], rows: int) -> None:
    """The stand-in has the values of one process, and the loss runs in tiles."""
    REGIONS.clear()
    assert check_or_refuse(model(), rows=rows, tile=3) is None
    assert REGIONS


class LossOutside(Wide):
    """A scalar beside logits that is no loss of theirs: what trains on them stands outside."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits, self.embed.weight.square().sum()


@pytest.mark.parametrize(("model", "how"), [(Returned, {"keep_outputs": True}), (LossOutside, {})])
def test_what_is_kept_is_not_tiled(model: type[PackedModel], how: dict[str, Any]) -> None:
    REGIONS.clear()
    report = cp.explain(model(), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), tile=3, **how))(**packed_batch())
    assert report.ok
    assert not REGIONS


def _model(name: str) -> nn.Module:
    return {each.__name__: each for each in MODELS}[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mean", "ZLoss", "GatedMLP", "Tied"])
def test_tiles_on_processes(pool: Pool, name: str) -> None:
    compare(pool, _model, name, 2, "balanced", 1, 23, tile=4)


@pytest.mark.parametrize("tile", [0, -1, 2.5, True, "all"])
def test_a_tile_is_a_number_of_rows(tile: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="tile"):
        cp.Sharding(2, {"ids": 1}, cp.WholeRows(), tile=tile)
