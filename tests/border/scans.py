"""Running sums over tokens, right ones and those beside: other ends, other directions, other documents, other dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

from tests.border.model import TOKENS, Batch, Model, pack
from tests.border.outcome import Case


def between() -> dict[str, Any]:
    """Padding that stands before a document."""
    batch = pack((5, 4, 5))
    batch["doc_ids"] = torch.where(batch["doc_ids"] == 1, -1, batch["doc_ids"])
    batch["labels"][batch["doc_ids"] < 0] = -100
    return batch | {"num_items": (batch["labels"] != -100).sum().float()}


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: pack((5, 4, 5)),
    "odd": lambda: pack((5, 4, 4)),
    "padded": lambda: pack((5, 4), 4),
    "between": between,
}
"""The second has a row without a token on one of two ranks, the others tokens of no document."""


def starts(b: Batch) -> Tensor:
    """(1, T, 1) the first tokens of documents."""
    ids = b["doc_ids"]
    return (ids != F.pad(ids, (1, -1), value=-2))[..., None]


def index(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def since_start(x: Tensor, b: Batch, begin: Tensor) -> Tensor:
    x = x.square()
    total = x.cumsum(1)
    return total - torch.where(begin, total - x, 0.0).cummax(1).values


def last_start(x: Tensor, b: Batch) -> Tensor:
    """(1, T) where the document of each token begins."""
    return torch.where(starts(b)[..., 0], index(x), 0).cummax(1).values


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x.cumsum_(1)
    return x


def into(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:] = x.cumsum(1)
    return out


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ torch.eye(x.shape[-1])).float().cumsum(1)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.cumsum(1)


RUNS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "inclusive": lambda x, b: x.cumsum(1),
    "exclusive": lambda x, b: x.cumsum(1) - x,
    "shifted": lambda x, b: F.pad(x.cumsum(1), (0, 0, 1, -1)),
    "shifted_ahead": lambda x, b: F.pad(x.cumsum(1), (0, 0, -1, 1)),
    "of_shifted": lambda x, b: F.pad(x, (0, 0, 1, -1)).cumsum(1),
    "two_tokens": lambda x, b: (c := x.cumsum(1)) - F.pad(c, (0, 0, 2, -2)),
    "reversed": lambda x, b: x.flip(1).cumsum(1).flip(1),
    "half_reversed": lambda x, b: x.flip(1).cumsum(1),
    "reversed_behind": lambda x, b: x.cumsum(1).flip(1),
    "reversed_features": lambda x, b: x.flip(1, 2).cumsum(1).flip(1, 2),
    "what_follows": lambda x, b: x.sum(1, keepdim=True) - x.cumsum(1),
    "last_minus": lambda x, b: (c := x.cumsum(1))[:, -1:] - c,
    "features": lambda x, b: x.cumsum(-1),
    "tokens_and_features": lambda x, b: x.flatten(1).cumsum(1).view_as(x),
    "rows": lambda x, b: x.cumsum(0),
    "joined": lambda x, b: x.flatten(0, 1).cumsum(0).view_as(x),
    "twice": lambda x, b: x.cumsum(1).cumsum(1) / 10,
    "chunks": lambda x, b: x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).cumsum(2).flatten(1, 2).sum(1, True) + x,
    "padded_chunks": lambda x, b: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).cumsum(1).sum((1, 2)) + x,
    "first_tokens": lambda x, b: x[:, :5].cumsum(1).sum(1, keepdim=True) + x,
    "every_other": lambda x, b: x[:, ::2].cumsum(1).sum(1, keepdim=True) + x,
    "mean_so_far": lambda x, b: x.cumsum(1) / (index(x) + 1)[:, None],
    "mean_by_shard": lambda x, b: x.cumsum(1) / x.shape[1],
    "counted_mean": lambda x, b: x.cumsum(1) / torch.ones_like(x).cumsum(1),
    "largest": lambda x, b: x.cummax(1).values,
    "largest_of_equals": lambda x, b: x + (x.detach().round() * x[..., :1]).cummax(1).values,
    "least": lambda x, b: x.cummin(1)[0],
    "largest_before": lambda x, b: F.pad(x.cummax(1).values, (0, 0, 1, -1), value=-1.0),
    "largest_behind": lambda x, b: x.flip(1).cummax(1).values.flip(1),
    "place_of_largest": lambda x, b: x * x.round().cummax(1).indices,
    "since_largest": lambda x, b: x * (index(x)[:, None] - x.cummax(1).indices),
    "product": lambda x, b: (1 + 0.1 * x).cumprod(1),
    "product_of_mask": lambda x, b: x * (b["input_ids"] != 3).float().cumprod(1)[..., None],
    "product_with_zeros": lambda x, b: x.relu().cumprod(1),
    "logsumexp": lambda x, b: x.logcumsumexp(1),
    "logsumexp_of_masked": lambda x, b: x.masked_fill((b["input_ids"] > 9)[..., None], -9.0).logcumsumexp(1),
    "documents": lambda x, b: since_start(x, b, starts(b)),
    "wrong_documents": lambda x, b: since_start(x, b, starts(b).roll(1, 1)),
    "documents_by_gather": lambda x, b: (c := x.cumsum(1)) - c.gather(1, last_start(x, b)[..., None].expand_as(c)) + x,
    "documents_by_index": lambda x, b: (c := x.cumsum(1)) - c[0, last_start(x, b)[0]][None] + x,
    "since_start": lambda x, b: x * (index(x) - last_start(x, b))[..., None],
    "ids": lambda x, b: x * ((b["input_ids"] == 3).cumsum(1) % 3)[..., None],
    "masked": lambda x, b: (x * (b["doc_ids"] >= 0)[..., None]).cumsum(1),
    "masked_wrongly": lambda x, b: (x * (b["doc_ids"] >= 1)[..., None]).cumsum(1),
    "masked_largest": lambda x, b: x + torch.where((b["doc_ids"] >= 0)[..., None], x, -9.0).cummax(1).values,
    "in_place": lambda x, b: in_place(x),
    "into": lambda x, b: into(x),
    "autocast": lambda x, b: under_autocast(x),
    "no_gradient": lambda x, b: x * without_gradient(x),
    "checkpointed": lambda x, b: checkpoint(lambda y: y.cumsum(1).tanh(), x, use_reentrant=False),  # type: ignore
    "mapped": lambda x, b: torch.vmap(lambda y: y.cumsum(0))(x),
    "associative": lambda x, b: associative_scan(lambda p, q: p + q, x, 1, combine_mode="generic"),
    "triangle": lambda x, b: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
    "differences": lambda x, b: F.pad(x.cumsum(1).diff(dim=1), (0, 0, 1, 0)),
    "trapezoid": lambda x, b: torch.cumulative_trapezoid(x, dim=1).sum(1, keepdim=True) + x,
}
"""By name: (scores (1, T, V), batch) -> what is made of them for each token."""


def names() -> list[tuple[str, ...]]:
    return [(run, way) for run in RUNS for way in WAYS]


def make(run: str, way: str) -> Case:
    def loss(model: Any, x: Tensor, b: Batch) -> Any:
        x = x + 0.3 * RUNS[run](x, b)
        return F.cross_entropy(x.flatten(0, 1), b["labels"].flatten(), reduction="sum") / b["num_items"]

    return Case(lambda: Model(loss), [WAYS[way]()], TOKENS)
