"""Losses in a loop over chunks of tokens: one process's loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.planning.names import LAYOUTS
from tests.helpers.one_process import check_or_refuse, compare
from tests.helpers.packed_model import TOKENS, PackedModel, packed_batch
from tests.helpers.pool import Pool

Loss = Callable[["Chunked", Tensor, Tensor], Any]


class Chunked(PackedModel):
    """The packed model with another loss of hidden states."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extra(self) -> None:
        self.scale = nn.Parameter(torch.ones(()))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor, num_items: Tensor
    ) -> Tensor:
        h = self.embed(input_ids)
        mask = self.mask(h, doc_ids, position_ids, input_ids)
        return LOSSES[self.name](self, self.attended(h, mask), labels)


def entropy(x: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction=reduction)


def of_torchtune(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    total: Any = 0.0
    chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in m.head(h).chunk(4, dim=1)]
    for x, target in zip(chunks, [chunk.reshape(-1) for chunk in y.chunk(4, dim=1)], strict=True):
        total += F.cross_entropy(x.double().to(h.dtype), target, reduction="sum", ignore_index=-100)
    return total / (y != -100).sum()


def of_uneven_chunks(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    """Both cut by `tensor_split`, logits before the loss begins."""
    logits = [m.head(x) for x in h.tensor_split(4, dim=1)]
    targets = [t.reshape(-1) for t in y.tensor_split(4, dim=1)]
    total: Any = 0.0
    for x, target in zip([x.reshape(-1, x.size(-1)) for x in logits], targets, strict=True):
        total += F.cross_entropy(x.double().to(h.dtype), target, reduction="sum", ignore_index=-100)
    return total / (y != -100).sum()


def of_hidden_states(m: Chunked, h: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    losses = [entropy(m.head(x), t, reduction) for x, t in zip(h.split(3, dim=1), y.split(3, dim=1), strict=True)]
    return torch.stack(losses).sum() / 9


def of_checkpoints(m: Chunked, h: Tensor, y: Tensor) -> Any:
    """A loss that is computed once more in the backward, chunk by chunk; each turns the weight by itself."""

    def part(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy((x @ m.head.weight.T).flatten(0, 1), t.flatten(), reduction="sum"), (t >= 0).sum()

    parts = [checkpoint(part, x, t, use_reentrant=False) for x, t in zip(h.chunk(4, 1), y.chunk(4, 1), strict=True)]
    return sum(loss for loss, _ in parts) / sum(count for _, count in parts)  # type: ignore[misc]


def of_flat_rows(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    parts = zip(h.flatten(0, 1).chunk(3), y.flatten().chunk(3), strict=True)
    return torch.cat([F.cross_entropy(m.head(x), t, reduction="none") for x, t in parts]).sum() / 9


def of_fewer(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    parts = zip(h[:, :-1].chunk(3, 1), y[:, 1:].chunk(3, 1), strict=True)
    return sum((entropy(m.head(x), t) for x, t in parts), m.scale) / 9


def of_flat_checkpoints(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    """Rows of each chunk, of which the last is shorter."""

    def part(x: Tensor, t: Tensor) -> Tensor:
        return m.head(x).log_softmax(-1).gather(-1, t.clamp(min=0)[:, None])[:, 0]

    parts = zip(h.flatten(0, 1).split(6), y.flatten().split(6), strict=True)
    found: Any = [checkpoint(part, x, t, use_reentrant=False) for x, t in parts]
    return -(torch.cat(found) * (y.flatten() != -100)).sum() / 9


def of_terms(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    """Two terms of each chunk, each scaled at once, a sum that is written into, and a count beside the gradients."""
    count, total, scores, hits = (y != -100).sum(), h.new_zeros(()), h.new_zeros(()), h.new_zeros(())
    for x, t in zip(h.chunk(4, 1), y.chunk(4, 1), strict=True):
        logits = m.head(x)
        total = total + entropy(logits, t) / count + 1e-2 * (logits.logsumexp(-1) * (t != -100)).sum()
        scores.add_(logits.square().sum() * m.scale / 99)
        with torch.no_grad():
            hits = hits + (logits.argmax(-1) == t).sum()
    return (total + scores) * (1 + hits / 99)


def back_in_place(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    h = torch.cat([m.out(x).tanh() * x for x in h.chunk(2, 1)], 1)
    return entropy(m.head(h), y, "mean")


LOSSES: dict[str, Loss] = {
    "of_torchtune": of_torchtune,
    "of_uneven_chunks": of_uneven_chunks,
    "of_hidden_states": of_hidden_states,
    "of_checkpoints": of_checkpoints,
    "of_flat_rows": of_flat_rows,
    "of_flat_checkpoints": of_flat_checkpoints,
    "of_terms": of_terms,
    "back_in_place": back_in_place,
}


@pytest.mark.parametrize("name", ["of_checkpoints", "of_terms", "back_in_place"])
def test_chunked_losses_are_right(name: str) -> None:
    assert check_or_refuse(Chunked(name)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("ranks", "rows", "tokens"), [(2, 2, 15), (3, 1, 35)])
def test_all_chunked_losses_are_right(pool: Pool, name: str, ranks: int, rows: int, tokens: int) -> None:
    compare(pool, Chunked, name, ranks, sorted(LAYOUTS)[len(name) % len(LAYOUTS)], rows, tokens)


def weighted(m: Chunked, h: Tensor, y: Tensor) -> Any:
    parts = zip(h.chunk(2, 1), y.chunk(2, 1), strict=True)
    return sum((entropy(m.head(x), t) * (1 + i) for i, (x, t) in enumerate(parts)), h.new_zeros(()))


def of_positions(m: Chunked, h: Tensor, y: Tensor) -> Any:
    return sum(((x.mean(-1) * torch.arange(x.shape[1])).sum() for x in h.chunk(2, 1)), h.new_zeros(()))


def attended(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    found = [F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True) for x in h.chunk(2, 1)]
    return entropy(m.head(torch.cat(found, 2)[:, 0]), y)


def written_out(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    found = [(x[:, None] @ x[:, None].mT / 5).softmax(-1) @ x[:, None] for x in h.chunk(2, 1)]
    return entropy(m.head(torch.cat(found, 2)[:, 0]), y)


def checkpointed(m: Chunked, h: Tensor, y: Tensor, part: Callable[[Tensor, int], Tensor]) -> Any:
    chunks = h.chunk(3, 1)
    return sum((checkpoint(part, x, i, use_reentrant=False) for i, x in enumerate(chunks)), h.new_zeros(()))  # type: ignore[misc]


def one_twice(m: Chunked, h: Tensor, y: Tensor) -> Any:
    chunks = h.chunk(3, 1)
    return sum((m.head(x).sum() for x in (*chunks, chunks[0])), h.new_zeros(())) / 9


def beside_sums(m: Chunked, h: Tensor, y: Tensor, part: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Each chunk with a sum over all tokens."""
    whole = h.square().sum()
    return sum((part(x, whole) for x in h.chunk(2, 1)), h.new_zeros(())) / 9


def into_a_view(m: Chunked, h: Tensor, y: Tensor) -> Tensor:
    sums = h.new_zeros(3)
    total = sums[0]
    for x in h.chunk(2, 1):
        total += x.square().sum()
    return sums.sum() + total


def written_between(m: Chunked, h: Tensor, y: Tensor, write: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """The tensor that each chunk is added to is changed after each. write: (w, its memory)."""
    memory = h.new_zeros(2, h.shape[-1])
    w, total = memory[0], h.new_zeros(())
    for x in h.chunk(2, 1):
        total = total + m.head(x + w).sum()
        write(w, memory)
    return total


def scaled_and_read(m: Chunked, h: Tensor, y: Tensor) -> Any:
    count = (y != -100).sum()
    parts = [entropy(m.head(x), t) / count for x, t in zip(h.chunk(2, 1), y.chunk(2, 1), strict=True)]
    return sum(parts, h.new_zeros(())) + sum((part.square() for part in parts), h.new_zeros(()))


def by_count(m: Chunked, h: Tensor, y: Tensor, factor: Callable[[int], float]) -> Any:
    """A sum over chunks of 3 tokens, times what Python makes of how many there are."""
    losses = [entropy(m.head(x), t) for x, t in zip(h.split(3, 1), y.split(3, 1), strict=True)]
    return sum(losses, h.new_zeros(())) * factor(len(losses))


def by_count_before(m: Chunked, h: Tensor, y: Tensor) -> Any:
    """Weights of a loop by its number of chunks, and a term beside it."""
    chunks = h.split(3, 1)
    scaled = m.head.weight.mT / len(chunks) ** 2
    return sum(((x @ scaled).square().sum() for x in chunks), h.new_zeros(()))


def by_count_beside(m: Chunked, h: Tensor, y: Tensor) -> Any:
    chunks = h.split(3, 1)
    return sum((x.square().sum() for x in chunks), h.new_zeros(())) + m.scale * len(chunks) ** 2


COUNTED: dict[str, Loss] = {
    "of_count": lambda m, h, y: by_count(m, h, y, lambda n: 1 / n),
    "of_count_squared": lambda m, h, y: by_count(m, h, y, lambda n: 1 / n**2),
    "of_half_the_count": lambda m, h, y: by_count(m, h, y, lambda n: 1 / (2 * n)),
    "of_its_root": lambda m, h, y: by_count(m, h, y, math.sqrt),
    "of_its_logarithm": lambda m, h, y: by_count(m, h, y, lambda n: 0.1 * math.log(n)),
    "of_more_than_one": lambda m, h, y: by_count(m, h, y, lambda n: 0.1 if n > 4 else 0.2),
    "of_few": lambda m, h, y: by_count(m, h, y, lambda n: min(n, 6) / 100),
    "before_the_loop": by_count_before,
    "beside_the_loop": by_count_beside,
}
"""Losses that are other ones for other numbers of chunks, which a shard and its row have."""


BESIDE: dict[str, Loss] = COUNTED | {
    "on_one_line": lambda m, h, y: sum((x.sum() for x in h.split(3, 1)), h.new_zeros(())) * (h.shape[1] % 4),
    "mean_of_means": lambda m, h, y: of_hidden_states(m, h, y, "mean"),
    "mean_of_sums": lambda m, h, y: (sum(c := [x.sum() for x in h.split(3, 1)]) + h.new_zeros(())) / len(c),
    "of_fewer": of_fewer,
    "weighted": weighted,
    "of_positions": of_positions,
    "attended": attended,
    "written_out": written_out,
    "checkpointed_by_turns": lambda m, h, y: checkpointed(m, h, y, lambda x, i: m.head(x).sum() * (1 + i) / 9),
    "checkpointed_positions": lambda m, h, y: checkpointed(
        m, h, y, lambda x, i: (x.sum(-1) * torch.arange(x.shape[1])).sum()
    ),
    "checkpointed_counts": lambda m, h, y: checkpointed(m, h, y, lambda x, i: x.sum() * x.shape[1] / 9),
    "checkpointed_means": lambda m, h, y: checkpointed(m, h, y, lambda x, i: m.head(x).mean()),
    "checkpointed_places": lambda m, h, y: checkpointed(m, h, y, lambda x, i: x[:, 0].sum()),
    "one_left_out": lambda m, h, y: sum((m.head(x).sum() for x in h.chunk(3, 1)[1:]), h.new_zeros(())) / 9,
    "one_twice": one_twice,
    "turned": lambda m, h, y: entropy(m.head(torch.cat(h.chunk(2, 1)[::-1], 1)), y),
    "stacked": lambda m, h, y: torch.stack([x.square().sum() for x in h.chunk(2, 1)]).exp().sum() / 1e9,
    "with_a_weight": lambda m, h, y: sum((x.sum() + m.scale * 3 for x in h.chunk(2, 1)), h.new_zeros(())) / 9,
    "squared": lambda m, h, y: sum((x.sum().square() for x in h.chunk(2, 1)), h.new_zeros(())) / 9,
    "largest": lambda m, h, y: sum((x.amax() for x in h.chunk(2, 1)), h.new_zeros(())) / 9,
    "centered": lambda m, h, y: entropy(m.head(torch.cat([x - x.mean(1, True) for x in h.chunk(2, 1)], 1)), y),
    "rolled": lambda m, h, y: entropy(m.head(torch.cat([x.roll(1, 1) for x in h.chunk(2, 1)], 1)), y),
    "shifted": lambda m, h, y: entropy(m.head(torch.cat([F.pad(x, (0, 0, 1, -1)) for x in h.chunk(2, 1)], 1)), y),
    "counted": lambda m, h, y: sum((x.sum() * x.shape[1] for x in h.chunk(2, 1)), h.new_zeros(())) / 9,
    "summed_up": lambda m, h, y: entropy(m.head(torch.cat([x.cumsum(1) for x in h.chunk(2, 1)], 1)), y),
    "last": lambda m, h, y: sum((x[:, -1].sum() for x in h.chunk(2, 1)), h.new_zeros(())),
    "features": lambda m, h, y: entropy(m.head(torch.cat([x * x.softmax(-1) for x in h.chunk(2, -1)], -1)), y),
    "same_sums": lambda m, h, y: sum((x.new_ones(()) * m.scale for x in h.chunk(2, 1)), h.sum()) / 9,
    "sums_beside": lambda m, h, y: beside_sums(m, h, y, lambda x, whole: x.sum() + whole),
    "sums_beside_scaled": lambda m, h, y: beside_sums(m, h, y, lambda x, whole: (x.sum() + whole) / 2),
    "sums_beside_checkpointed": lambda m, h, y: beside_sums(
        m, h, y, lambda *given: checkpoint(lambda x, whole: x.sum() + whole, *given, use_reentrant=False)
    ),
    "into_a_view": into_a_view,
    "written_between": lambda m, h, y: written_between(m, h, y, lambda w, _: w[0].fill_(3)),
    "filled_between": lambda m, h, y: written_between(m, h, y, lambda _, memory: memory.fill_(1)),
    "copied_between": lambda m, h, y: written_between(m, h, y, lambda w, _: w.copy_(m.head.weight[0].detach())),
    "given_out_between": lambda m, h, y: written_between(m, h, y, lambda w, _: torch.add(w, 1, out=w)),
    "scaled_and_read": scaled_and_read,
    "divided_by": lambda m, h, y: sum((h.new_ones(()) / x.square().sum() for x in h.chunk(2, 1)), h.new_zeros(())),
    "rows_added": lambda m, h, y: (c := h.chunk(2, 1))[0].sum() + (c[0] + c[1]).square().sum() / 9,
}


@pytest.mark.parametrize("name", ["sums_beside", "into_a_view", "written_between"])
def test_what_is_not_the_same_of_all_chunks_at_once_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "beside", BESIDE[name])
    report = cp.explain(Chunked("beside"), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed_batch())
    assert {refusal.reason for refusal in report.refusals} == {cp.Reason.TOKEN_MIXING}


def test_a_chunk_that_is_treated_otherwise_is_told_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "beside", BESIDE["weighted"])
    said = check_or_refuse(Chunked("beside"))
    assert said is not None
    assert "a loop over chunks runs on all tokens where it treats each" in said
    assert "shift" not in said


@pytest.mark.parametrize("name", ["of_count", "before_the_loop", "returned"])
def test_what_python_makes_of_the_number_of_chunks_is_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Loss] = COUNTED | {
        "returned": lambda m, h, y: (COUNTED["of_its_root"](m, h, y), len(h.split(3, 1)))  # type: ignore[dict-item]
    }
    monkeypatch.setitem(LOSSES, "beside", given[name])
    assert check_or_refuse(Chunked("beside"), tokens=14) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_beside_chunked_losses_is_right_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "beside", BESIDE[name])
    check_or_refuse(Chunked("beside"), rows=2, tokens=20)
