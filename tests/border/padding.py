"""Ways to pad a row × losses and statistics over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from tests.border.model import TOKENS, Batch, Model, cross_entropy, document_mask, pack
from tests.border.outcome import Case


def unpadded_mask(b: Batch) -> Tensor:
    """Padding sees itself alone."""
    ids = b["doc_ids"]
    index = torch.arange(ids.shape[1], device=ids.device)
    own = index[:, None] == index[None, :]
    return document_mask(b) & ((ids >= 0)[:, None, :, None] | own)


def sums_mask(b: Batch) -> Tensor:
    """Documents by the running sum of their lengths: what follows the last counts as one more."""
    index = torch.arange(b["input_ids"].shape[1], device=b["input_ids"].device)
    ids = torch.searchsorted(b["cu_seqlens"], index, right=True)
    return ((ids[:, None] == ids[None, :]) & (index[:, None] >= index[None, :]))[None, None]


def positions_mask(b: Batch) -> Tensor:
    """Documents start where positions are 0."""
    return document_mask({"doc_ids": (b["position_ids"] == 0).cumsum(1)})


@dataclass(frozen=True)
class Way:
    """A batch with tokens of no document, or one that does not fill its ranks, and how it is given.

    Args:
        pads: tokens of the batch that are padding; 0: the ranks have rows without a token.
    """

    batch: Callable[[], dict[str, Any]]
    pads: bool = True
    mask: Callable[[Batch], Tensor] = document_mask
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])


def between() -> dict[str, Any]:
    """Padding between documents and at the end."""
    batch = pack((5, 4, 5))
    batch["doc_ids"][0, 4], batch["doc_ids"][0, 12:] = -1, -1
    batch["labels"][batch["doc_ids"] < 0] = -100
    return batch | {"num_items": (batch["labels"] != -100).sum().float()}


def by_sums(total: int = 14) -> dict[str, Any]:
    return pack((5, 4), total - 9) | {"cu_seqlens": torch.tensor([0, 5, 9])}


def by_positions(rest: list[int]) -> dict[str, Any]:
    return pack((5, 4), len(rest)) | {"position_ids": torch.tensor([[*range(5), *range(4), *rest]])}


_SUMS = {"packing": cp.CuSeqlens("cu_seqlens")}
_POSITIONS = {
    "packing": cp.PositionIds("position_ids"),
    "tokens": {**TOKENS, "position_ids": 1},
    "shard": {"lengths": [5, 4]},
}
WAYS: dict[str, Way] = {
    "ids_at_end": Way(lambda: pack((5, 4), 5)),
    "ids_between": Way(between),
    "ids_hidden": Way(lambda: pack((5, 4), 5), mask=unpadded_mask),
    "ids_and_odd": Way(lambda: pack((5, 4), 4)),
    "sums_end_early": Way(by_sums, mask=sums_mask, given=_SUMS),
    "lengths_one_document": Way(lambda: by_positions([0, 1, 2, 3, 4]), mask=positions_mask, given=_POSITIONS),
    "lengths_of_one": Way(lambda: by_positions([0, 0, 0, 0, 0]), mask=positions_mask, given=_POSITIONS),
    "odd": Way(lambda: pack((5, 4, 4)), pads=False),
    "full": Way(pack, pads=False),
}


def z_loss(model: Model, logits: Tensor, b: Batch) -> Any:
    return cross_entropy(model, logits, b) + logits.logsumexp(-1).square().sum() / b["num_items"]


def z_loss_of_targets(model: Model, logits: Tensor, b: Batch) -> Any:
    z = torch.where(b["labels"] != -100, logits.logsumexp(-1).square(), 0.0)
    return cross_entropy(model, logits, b) + z.sum() / b["num_items"]


def entropy(model: Model, logits: Tensor, b: Batch) -> Any:
    p = logits.softmax(-1)
    return cross_entropy(model, logits, b) - (p * p.log()).sum() / b["num_items"]


def entropy_of_tokens(model: Model, logits: Tensor, b: Batch) -> Any:
    p = logits.softmax(-1)
    each = (p * p.log()).sum(-1) * (b["doc_ids"] >= 0)
    return cross_entropy(model, logits, b) - each.sum() / b["num_items"]


def sum_of_terms(model: Model, logits: Tensor, b: Batch) -> Any:
    """Each term is 0 where there is no target, and so is their sum."""
    each = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none").view_as(b["labels"])
    z = logits.logsumexp(-1).square() * (b["labels"] != -100)
    return (each + 0.1 * z).sum() / b["num_items"]


def count(model: Model, logits: Tensor, b: Batch) -> Any:
    return cross_entropy(model, logits, b), (logits[..., 0] > 0).sum()


def count_of_targets(model: Model, logits: Tensor, b: Batch) -> Any:
    right = (logits.argmax(-1) == b["labels"]) & (b["labels"] != -100)
    return cross_entropy(model, logits, b), right.sum()


def load(model: Model, logits: Tensor, b: Batch) -> Any:
    """How often each of four classes comes first, as a router counts."""
    first = F.one_hot(logits[..., :4].argmax(-1), 4).float()
    return cross_entropy(model, logits, b), first.sum((0, 1))


def mean_by_mask(model: Model, logits: Tensor, b: Batch) -> Any:
    """The mean over tokens of documents, by their number in the whole batch."""
    keep = (b["doc_ids"] >= 0).float()
    return (logits.square().mean(-1) * keep).sum() / b["num_tokens"]


def mean_by_other_mask(model: Model, logits: Tensor, b: Batch) -> Any:
    """A mask of the model's own, which says nothing of padding."""
    keep = (b["input_ids"] != 7).float()
    return (logits.square().mean(-1) * keep).sum() / b["num_tokens"]


