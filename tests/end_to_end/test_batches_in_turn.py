"""One compiled model, batches of other lengths and of rows that differ: loss and gradients of one process in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.planning.names import LAYOUTS
from tests.helpers.one_process import check_all
from tests.helpers.packed_model import TOKENS, VOCAB, WIDTH, PackedModel

Batch = dict[str, Tensor]
Mix = Callable[[Any, Tensor, Batch], Tensor]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, 1).sum(0)


def by_document(m: Any, h: Tensor, b: Batch) -> Tensor:
    index = b["doc_ids"][..., None].expand_as(h)
    return h + h.new_zeros(h.shape[0], 12, WIDTH).scatter_add(1, index, h).tanh().gather(1, index)


def in_documents(m: Any, h: Tensor, b: Batch) -> Tensor:
    index = torch.arange(h.shape[1])
    start = torch.where(b["position_ids"] == 0, index, 0).cummax(1).values
    return h * (1 + 0.1 * (index - start))[..., None]


def end_of_first(m: Any, h: Tensor, b: Batch) -> Tensor:
    return h + h[torch.arange(h.shape[0]), (b["doc_ids"] == 0).sum(1) - 1][:, None]


def written(m: Any, h: Tensor, b: Batch) -> Tensor:
    x = h * 1.0
    x[:, 0] = 0
    x[:, -1] = h[:, 1].sin()
    x[:, 2:] += h[:, :-2]
    return x


def to_the_end(m: Any, h: Tensor, b: Batch) -> Tensor:
    index, count = torch.arange(h.shape[1]), h.shape[1]
    return h * ((count - index) / count + (index == count - 1) + (index < count // 2))[:, None]


MIXES: dict[str, Mix] = {
    "shifted": lambda m, h, b: h + F.pad(m.out(h[:, 1:]) - h[:, :-1], (0, 0, 1, 0)),
    "convolved": lambda m, h, b: h + F.silu(m.conv(h.mT)[..., : h.shape[1]]).mT,
    "summed": lambda m, h, b: h + 0.1 * (h.cumsum(1) - h) + 0.1 * h.flip(1).cumsum(1).flip(1),
    "checkpointed": lambda m, h, b: checkpoint(lambda x: x + F.pad(x, (0, 0, 1, -1)).cumsum(1), h, use_reentrant=False),
    "picked": lambda m, h, b: h + h[:, -1:].tanh() * h[:, :1].sin(),
    "end_of_first": end_of_first,
    "by_document": by_document,
    "in_documents": in_documents,
    "own_backward": lambda m, h, b: Scaled.apply(h, m.w),  # type: ignore[arg-type]
    "chunked": lambda m, h, b: torch.cat([m.out(c).tanh() * c for c in h.chunk(2, 1)], 1),
    "written": written,
    "to_the_end": to_the_end,
    "normed": lambda m, h, b: (h - h[:, 1:].mean(1, keepdim=True)) / (1 + h.std(1, keepdim=True)),
    "table": lambda m, h, b: h * m.table[: h.shape[1]] * m.table[: h.shape[1]][b["position_ids"]],
}


class Mixed(PackedModel):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extra(self) -> None:
        self.w, self.table = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(40, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, **b: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        h = self.embed(b["input_ids"])
        mask = self.mask(h, b["doc_ids"], b["position_ids"], b["input_ids"])
        h = self.attended(h, mask)
        return self.loss(self.head(MIXES[self.name](self, h, b)), b["labels"], b["num_items"])


def pack(*rows: Sequence[int]) -> Batch:
    """A row of documents of each of these lengths."""
    generator = torch.Generator().manual_seed(sum(rows[0]))
    doc_ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    input_ids, labels = torch.randint(0, VOCAB, (2, *doc_ids.shape), generator=generator)
    labels[:, 1:3] = -100
    count = (labels != -100).sum().double()
    given = {"input_ids": input_ids, "position_ids": position_ids, "doc_ids": doc_ids, "labels": labels}
    return {**given, "num_items": count}


BATCHES = {
    "one row": [pack([5, 4, 5]), pack([23]), pack([1] * 9 + [3]), pack([6, 1, 11])],
    "two rows": [pack([5, 4, 5], [2, 12]), pack([23], [1] * 9 + [14]), pack([6, 1, 11], [17, 1])],
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", MIXES)
def test_batches_in_turn_are_right(name: str, rows: str) -> None:
    place = [*MIXES].index(name) + len(rows)
    layout: Any = sorted(LAYOUTS)[place % len(LAYOUTS)]
    torch._dynamo.reset()
    sharding = cp.Sharding(2 + place % 2, TOKENS, cp.DocumentIds("doc_ids"), layout)
    for report in check_all(Mixed(name).double(), sharding, BATCHES[rows]):
        assert report.largest <= 1e-7, str(report)


def of_the_last(m: Any, h: Tensor, b: Batch) -> Tensor:
    return h + F.pad(m.out(h[:, :-20]), (0, 0, 0, 20))


def in_another_dtype(m: Any, h: Tensor, b: Batch) -> Tensor:
    return torch.cat([m.norm(m.out(c)).to(torch.float64) for c in h.split(8, 1)], 1)


@pytest.mark.parametrize(
    ("mix", "rows", "lengths"),
    [(of_the_last, 1, (22, 21)), pytest.param(in_another_dtype, 2, (24, 33, 17), marks=pytest.mark.slow)],
)
def test_a_part_of_one_token_comes_later(mix: Mix, rows: int, lengths: Sequence[int]) -> None:
    """torch joins the dims of a part of one token as of any other."""
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    batches = [pack(*[[5, n - 5]] * rows) for n in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXES, "one token", mix)
        for report in check_all(Mixed("one token").double(), sharding, batches):
            assert report.largest <= 1e-7, str(report)
