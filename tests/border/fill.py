"""Rows that fill a rank up × functions that are not defined, or not differentiable, at what such rows may hold.

Every program here leaves such rows out of its loss by their label, so that it is the same on ranks: whatever these rows
hold, nothing of it may reach a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.border.model import TOKENS, Batch, Model, cross_entropy, pack
from tests.border.outcome import Case

DIM = {"positive": 1, "features": 1, "allowed": 1, "ids": 1}


def inputs() -> dict[str, Any]:
    """13 tokens, so that one of two ranks has a row without a token, and values by token that are never 0."""
    generator = torch.Generator().manual_seed(2)
    batch = pack((5, 4, 4))
    shape = batch["input_ids"].shape
    allowed = F.one_hot(torch.randint(0, 3, shape, generator=generator), 4)
    allowed[..., 3] = 1
    return batch | {
        "positive": 0.5 + torch.rand(shape, generator=generator),
        "features": torch.randn(*shape, 4, generator=generator),
        "allowed": F.one_hot(torch.randint(0, 3, shape, generator=generator), 4).bool()
        | torch.tensor([[[0, 0, 0, 1]]]).bool(),
        "ids": torch.randint(1, 5, shape, generator=generator),
    }


def extra(model: Any) -> None:
    model.scale = nn.Parameter(torch.ones(()))
    model.table = nn.Embedding(5, 4)
    model.values = nn.Parameter(torch.rand(5))


Factor = Callable[[Any, Tensor, Batch], Tensor]
"""(model, hidden states (B, T, W), batch) -> one factor per token, (B, T)."""


def reciprocal(model: Model, h: Tensor, b: Batch) -> Tensor:
    return 1 / b["positive"]


def logarithm(model: Model, h: Tensor, b: Batch) -> Tensor:
    return b["positive"].log()


def reciprocal_root(model: Any, h: Tensor, b: Batch) -> Tensor:
    return (b["positive"] * model.scale).rsqrt()


def root(model: Any, h: Tensor, b: Batch) -> Tensor:
    return (b["positive"] * model.scale).sqrt()


def negative_power(model: Model, h: Tensor, b: Batch) -> Tensor:
    return b["positive"] ** -0.5


def power_of_learned(model: Any, h: Tensor, b: Batch) -> Tensor:
    return b["positive"] ** (-model.scale)


def length_divides(model: Model, h: Tensor, b: Batch) -> Tensor:
    return 1 / b["ids"]


def whole_division(model: Model, h: Tensor, b: Batch) -> Tensor:
    return (12 // b["ids"]).float()


def remainder(model: Model, h: Tensor, b: Batch) -> Tensor:
    return (7 % b["ids"]).float()


def times_logarithm(model: Any, h: Tensor, b: Batch) -> Tensor:
    x = b["positive"] * model.scale
    return x * x.log()


def log_of_rest(model: Any, h: Tensor, b: Batch) -> Tensor:
    return torch.log(1 - torch.exp(-b["positive"] * model.scale))


def arc_cosine(model: Any, h: Tensor, b: Batch) -> Tensor:
    return torch.acos(1 - 0.5 * b["positive"] * model.scale)


def digamma(model: Model, h: Tensor, b: Batch) -> Tensor:
    return torch.digamma(b["positive"])


def log_normal(model: Any, h: Tensor, b: Batch) -> Tensor:
    """A density whose deviation is given per token."""
    return -0.5 * ((h[..., 0] - model.scale) / b["positive"]).square() - b["positive"].log()


def unit_norm(model: Any, h: Tensor, b: Batch) -> Tensor:
    x = b["features"] * model.scale
    return (x / x.norm(dim=-1, keepdim=True)).sum(-1)


def normalised(model: Any, h: Tensor, b: Batch) -> Tensor:
    return F.normalize(b["features"] * model.scale, dim=-1).sum(-1)


def cosine(model: Any, h: Tensor, b: Batch) -> Tensor:
    return F.cosine_similarity(b["features"] * model.scale, h[..., :4], dim=-1)


def deviation(model: Any, h: Tensor, b: Batch) -> Tensor:
    return (b["features"] * model.scale).std(-1)


def standardised(model: Any, h: Tensor, b: Batch) -> Tensor:
    x = b["features"] * model.scale
    return ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))[..., 0] * model.scale


def angle(model: Any, h: Tensor, b: Batch) -> Tensor:
    x = b["features"] * model.scale
    return torch.atan2(x[..., 0], x[..., 1])


def distance(model: Any, h: Tensor, b: Batch) -> Tensor:
    return (b["features"] * model.scale).square().sum(-1).sqrt()


def share(model: Any, h: Tensor, b: Batch) -> Tensor:
    x = b["features"].abs() * model.scale
    return (x / x.sum(-1, keepdim=True))[..., 0]


def softmax_of_allowed(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h[..., :4].masked_fill(~b["allowed"], -torch.inf).softmax(-1)[..., 3]


def log_of_allowed(model: Model, h: Tensor, b: Batch) -> Tensor:
    return (h[..., :4].softmax(-1) * b["allowed"]).sum(-1).log()


def sum_of_allowed(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h[..., :4].masked_fill(~b["allowed"], -torch.inf).logsumexp(-1)


def mean_of_allowed(model: Model, h: Tensor, b: Batch) -> Tensor:
    return (h[..., :4] * b["allowed"]).sum(-1) / b["allowed"].sum(-1)


def embedding_before(model: Any, h: Tensor, b: Batch) -> Tensor:
    return model.table(b["ids"] - 1).sum(-1)


def gather_before(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h.gather(-1, b["ids"][..., None] - 1)[..., 0]


def index_before(model: Any, h: Tensor, b: Batch) -> Tensor:
    return model.values[b["ids"] - 1]


def select_before(model: Any, h: Tensor, b: Batch) -> Tensor:
    return model.values.index_select(0, b["ids"].flatten() - 1).view_as(b["ids"])


def one_hot_before(model: Any, h: Tensor, b: Batch) -> Tensor:
    return (F.one_hot(b["ids"] - 1, 5) * model.values).sum(-1)


def inverse_matrix(model: Any, h: Tensor, b: Batch) -> Tensor:
    return torch.linalg.inv(b["features"].unflatten(-1, (2, 2)) * model.scale)[..., 0, 0]


FACTORS: dict[str, Factor] = {
    f.__name__: f
    for f in (
        reciprocal, logarithm, reciprocal_root, root, negative_power, power_of_learned, length_divides, whole_division,
        remainder, times_logarithm, log_of_rest, arc_cosine, digamma, log_normal, unit_norm, normalised, cosine,
        deviation, standardised, angle, distance, share, softmax_of_allowed, log_of_allowed, sum_of_allowed,
        mean_of_allowed, embedding_before, gather_before, index_before, select_before, one_hot_before, inverse_matrix,
    )
}  # fmt: skip


def on_logits(factor: Factor) -> Model:
    """Into the scores, as a temperature goes."""

    def loss(model: Model, logits: Tensor, b: Batch) -> Tensor:
        return cross_entropy(model, logits * factor(model, logits, b)[..., None], b)

    return Model(loss, extra=extra)


def on_hidden(factor: Factor) -> Model:
    return Model(mix=lambda model, h, b: h * factor(model, h, b)[..., None], extra=extra)


def _each(logits: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none").view_as(b["labels"])


def on_losses(factor: Factor) -> Model:
    """The losses of rows without a token are 0, and 0 times anything is taken for 0."""

    def loss(model: Model, logits: Tensor, b: Batch) -> Tensor:
        keep = b["labels"] != -100
        return (_each(logits, b) * factor(model, logits, b) * keep).sum() / b["num_items"]

    return Model(loss, extra=extra)


def picked_by_where(factor: Factor) -> Model:
    """Losses of rows without a token are thrown away, in the forward."""

    def loss(model: Model, logits: Tensor, b: Batch) -> Tensor:
        term = torch.where(b["labels"] != -100, _each(logits, b) * factor(model, logits, b), 0.0)
        return term.sum() / b["num_items"]

    return Model(loss, extra=extra)


PLACES: dict[str, Callable[[Factor], Model]] = {
    f.__name__: f for f in (on_logits, on_hidden, on_losses, picked_by_where)
}


def make(factor: str, place: str) -> Case:
    return Case(lambda: PLACES[place](FACTORS[factor]), [inputs()], tokens={**TOKENS, **DIM})


def names() -> list[tuple[str, str]]:
    return [(factor, place) for factor in FACTORS for place in PLACES]


def is_same(factor: str, place: str) -> bool:
    return True
