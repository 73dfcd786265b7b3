"""Places, and numbers of documents, that a model picks tokens by or adds them up by: right ones, and those beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.border.model import TOKENS, Batch, Model, pack
from tests.border.outcome import Case

N = 4


def batch_of(lengths: tuple[int, ...], padding: int) -> dict[str, Any]:
    batch = pack(lengths, padding)
    sizes = torch.tensor(lengths)
    tokens = batch["doc_ids"].shape[1]
    others = torch.repeat_interleave(torch.arange(N), torch.tensor([1, 2, 4, tokens - 7]))[None]
    return batch | {
        "not_cut": others.clone(),
        "ends": sizes.cumsum(0) - 1,
        "starts": sizes.cumsum(0) - sizes,
        "others": others,
    }


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: batch_of((5, 4, 5), 0),
    "odd": lambda: batch_of((5, 4, 4), 0),
    "padded": lambda: batch_of((5, 4), 4),
}
"""The second has a row without a token on one of two ranks, the third tokens of no document too."""


def index(b: Batch) -> Tensor:
    return torch.arange(b["input_ids"].shape[1])


PLACES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "ends": lambda x, b: b["ends"],
    "behind_ends": lambda x, b: b["ends"][:-1] + 1,
    "before_starts": lambda x, b: b["starts"] - 1,
    "end_of_row": lambda x, b: torch.tensor([-1]),
    "last_of_mask": lambda x, b: (index(b) * (b["input_ids"] != 3)).argmax(1),
    "last_of_document": lambda x, b: (index(b) * (b["doc_ids"] == 1)).argmax(1),
    "last_of_documents": lambda x, b: (index(b) * (b["doc_ids"] >= 0)).argmax(1),
    "first_of_targets": lambda x, b: (b["labels"] != -100).int().argmax(1),
    "count_of_documents": lambda x, b: (b["doc_ids"] >= 0).sum(1) - 1,
    "count_of_tokens": lambda x, b: torch.ones_like(b["doc_ids"]).sum(1) - 1,
    "largest_score": lambda x, b: x[..., 0].argmax(1),
    "place_in_shard": lambda x, b: torch.tensor([b["input_ids"].shape[1] - 1]),
    "half_of_shard": lambda x, b: torch.tensor([b["input_ids"].shape[1] // 2]),
    "of_its_token": lambda x, b: b["input_ids"][0] % 7,
    "chosen_by_tokens": lambda x, b: b["ends"] - (b["input_ids"].sum() % 2),
}
"""Which tokens are picked: of the scores and the batch, (K,) places."""


def square(m: Any, x: Tensor, b: Batch) -> Tensor:
    return x.square().sum()


def mean(m: Any, x: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(m.score(x).flatten(0, -2), torch.zeros(x[..., 0].numel(), dtype=torch.long))


def margin(m: Any, x: Tensor, b: Batch) -> Tensor:
    reward = m.score(x)[..., 0].flatten()
    return -F.logsigmoid(reward - reward.mean().detach()).mean() + m.score.weight.square().sum()


USES: dict[str, Callable[[Any, Tensor, Batch], Tensor]] = {"square": square, "mean": mean, "margin": margin}

SEGMENTS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "documents": lambda x, b: b["doc_ids"].clamp(min=0),
    "other_packing": lambda x, b: b["others"],
    "not_cut": lambda x, b: b["not_cut"],
    "behind": lambda x, b: b["doc_ids"].clamp(min=0) + 1,
    "targets": lambda x, b: (b["labels"] != -100).long(),
    "pairs_of_tokens": lambda x, b: (index(b) // 4)[None] % N,
    "by_score": lambda x, b: (x[..., 0] > 0).long(),
    "counted": lambda x, b: (b["input_ids"] == 3).cumsum(1).clamp(max=3),
}
"""Numbers of segments, (1, T)."""


def added(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x.new_zeros(N, x.shape[-1]).index_add(0, ids[0], x[0])


def means(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    counts = torch.zeros(N).scatter_add(0, ids[0], torch.ones_like(x[0, :, 0]))
    return added(m, x, ids) / counts.clamp(min=1)[:, None]


def mean_of_means(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return means(m, x - x.mean(1, keepdim=True), ids)


def one_hot(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return F.one_hot(ids[0], N).float().T @ x[0]


def largest(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([torch.where((ids == i)[..., None], x, -9.0).amax(1)[0] for i in range(N)])


def spread_back(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x[0] * means(m, x, ids)[ids[0]]).mean(0, keepdim=True)


def mean_of_shard(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return added(m, x, ids) / x.shape[1]


SUMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    f.__name__: f for f in (added, means, mean_of_means, one_hot, largest, spread_back, mean_of_shard)
}


def names() -> list[tuple[str, ...]]:
    picked = [("pick", place, use, way) for place in PLACES for use in USES for way in WAYS]
    return picked + [("sum", ids, kind, way) for ids in SEGMENTS for kind in SUMS for way in WAYS]


def make(kind: str, of: str, use: str, way: str) -> Case:
    def extra(model: Any) -> None:
        model.score = nn.Linear(19, 3)

    def loss(model: Any, logits: Tensor, b: Batch) -> Any:
        x = logits * (b["doc_ids"] >= 0)[..., None] if kind == "sum" and way == "padded" else logits
        if kind == "sum":
            return mean(model, SUMS[use](model, x, SEGMENTS[of](x, b)), b)
        return USES[use](model, x[:, PLACES[of](x, b)], b)

    return Case(lambda: Model(loss, extra=extra), [WAYS[way]()], {**TOKENS, "others": 1})