def mean_over_ranks(model: Any, logits: Tensor, b: Batch) -> Any:
    """`token_mean` over all tokens there are."""
    each = logits.square().mean(-1)
    return cp.token_mean(each.sum(), torch.ones_like(each).sum(), model.sharding)


def largest(model: Model, logits: Tensor, b: Batch) -> Any:
    return cross_entropy(model, logits, b), logits.detach().amax()


def labels_counted(model: Model, logits: Tensor, b: Batch) -> Any:
    """Padding has labels like any token: see `labelled`."""
    return cross_entropy(model, logits, b)


def norm_of_hidden(model: Model, logits: Tensor, b: Batch) -> Any:
    """Adds what no attention reaches: the embedding of every token, padding too."""
    return cross_entropy(model, logits, b) + model.embed(b["input_ids"]).square().sum() / b["num_items"]


@dataclass(frozen=True)
class Loss:
    """`ignores`: padding counts nothing in it, so that it is the same on ranks."""

    loss: Callable[[Any, Tensor, Batch], Any]
    ignores: bool = False


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ignores=True),
    "labels_counted": Loss(labels_counted),
    "z_loss": Loss(z_loss),
    "z_loss_of_targets": Loss(z_loss_of_targets, ignores=True),
    "entropy": Loss(entropy),
    "entropy_of_tokens": Loss(entropy_of_tokens, ignores=True),
    "sum_of_terms": Loss(sum_of_terms, ignores=True),
    "count": Loss(count),
    "count_of_targets": Loss(count_of_targets, ignores=True),
    "load": Loss(load),
    "mean_by_mask": Loss(mean_by_mask, ignores=True),
    "mean_by_other_mask": Loss(mean_by_other_mask),
    "mean_over_ranks": Loss(mean_over_ranks),
    "largest": Loss(largest),
    "norm_of_hidden": Loss(norm_of_hidden),
}


def labelled(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with a target at every token, those of padding too."""
    labels = batch["labels"].clamp(min=0)
    return {**batch, "labels": labels, "num_items": torch.tensor(float(labels.numel()))}


def make(way: str, loss: str) -> Case:
    chosen, part = WAYS[way], LOSSES[loss]
    batch = chosen.batch()
    batch = labelled(batch) if loss == "labels_counted" else batch
    batch["num_tokens"] = (batch["doc_ids"] >= 0).sum().float()
    return Case(lambda: Model(part.loss, mask=chosen.mask), [batch], **chosen.given)


def names() -> list[tuple[str, str]]:
    return [(way, loss) for way in WAYS for loss in LOSSES]


def is_same(way: str, loss: str) -> bool:
    """True if the program means the same on ranks: no value in which they differ counts."""
    return LOSSES[loss].ignores or loss == "norm_of_hidden" or (way in ("full", "odd") and loss != "largest")
