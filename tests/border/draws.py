"""Random numbers × the regions that they are drawn in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.border.model import Batch, Model, pack
from tests.border.outcome import Case

Draw = Callable[[Any, Tensor], Tensor]
"""(model, hidden states (…, W)) -> what is added to them."""


def rand_like(model: Any, h: Tensor) -> Tensor:
    return torch.rand_like(h)


def one_number(model: Any, h: Tensor) -> Tensor:
    return torch.rand((), device=h.device)


def per_feature(model: Any, h: Tensor) -> Tensor:
    return torch.randn(h.shape[-1], device=h.device)


def normal_in_place(model: Any, h: Tensor) -> Tensor:
    return torch.empty_like(h).normal_()


def dropout(model: Any, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5)


def dropout_module(model: Any, h: Tensor) -> Tensor:
    return model.drop(h)


def rrelu(model: Any, h: Tensor) -> Tensor:
    return F.rrelu(h, training=True)


def bernoulli(model: Any, h: Tensor) -> Tensor:
    return torch.bernoulli(h.sigmoid())


def multinomial(model: Any, h: Tensor) -> Tensor:
    return torch.multinomial(h.softmax(-1).reshape(-1, h.shape[-1]), 1).view(*h.shape[:-1], 1).float()


def gumbel(model: Any, h: Tensor) -> Tensor:
    return F.gumbel_softmax(h, dim=-1)


def permuted_features(model: Any, h: Tensor) -> Tensor:
    return h[..., torch.randperm(h.shape[-1], device=h.device)]


def own_generator(model: Any, h: Tensor) -> Tensor:
    return torch.rand(h.shape[-1], generator=model.generator)


def python_number(model: Any, h: Tensor) -> Tensor:
    return h * random.uniform(0, 1)


def python_range(model: Any, h: Tensor) -> Tensor:
    return h * random.randint(1, 9)


def python_branch(model: Any, h: Tensor) -> Tensor:
    """A layer left out at random."""
    return h if random.uniform(0, 1) < 0.5 else torch.zeros_like(h)


def python_generator(model: Any, h: Tensor) -> Tensor:
    return h * model.python.random()


def numpy_number(model: Any, h: Tensor) -> Tensor:
    return h * torch.as_tensor(np.random.rand(1)).to(h.dtype)


def numpy_generator(model: Any, h: Tensor) -> Tensor:
    return h * model.numpy.random()


def drawn_outside(model: Any, h: Tensor) -> Tensor:
    """Drawn when the model was made, not alike on all ranks."""
    return h * model.number


def no_draw(model: Any, h: Tensor) -> Tensor:
    """Dropout that is off."""
    return F.dropout(h, 0.5, training=False)


DRAWS: dict[str, Draw] = {
    f.__name__: f
    for f in (
        rand_like, one_number, per_feature, normal_in_place, dropout, dropout_module, rrelu, bernoulli, multinomial,
        gumbel, permuted_features, own_generator, python_number, python_range, python_branch, python_generator,
        numpy_number, numpy_generator, drawn_outside, no_draw,
    )
}  # fmt: skip


Mix = Callable[[Any, Tensor], Any]


def plain(draw: Draw) -> Mix:
    return lambda model, h: h + draw(model, h)


def checkpointed(draw: Draw) -> Mix:
    return lambda model, h: checkpoint(lambda x: x + draw(model, x), h, use_reentrant=False)


def in_region(draw: Draw) -> Mix:
    return torch.compiler.nested_compile_region(lambda model, h: h + draw(model, h))


def mapped(draw: Draw) -> Mix:
    """Over the rows of the batch, of which there is one."""
    return lambda model, h: torch.vmap(lambda row: row + draw(model, row), randomness="different")(h)


def mapped_alike(draw: Draw) -> Mix:
    """Over features, which no rank cuts."""
    return lambda model, h: torch.vmap(lambda row: row + draw(model, row), -1, -1, randomness="same")(h)


def mapped_alone(draw: Draw) -> Mix:
    """Draws for the rows of a table of weights, which knows nothing of tokens."""

    def mix(model: Any, h: Tensor) -> Tensor:
        table: Any = torch.vmap(lambda row: row + draw(model, row), randomness="different")(model.head.weight)
        return h + table[0]

    return mix


class Early(Model):
    """Carries a drawn number over a graph break, when no tokens are in flight."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(mix=lambda model, h, b: h + model.early, extra=extra)
        self.draw = draw

    def forward(self, **b: Any) -> Any:
        number = self.draw(self, self.head.weight).mean()
        torch._dynamo.graph_break()
        self.early = number
        return super().forward(**b)


REGIONS: dict[str, Callable[[Draw], Mix]] = {
    f.__name__: f for f in (plain, checkpointed, in_region, mapped, mapped_alike, mapped_alone)
}


UNMAPPED = frozenset(
    {("rrelu", region) for region in ("mapped", "mapped_alike", "mapped_alone")}
    | {("bernoulli", "mapped_alike"), ("multinomial", "mapped_alike")}
)
"""(draw, region) that torch.vmap can't run."""


def extra(model: Any) -> None:
    model.drop = nn.Dropout(0.5)
    model.generator = torch.Generator().manual_seed(0)
    model.python, model.numpy, model.number = random.Random(0), np.random.default_rng(0), 0.5


def seed(rank: int, model: Any) -> None:
    """No generator is seeded alike on all ranks, as in scripts that add the rank to the seed."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model.python, model.numpy, model.number = random.Random(rank), np.random.default_rng(rank), 0.5 + rank
    model.generator = torch.Generator().manual_seed(rank)


def make(draw: str, region: str) -> Case:
    batches = [pack(), pack((3, 8, 3), seed=2)]
    if region == "before_break":
        return Case(lambda: Early(DRAWS[draw]), batches, on_rank=seed, fullgraph=False)
    drawn = REGIONS[region](DRAWS[draw])

    def mix(model: Any, h: Tensor, b: Batch) -> Any:
        return drawn(model, h)

    return Case(lambda: Model(mix=mix, extra=extra), batches, on_rank=seed)


def names() -> list[tuple[str, str]]:
    return [parts for parts in itertools.product(DRAWS, (*REGIONS, "before_break")) if parts not in UNMAPPED]


def is_same(draw: str, region: str) -> bool:
    return draw == "no_draw"
