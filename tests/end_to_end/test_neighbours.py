"""Shifts, rolls and convolutions over tokens read the rows of neighbours: one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite.planning.names import LAYOUTS
from tests.helpers.one_process import compare
from tests.helpers.packed_model import TOKENS, VOCAB, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

Mix = Callable[["Neighbours", Tensor], Tensor]


class Neighbours(PackedModel):
    """The packed model with other functions of hidden states, beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.prompt, self.prefix = (nn.Parameter(torch.randn(1, 2, WIDTH)) for _ in range(2))
        self.pad = nn.ZeroPad2d((0, 0, 1, -1))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.plain = nn.Conv1d(WIDTH, WIDTH, 4, groups=2, bias=False)
        self.wide = nn.Conv1d(WIDTH, 5, 3, padding=4, dilation=2)
        self.same = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")
        self.back = nn.Linear(5, WIDTH)

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        h = self.embed(input_ids)
        return sum((POSITIONED[name](h, position_ids) for name in self.names if name in POSITIONED), h)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        found = [LOSSES[name](logits, labels) for name in self.names if name in LOSSES]
        return sum(((1 + i / 9) * loss for i, loss in enumerate(found)), super().loss(logits, labels, num_items))

    def mix(self, h: Tensor) -> Tensor:
        return sum((MIXES[name](self, h) * (1 + i / 9) for i, name in enumerate(self.names) if name in MIXES), h)


def canon(m: Neighbours, h: Tensor) -> Tensor:
    """Hidden states beside a causal convolution of them."""
    return h + F.conv1d(F.pad(h.transpose(1, 2), (3, 0)), m.plain.weight, None, groups=2).transpose(1, 2)


