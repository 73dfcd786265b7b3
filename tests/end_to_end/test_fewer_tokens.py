"""Tensors of fewer tokens than the row, or more: one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_rewrite.planning.names import LAYOUTS
from tests.helpers.one_process import check_or_refuse, compare
from tests.helpers.packed_model import VOCAB, WIDTH, PackedModel
from tests.helpers.pool import Pool

Mix = Callable[["Fewer", Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Fewer(PackedModel):
    """The packed model with functions of hidden states, and losses, beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.valid = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor, num_items: Tensor
    ) -> Tensor:
        h = self.embed(input_ids)
        mask = self.mask(h, doc_ids, position_ids, input_ids)
        h = self.attended(h, mask)
        h = sum((MIXES[name](self, h) * (1 + i / 9) for i, name in enumerate(self.names) if name in MIXES), h)
        logits = self.head(h)
        losses = [LOSSES[name](logits, labels, doc_ids) for name in self.names if name in LOSSES]
        return sum(losses, self.loss(logits, labels, num_items))


def log_probs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and which tokens have one, as trainers of preferences write it."""
    labels, logits = y[:, 1:].clone(), x[:, :-1, :]
    kept = labels != -100
    labels = torch.where(kept, labels, 0)
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2), kept


def dpo(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    found, kept = log_probs(x, y)
    return -F.logsigmoid((found * kept).sum(-1) / kept.sum(-1)).mean()


def dpo_of_documents(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    losses = F.cross_entropy(x[:, :-1].transpose(1, 2), y[:, 1:], reduction="none")
    return x.new_zeros(x.shape[0], 3).scatter_add(1, d[:, 1:], -losses / 9).sigmoid().log().sum()


def entropy(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    z = x[:, :-1]
    return (z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)).mean()


def inside_documents(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    losses = F.cross_entropy(x[:, :-1].reshape(-1, VOCAB), y[:, 1:].reshape(-1), reduction="none")
    return (losses.view(y.shape[0], -1) * (d[:, 1:] == d[:, :-1])).sum() / (y.shape[1] - 1)


def clipped_ratio(x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    found = x[:, :-1].log_softmax(-1).gather(-1, y.clamp(min=0)[:, 1:, None]).squeeze(-1)
    ratio = (found - found.detach()).exp()
    whitened = (found - found.mean()) / found.std()
    return (torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * whitened * (y[:, 1:] != -100)).sum() / 9


MIXES: dict[str, Mix] = {
    "silu_before_slice": lambda m, h: F.silu(m.conv(h.transpose(1, 2)))[..., : h.shape[1]].transpose(1, 2),
    "norm_before_slice": lambda m, h: m.norm(m.conv(h.mT).mT)[:, :-2],
    "linear_before_slice": lambda m, h: m.lin(m.conv(h.mT).mT)[:, : h.shape[1]],
    "padded_before_slice": lambda m, h: F.pad(h, (0, 0, 3, 0)).sin()[:, :-3],
    "differences": lambda m, h: F.pad((h[:, 1:] - h[:, :-1]).tanh(), (0, 0, 1, 0)),
    "valid_conv": lambda m, h: F.pad(F.silu(m.valid(h.mT)), (2, 0)).mT,
    "linear_before_pad": lambda m, h: torch.cat([h.new_zeros(h.shape[0], 1, WIDTH), m.lin(h[:, :-1])], 1),
    "twice": lambda m, h: F.pad(h[:, :-1].sin()[:, :-1].cos(), (0, 0, 0, 2)),
    "checkpoint": lambda m, h: checkpoint(lambda x: F.silu(m.conv(x.mT))[..., : x.shape[1]].mT, h, use_reentrant=False),
    "diff": lambda m, h: F.pad(h.diff(dim=1), (0, 0, 1, 0)) * torch.diff(h, prepend=h[:, :1], dim=1),
    "diff_of_diff": lambda m, h: F.pad(h.diff(2, 1), (0, 0, 1, 1)) + h * (h > 0).diff(dim=1, append=h[:, :1] > 1),
    "windows": lambda m, h: (F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1) * m.conv.weight[:, 0]).sum(-1),
    "windows_of_fewer": lambda m, h: F.pad(h.unfold(1, 4, 1).amax(-1), (0, 0, 3, 0)),
    "sizes": lambda m, h: F.pad((a := h[:, 1:].sin()).reshape(a.shape[0], a.shape[1], 2, -1).flatten(2), (0, 0, 1, 0)),
}
LOSSES: dict[str, Loss] = {
    "none": lambda x, y, d: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none").sum() / 9,
    "mean": lambda x, y, d: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "two": lambda x, y, d: F.cross_entropy(x[:, :-2].flatten(0, 1), y[:, 2:].flatten()),
    "back": lambda x, y, d: F.cross_entropy(x[:, 1:].flatten(0, 1), y[:, :-1].flatten()),
    "unshifted": lambda x, y, d: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, :-1].flatten()),
    "read_twice": lambda x, y, d: F.cross_entropy((a := x[:, :-1]).mT, y[:, 1:]) + a.square().sum() / 99,
    "another_fill": lambda x, y, d: F.cross_entropy(x.flatten(0, 1), F.pad(y, (0, 1))[:, 1:].flatten()),
    "count": lambda x, y, d: x[:, :-1].square().sum() / x[:, :-1].shape[1] / 9,
    "largest": lambda x, y, d: x[:, :-1].amax() + x[:, 1:].logsumexp(1).sum() / 9 + x[:, :-2].std(),
    "dpo": dpo,
    "dpo_of_documents": dpo_of_documents,
    "entropy": entropy,
    "inside_documents": inside_documents,
    "clipped_ratio": clipped_ratio,
}
CASES = [*MIXES, *LOSSES]


def test_fewer_tokens_are_right() -> None:
    assert check_or_refuse(Fewer([*CASES[1::3], "checkpoint", "diff", "mean"])) is None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3))
def test_all_fewer_tokens_are_right(pool: Pool, first: int) -> None:
    compare(pool, Fewer, CASES[first::3], 2, "balanced", 2, 13)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("ranks", "rows", "tokens"), [(2, 2, 15), (3, 1, 17)])
def test_fewer_tokens_in_every_layout(pool: Pool, layout: str, ranks: int, rows: int, tokens: int) -> None:
    first = (sorted(LAYOUTS).index(layout) + ranks) % 3
    compare(pool, Fewer, CASES[first::3], ranks, layout, rows, tokens)


def written(m: Fewer, h: Tensor) -> Tensor:
    a = h[:, :-1].sin()
    a[:, 2] = 0
    return F.pad(a, (0, 0, 0, 1))


BESIDE: dict[str, Mix] = {
    "late_after_silu": lambda m, h: F.silu(m.conv(h.mT))[..., 1 : h.shape[1] + 1].mT,
    "last_after_silu": lambda m, h: F.silu(m.conv(h.mT))[..., 2:].mT,
    "sum_of_more": lambda m, h: h * F.silu(m.conv(h.mT)).sum(),
    "mean_of_more": lambda m, h: h * F.pad(h, (0, 0, 2, 0)).sin().mean(1, keepdim=True),
    "last_of_fewer": lambda m, h: h * h[:, :-1].sin()[:, -1:],
    "mean_of_fewer": lambda m, h: h * h[:, :-2].sin().mean(1, keepdim=True),
    "turned": lambda m, h: F.pad(h[:, :-1].flip(1), (0, 0, 1, 0)),
    "summed_up": lambda m, h: F.pad(h[:, :-1].sin().cumsum(1), (0, 0, 1, 0)),
    "rolled": lambda m, h: F.pad(h[:, :-1].sin().roll(1, 1), (0, 0, 1, 0)),
    "sizes_at_once": lambda m, h: F.pad((a := h[:, 1:]).sin() * a.new_ones(a.shape), (0, 0, 1, 0)),
    "new_ones": lambda m, h: F.pad(h[:, 1:].sin() * h.new_ones(h.shape[0], h.shape[1] - 1, 1), (0, 0, 1, 0)),
    "number": lambda m, h: F.pad(h[:, 1:].sin() * (h.shape[1] - 1), (0, 0, 1, 0)),
    "half": lambda m, h: F.pad(h[:, : h.shape[1] // 2].sin(), (0, 0, 0, h.shape[1] - h.shape[1] // 2)),
    "lengths_meet": lambda m, h: F.pad(h[:, 1:].sin() * h[:, :-1], (0, 0, 1, 0)),
    "both_ends": lambda m, h: F.pad(h[:, 1:-1].sin(), (0, 0, 1, 1)),
    "every_other": lambda m, h: h * h[:, ::2].mean(1, keepdim=True),
    "wide_windows": lambda m, h: h * h.unfold(1, 3, 2).mean((1, 3))[:, None],
    "windows_written": lambda m, h: h + F.pad(h.sin().unfold(1, 3, 1).mul_(2).sum(-1), (0, 0, 2, 0)),
    "written": written,
    "outer": lambda m, h: h * (a := h[:, 1:].sin()).mT.matmul(a).mean(),
    "softmax": lambda m, h: F.pad(h[:, 1:].softmax(1), (0, 0, 1, 0)),
    "detached": lambda m, h: F.pad(h[:, :-1].detach().sin() * h[:, 1:], (0, 0, 1, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_beside_fewer_tokens_is_right_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXES, "beside", BESIDE[name])
    check_or_refuse(Fewer(["beside"]))


class Returned(PackedModel):
    """Returns some of the logits beside its loss."""

    def __init__(self, some: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.some = some

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> dict[str, Tensor]:
        return {"loss": super().loss(logits, labels, num_items), "some": self.some(logits)}


@pytest.mark.parametrize(
    ("some", "said"), [(lambda x: x[:, 2:], "2 tokens fewer"), (lambda x: F.pad(x, (0, 0, 2, 0)), "2 tokens more")]
)
def test_an_output_has_one_entry_for_each_token(some: Callable[[Tensor], Tensor], said: str) -> None:
    assert f"an output has {said} than the row" in (check_or_refuse(Returned(some)) or "")