MIXES: dict[str, Mix] = {
    "cat_zeros": lambda m, h: torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1),
    "cat_times_zero": lambda m, h: torch.cat([h[:, :1] * 0, h[:, :-1]], dim=1).square(),
    "cat_new_zeros": lambda m, h: torch.cat([h.new_zeros(h.shape[0], 2, WIDTH), h[:, :-2]], dim=1),
    "cat_parameter": lambda m, h: torch.cat([m.first.expand(h.shape[0], -1, -1), h[:, :-1]], dim=1).sin(),
    "cat_mean": lambda m, h: torch.cat([h.mean(1, keepdim=True).sin(), h[:, :-1]], 1),
    "cat_sum_behind": lambda m, h: torch.cat([h[:, 2:], h.sum(1, keepdim=True) / 9, m.first.expand_as(h[:, :1])], 1),
    "cat_ends_of_another": lambda m, h: torch.cat([m.norm(h[:, -2:]), h.cos()[:, 2:]], 1),
    "cat_first": lambda m, h: h - torch.cat((h[:, :1], h[:, :-1]), 1),
    # Nothing is left of these: their gradients are zero.
    "prompt_left_out": lambda m, h: torch.cat([m.prompt.expand(h.shape[0], -1, -1), h], 1)[:, 2:].sin(),
    "prefix_left_out": lambda m, h: torch.cat([m.prefix.expand(h.shape[0], -1, -1), h, h[:, :1]], 1)[:, 3:].cos(),
    "pad_negative": lambda m, h: F.pad(h, (0, 0, 1, -1)),
    "pad_and_slice": lambda m, h: F.pad(h, (0, 0, 3, 0))[:, : h.shape[1]],
    "pad_and_slice_back": lambda m, h: F.pad(h, (0, 0, 3, 0), value=0.5)[:, :-3].sin(),
    "pad_ahead": lambda m, h: F.pad(h, (0, 0, 0, 2))[:, 2:].cos(),
    "time_shift": lambda m, h: m.pad(h) * 0.3 + h * 0.7,
    "narrow": lambda m, h: F.pad(h, (0, 0, 1, 1)).narrow(1, 2, h.shape[1]).tanh(),
    "roll": lambda m, h: h.roll(1, 1),
    "roll_back": lambda m, h: torch.roll(h, shifts=(-3,), dims=(1,)).square(),
    "turned": lambda m, h: h.flip(1).sin(),
    "turned_shift": lambda m, h: F.pad(h, (0, 0, 1, -1), value=0.5).flip(1).cos(),
    "there_and_back": lambda m, h: F.pad(h.flip(1), (0, 0, 2, -2)).flip(1),
    "channels_halved": lambda m, h: torch.cat([F.pad(h[..., : WIDTH // 2], (0, 0, 1, -1)), h[..., WIDTH // 2 :]], -1),
    "twice": lambda m, h: F.pad(F.pad(h, (0, 0, 1, -1)).exp(), (0, 0, 1, -1)),
    "short_conv": lambda m, h: m.conv(h.mT)[..., : h.shape[1]].mT,
    "silu_conv": lambda m, h: F.silu(m.conv(h.transpose(1, 2))[:, :, : h.shape[1]]).transpose(1, 2),
    "gated_conv": lambda m, h: (m.conv((h * h.sin()).mT)[..., :-2] * h.mT).mT,
    "canon": lambda m, h: canon(m, h),
    "dilated_conv": lambda m, h: m.back(m.wide(h.mT)[..., :-4].mT),
    "same_conv": lambda m, h: m.same(h.mT).mT,
    "anticausal_conv": lambda m, h: m.conv(h.mT)[..., 2:].mT,
    "taps_written_out": lambda m, h: sum(
        (m.conv.weight[:, 0, 2 - k] * F.pad(h, (0, 0, k, -k)) if k else m.conv.weight[:, 0, 2] * h for k in range(3)), h
    ),
}
POSITIONED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "per_document": lambda h, p: torch.where((p == 0)[..., None], 0.0, F.pad(h, (0, 0, 1, -1))),
    "positions": lambda h, p: h * (F.pad(p, (1, -1), value=-1) + 1 == p)[..., None],
}


def of_transformers(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)
    return F.cross_entropy(logits.view(-1, VOCAB), labels[..., 1:].contiguous().view(-1).to(logits.device))


def of_older_transformers(logits: Tensor, labels: Tensor) -> Tensor:
    shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(shift_logits.view(-1, VOCAB), shift_labels.view(-1).to(shift_logits.device))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of_transformers": of_transformers,
    "of_older_transformers": of_older_transformers,
    "summed": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum") / 30,
    "by_class_dim": lambda x, y: F.cross_entropy(x[:, :-1].transpose(1, 2), y[:, 1:]),
    "another_ignored": lambda x, y: F.cross_entropy(
        x[:, :-1].reshape(-1, VOCAB), y.clamp(min=3)[:, 1:].reshape(-1), ignore_index=3
    ),
}
CASES = [*MIXES, *POSITIONED, *LOSSES]
TOGETHER = [CASES[first::4] for first in range(4)]
"""Cases in one graph, which is compiled once for all of them."""


def test_neighbours_are_read(pool: Pool) -> None:
    compare(pool, Neighbours, ["per_document", "short_conv"], 2, "head_tail", 1, 13)


def test_the_report_names_what_travels_to_the_rank_that_gets_most() -> None:
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), "contiguous")
    (found,) = cp.explain(Neighbours(["pad_negative"]), sharding)(**packed_batch(1, 14)).collectives
    assert (found.op, found.bytes) == ("neighbour_rows", WIDTH * 4)  # to rank 1, nothing to rank 0


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER)
def test_all_neighbours_are_read(pool: Pool, names: Sequence[str]) -> None:
    compare(pool, Neighbours, names, 2, "head_tail", 1, 13)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("ranks", "rows", "tokens"), [(2, 2, 15), (3, 1, 17), (3, 2, 14), (4, 1, 13)])
def test_neighbours_are_read_in_every_layout(pool: Pool, layout: str, ranks: int, rows: int, tokens: int) -> None:
    compare(pool, Neighbours, CASES, ranks, layout, rows, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "rows", "tokens"), [(2, "head_tail", 1, 13), (3, "balanced", 2, 14)])
def test_labels_shifted_by_the_model(pool: Pool, ranks: int, layout: str, rows: int, tokens: int) -> None:
    compare(pool, Neighbours, ["pad_negative", *LOSSES], ranks, layout, rows, tokens)
