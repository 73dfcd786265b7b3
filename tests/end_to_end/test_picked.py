"""Tokens that a model picks by place, and sums by document: one process's loss and gradients, on any rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.border.model import TOKENS, VOCAB, Model
from tests.helpers.one_process import step_of_losses
from tests.helpers.packed_model import TOKENS as PACKED
from tests.helpers.packed_model import VOCAB as WORDS
from tests.helpers.packed_model import PackedModel, packed_batch
from tests.helpers.pool import Pool

Batch = Mapping[str, Any]
Loss = Callable[[Any, Tensor, Batch], Tensor]
DOCUMENTS = 4


def token_losses(x: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), b["labels"].flatten(), reduction="none").view_as(b["labels"])


def logps(x: Tensor, b: Batch) -> Tensor:
    return x.log_softmax(-1).gather(-1, b["labels"].clamp(min=0)[..., None])[..., 0] * (b["labels"] != -100)


def row_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


def ids(b: Batch) -> Tensor:
    """(B, T) a number for each document of the batch."""
    return b["doc_ids"] + DOCUMENTS * row_of(b["doc_ids"])[:, None]


def by_document(x: Tensor, b: Batch) -> Tensor:
    """(B * N, …) sums over documents of (B, T, …)."""
    return x.new_zeros(b["ends"].numel(), *x.shape[2:]).index_add(0, ids(b).flatten(), x.flatten(0, 1))


def columns(b: Batch, x: Tensor) -> Tensor:
    """(B * T, …) the document of each entry."""
    return b["doc_ids"].flatten()[:, None].expand(-1, x.shape[-1])


def last_of_mask(x: Tensor, b: Batch) -> Tensor:
    """As transformers classifies sequences."""
    mask = (b["input_ids"] != 3).to(torch.int32)
    index = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    return x[row_of(x), (index * mask).argmax(-1)]


def apart(x: Tensor) -> Tensor:
    """No two entries are equal: torch promises no order of such."""
    return x + torch.arange(x.shape[1], device=x.device)[:, None] / 7


def largest(x: Tensor) -> Tensor:
    found, least = x.topk(2, 1), x.flatten(0, 1).topk(3, 0, largest=False)
    picked = x.flip(-1).gather(1, found.indices) * x.sin().topk(2, 1, largest=False).indices
    return found.values.sin().sum() + least.values.exp().sum() + picked.sum()


def in_order(x: Tensor, b: Batch) -> Tensor:
    """Tokens by their value, in the row, in all rows, and their places."""
    places = torch.arange(x.shape[1]).double()
    found, flat = x.sort(1, descending=True), x[..., 0].flatten().sort()
    ordered = (found.values * places[:, None]).sin().sum() + (flat.values.exp() * flat.indices).sum() / 99
    return ordered + (x[..., 1:] * x[..., :-1].argsort(1)).sum() / 99 + b["input_ids"].sort(1)[0].mul(places).sum() / 99


def medians(x: Tensor, b: Batch) -> Tensor:
    gaps = x.masked_fill(x > 1, torch.nan)
    one = x.median(1).values.sin() + x.kthvalue(3, 1).values.exp() + x.kthvalue(x.shape[1] // 2, 1, True).values[:, 0]
    other = (
        gaps.nanmedian(1).values.nan_to_num(0.5).cos().sum()
        + gaps.nanmedian().exp()
        + gaps.median(1).values.isnan().sum()
    )
    picked = x.flip(-1).gather(1, x.median(1, keepdim=True).indices).square().sum()
    return (
        one.sum()
        + other
        + picked
        + (x.round().detach() + (x - x.detach())).median().sin()
        + x[..., 0].flatten().median(0).values
        + b["labels"].median()
    )


def quantiles(x: Tensor, b: Batch) -> Tensor:
    losses = token_losses(x, b)
    kept = losses * (losses.detach() <= torch.quantile(losses.detach(), 0.7))
    levels = torch.quantile(x, x.new_tensor([0.1, 0.55]), dim=1) - x.quantile(0.3, 1, interpolation="lower")
    gaps = x.masked_fill(x > 1, torch.nan).nanquantile(0.4, dim=1, keepdim=True)
    return kept.sum() / 9 + levels.sin().sum() + gaps.nan_to_num(0.1).exp().sum() + losses.flatten().quantile(0.25)


def dpo(m: Any, x: Tensor, b: Batch) -> Tensor:
    sums = by_document(logps(x, b), b)
    chosen, rejected = sums[0::2], sums[1::2]
    return -F.logsigmoid(0.3 * (chosen - rejected - b["reference"])).mean()


def grpo(m: Any, x: Tensor, b: Batch) -> Tensor:
    new, mask = logps(x, b), (b["labels"] != -100).to(x.dtype)
    old = new.detach() - 0.1 * torch.sin(b["input_ids"].to(x.dtype))
    ratio, advantage = (new - old).exp(), b["advantages"][ids(b)]
    each = torch.min(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage) - 0.04 * (old - new).expm1()
    return -(by_document(each * mask, b) / by_document(mask, b).clamp(min=1)).mean()


def gspo(m: Any, x: Tensor, b: Batch) -> Tensor:
    """Ratios of whole sequences, put back on their tokens."""
    mask = (b["labels"] != -100).to(x.dtype)
    away = (logps(x, b) - logps(x, b).detach() * 1.1) * mask
    ratio = (by_document(away, b) / by_document(mask, b).clamp(min=1)).exp()[ids(b)]
    return (ratio * mask).sum() / 9


def means(m: Any, x: Tensor, b: Batch) -> Tensor:
    counts = torch.zeros(b["ends"].numel(), dtype=torch.long, device=x.device)
    counts = counts.scatter_add(0, ids(b).flatten(), torch.ones_like(b["doc_ids"]).flatten())
    return (by_document(x, b) / counts[:, None]).square().sum()


def added_in_place(m: Any, x: Tensor, b: Batch) -> Tensor:
    sums, counts = x.new_zeros(DOCUMENTS, VOCAB), x.new_zeros(DOCUMENTS)
    sums.index_add_(0, b["doc_ids"].flatten(), x.flatten(0, 1))
    counts.scatter_add_(0, b["doc_ids"].flatten(), x.new_ones(b["doc_ids"].shape).flatten())
    return (sums / counts[:, None]).sin().sum()


def repeated(m: Any, x: Tensor, b: Batch) -> Tensor:
    """A number and a row for each document, by the lengths of those of the first row; and its place in the document."""
    lengths = b["ends"][0].diff(prepend=b["ends"].new_full((1,), -1))
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=x.shape[1])
    rows = m.table[:DOCUMENTS, :VOCAB].repeat_interleave(lengths, 0)
    by_number = token_losses(x, b) * torch.repeat_interleave(b["advantages"][:DOCUMENTS], lengths)
    return (by_number.sum() + (x * rows).sin().sum() + ((index(x) - starts)[:, None] * x).cos().sum()) / 9


def of_task(b: Batch) -> Tensor:
    """(B, T) which tokens a loss is of."""
    return b["labels"] > 2


def head_of_picked(m: Any, x: Tensor, b: Batch) -> Tensor:
    """As masked language models and token classifiers do that run their head on such tokens alone."""
    mask = of_task(b).flatten()
    kept, targets = F.gelu(x.flatten(0, 1)[mask]), b["labels"].flatten()[mask] % 3
    scores = m.score(F.layer_norm(kept, (VOCAB,)) + kept).contiguous()
    hits = scores.argmax(-1) == targets
    return F.cross_entropy(scores.view(-1, 3), targets.view(-1)) + hits.double().mean() / 9


def values_of_picked(m: Any, x: Tensor, b: Batch) -> Tensor:
    kept = x[of_task(b)]
    errors = m.reward(kept).squeeze(-1) - b["labels"][of_task(b)] / 10
    logps = m.score(kept[:, :]).log_softmax(1)
    return (errors**2).mean() - (logps * logps.exp()).sum(-1).mean() + (kept[..., 1:].sin() * 2)[:, 0].sum() / 9


def index(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def angles(x: Tensor) -> Tensor:
    """(1, 1, T, C), as rotary embeddings make them."""
    inverse = torch.linspace(1, 0.1, x.shape[-1], dtype=x.dtype, device=x.device)[None, :, None].expand(1, -1, 1)
    return (inverse @ index(x)[None, None].to(x.dtype)).transpose(1, 2).cos()[:, None]


LOSSES: dict[str, Loss] = {
    "last": lambda m, x, b: x[:, -1].logsumexp(-1).sum(),
    "last_but_one": lambda m, x, b: x.select(1, x.shape[1] - 2).sin().sum(),
    "first": lambda m, x, b: F.cross_entropy(m.score(x[:, 0].tanh()), b["classes"]),
    "slice": lambda m, x, b: (x[:, :2] * x[:, -2:]).sum(),
    "middle": lambda m, x, b: (
        x[:, x.shape[1] // 2 - 1 : x.shape[1] // 2 + 2].exp().sum()
        + x.narrow(1, x.shape[1] // 3, 2).sin().sum()
        + x.select(1, x.shape[1] // 2).sum()
    ),
    "topk": lambda m, x, b: largest(apart(x)),
    "flat_of_the_first_row": lambda m, x, b: (
        x.flatten(0, 1)[x.shape[1] - 1 : x.shape[1]].exp().sum() + x.flatten(0, 1)[-2].sin().sum()
    ),
    "every_other_of_the_first": lambda m, x, b: x[:, 0:3:2].exp().sum() + x[:, -3:-1:2].sin().sum(),
    "last_of_documents": lambda m, x, b: x[row_of(x)[:, None], b["ends"]].square().sum(),
    "same_of_rows": lambda m, x, b: x[:, b["picks"]].sin().sum() + x.mT[:, :, b["picks"][:2]].cos().sum(),
    "index_select": lambda m, x, b: x.index_select(1, b["picks"]).square().sum(),
    "gathered": lambda m, x, b: x[..., 0].gather(1, b["ends"]).exp().sum(),
    "flat": lambda m, x, b: x.flatten(0, 1)[b["flat"]].square().sum() + x.flatten(0, 1)[-3].sum(),
    "entries": lambda m, x, b: x[row_of(x)[:, None], b["ends"], b["ends"] % 5].exp().sum(),
    "classified": lambda m, x, b: F.cross_entropy(last_of_mask(m.score(x), b), b["classes"]),
    "rewarded": lambda m, x, b: -F.logsigmoid(m.reward(x)[..., 0].gather(1, b["ends"]).diff(dim=1)).mean(),
    "largest_place": lambda m, x, b: (
        x[row_of(x), b["input_ids"].argmax(1)].sum() + x[row_of(x), x[..., 1].argmin(1)].sum()
    ),
    "largest_of_ids": lambda m, x, b: (
        x[row_of(x), b["input_ids"].max(1)[1]].sum() * b["input_ids"].max(1)[0].sum() / 30
    ),
    "head_of_picked": head_of_picked,
    "values_of_picked": values_of_picked,
    "nothing_of_others": lambda m, x, b: (
        m.reward(x.masked_fill(of_task(b)[..., None].logical_not(), torch.nan)[of_task(b)]).exp().mean()
    ),
    "count_of_mask": lambda m, x, b: x[row_of(x), (b["input_ids"] > 5).sum(1) - 1].square().sum(),
    "means": means,
    "one_hot": lambda m, x, b: (F.one_hot(b["doc_ids"], DOCUMENTS).to(x.dtype).mT @ x).square().sum() / 50,
    "by_row": lambda m, x, b: (
        torch.zeros_like(b["reference_rows"]).scatter_add(1, b["doc_ids"], logps(x, b)).exp().sum()
    ),
    "reduced": lambda m, x, b: (
        x.new_zeros(4).scatter_reduce(0, b["doc_ids"].flatten(), token_losses(x, b).flatten(), "sum").sin().sum()
    ),
    "means_of_documents": lambda m, x, b: (
        x.new_zeros(4, VOCAB).scatter_reduce(0, columns(b, x), x.flatten(0, 1), "mean").sin().sum()
        + m.score.bias.new_ones(5, VOCAB)
        .scatter_reduce(0, columns(b, x), x.flatten(0, 1), "mean", include_self=False)[3:]
        .exp()
        .sum()
    ),
    "largest_of_documents": lambda m, x, b: (
        x.new_zeros(5, VOCAB).scatter_reduce(0, columns(b, x), x.flatten(0, 1).relu(), "amax").sin().sum()
        + m.table[:5, :VOCAB]
        .scatter_reduce(0, columns(b, x), x.flatten(0, 1).round(), "amin", include_self=False)
        .sin()
        .sum()
        + m.table[5:10, :VOCAB].round().scatter_reduce(0, columns(b, x), x.flatten(0, 1).round(), "amax").sin().sum()
        + b["input_ids"].new_zeros(4).scatter_reduce(0, b["doc_ids"].flatten(), b["input_ids"].flatten(), "amax").sum()
        / 9
    ),
    "in_place": added_in_place,
    "dpo": dpo,
    "grpo": grpo,
    "gspo": gspo,
    "repeated": repeated,
    "kl_of_sequences": lambda m, x, b: (logps(x, b) - 0.2).sum(1).square().mean(),
    "picked_token": lambda m, x, b: (x * x[:, -1:].detach()).sum() / 40 + (x.sin() * x[:, :1].sigmoid()).sum() / 50,
    "listed": lambda m, x, b: (token_losses(x, b) * torch.isin(b["input_ids"], b["picks"])).sum() / 9,
    "bucketed": lambda m, x, b: (x[..., 0] * torch.bucketize(token_losses(x, b), x.new_tensor([1.0, 3.0]))).mean(),
    "positions": lambda m, x, b: (x * F.embedding(index(x), m.table).tanh()).square().sum() / 9,
    "angles": lambda m, x, b: (x[:, None] * angles(x)).sin().sum() / 9 + (x * m.table[: x.shape[1]]).sum() / 9,
    "tokens": lambda m, x, b: token_losses(x, b).sum() / 10,
}
ORDERED: dict[str, Loss] = {
    "in_order": lambda m, x, b: in_order(apart(x), b),
    "medians": lambda m, x, b: medians(apart(x), b),
    "quantiles": lambda m, x, b: quantiles(apart(x), b),
}
PARTS = frozenset({"in_order", "tokens", "positions", "angles", "listed", "gspo", "picked_token", "repeated"})


class Picked(Model):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            lambda m, x, b: {name: (LOSSES | ORDERED)[name](m, x, b) for name in names},
            extra=lambda m: m.more(),  # type: ignore
        )

    def more(self) -> None:
        self.table = torch.nn.Parameter(torch.randn(40, VOCAB))
        self.score = torch.nn.Linear(VOCAB, 3)
        self.reward = torch.nn.Linear(VOCAB, 1, bias=False)


def packed(rows: int, tokens: int) -> dict[str, Any]:
    """(B, T) rows of four documents each, in each row of other lengths."""
    generator = torch.Generator().manual_seed(rows + tokens)
    cuts = [[0, 2 + i, 5 + i, 8 + i, tokens] for i in range(rows)]
    lengths = torch.tensor(cuts).diff(dim=1)
    labels = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels[:, 3:5] = -100
    return {
        "input_ids": torch.randint(0, VOCAB, (rows, tokens), generator=generator),
        "doc_ids": torch.stack([torch.repeat_interleave(torch.arange(DOCUMENTS), n) for n in lengths]),
        "labels": labels,
        "ends": lengths.cumsum(1) - 1,
        "picks": torch.tensor([tokens - 1, 0, 4, 4]),
        "flat": torch.tensor([tokens * rows - 1, 3, -2]),
        "classes": torch.arange(rows) % 3,
        "reference": torch.rand(rows * DOCUMENTS // 2, generator=generator).double(),
        "reference_rows": torch.zeros(rows, DOCUMENTS).double(),
        "advantages": torch.randn(rows * DOCUMENTS, generator=generator).double(),
    }


def sharded_step(
    mesh: DeviceMesh, names: Sequence[str], batch: Batch, layout: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), layout, "all_gather", inner="aot_eager")
    torch._dynamo.reset()
    model = Picked(names).double()
    with sharding.shard(batch) as local:
        found = step_of_losses(torch.compile(model, backend=cp.backend(sharding), fullgraph=True), local)
    cp.sum_gradients(model.parameters(), sharding)
    return found, {key: p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}


def compare(pool: Pool, names: Sequence[str], ranks: int, layout: str, rows: int, tokens: int) -> None:
    batch = packed(rows, tokens)
    model = Picked(names).double()
    expected = step_of_losses(model, batch)
    results = pool.run(ranks, sharded_step, names, batch, layout)
    for name, loss in expected.items():
        found = [losses[name] for losses, _ in results]
        found = [sum(found)] if name in PARTS else found
        assert found == pytest.approx([loss] * len(found), rel=1e-8), f"the loss of {name!r}"
    for _, grads in results:
        for key, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(torch.from_numpy(grads[key]), p.grad, rtol=1e-7, atol=1e-9, msg=key)


def test_picked_tokens_are_whole(pool: Pool) -> None:
    compare(
        pool, ["classified", "last_of_documents", "dpo", "topk", "head_of_picked", "repeated"], 2, "balanced", 1, 13
    )


def test_lengths_of_more_tokens_than_there_are_raise(pool: Pool) -> None:
    batch = packed(1, 13)
    batch["ends"][0, -1] += 2
    with pytest.raises(AssertionError, match=r"index out of range|out of bounds"):
        pool.run(2, sharded_step, ["repeated"], batch, "balanced")


def test_the_report_names_what_is_picked_and_its_bytes() -> None:
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
    (found,) = cp.explain(Picked(["last"]).double(), sharding)(**packed(1, 13)).collectives
    assert (found.op, found.bytes) == ("sum_over_ranks", 8 * VOCAB)
    assert "x[:, -1]" in found.where
    assert found.why == "select of tokens, from the ranks that have them"
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), resolve=False)
    refused = cp.explain(Picked(["last"]).double(), sharding)(**packed(1, 13)).refusals
    assert {refusal.reason for refusal in refused} == {cp.Reason.TOKEN_MIXING}


PACKING = cp.DocumentIds("doc_ids")


def then_written(x: Tensor, b: Batch, what: str, late: bool = False) -> Tensor:
    """A loss of picked tokens, of which something is written behind the pick."""
    values = {"scores": x * 1, "targets": b["input_ids"].clone(), "mask": b["input_ids"] > 5}
    scores, targets = (values[name][values["mask"]] for name in ("scores", "targets"))
    values[what].logical_not_() if what == "mask" else values[what].mul_(0)
    return F.cross_entropy(scores.tanh() if late else scores, targets) + (x[..., 0] * values[what].sum()).sum() / 99


@pytest.mark.parametrize("what", ["scores", "targets", "mask"])
def test_what_is_written_behind_a_pick_is_not_read_for_it(what: str) -> None:
    model, sharding = Model(lambda m, x, b: then_written(x, b, what)).double(), cp.Sharding(2, TOKENS, PACKING)
    torch._dynamo.reset()
    if what == "mask":
        assert not cp.explain(model, sharding)(**packed(1, 13)).ok
    else:
        assert cp.check(model, sharding, packed(1, 13)).largest <= 1e-9


def of_two_masks(m: Any, x: Tensor, b: Batch) -> Tensor:
    return (x[b["labels"] > 2] * x[b["labels"].clamp(max=3) > 2]).sum()


ACROSS: dict[str, Loss] = {
    "two_masks": of_two_masks,
    "running": lambda m, x, b: m.score(x[of_task(b)]).cumsum(0).mean(),
    "softmax": lambda m, x, b: m.score(x[of_task(b)]).softmax(0).square().mean(),
    "first": lambda m, x, b: m.reward(x[of_task(b)])[:1].sum(),
    "pairs": lambda m, x, b: (m.reward(x[of_task(b)]) - x[of_task(b)][:, 0]).square().mean(),
    "written": lambda m, x, b: m.score(x[of_task(b)]).mul_(2).mean(),
    "older_words": lambda m, x, b: F.cross_entropy(x[of_task(b)], b["labels"][of_task(b)], size_average=False),
    "mask": lambda m, x, b: then_written(x, b, "mask", late=True),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_mixes_picked_tokens_is_refused(name: str) -> None:
    model = Picked([])
    model.parts = (lambda m, x, b: {"loss": ACROSS[name](m, x, b)}, *model.parts[1:])
    report = cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed(2, 13))
    assert {refusal.reason for refusal in report.refusals} == {cp.Reason.TOKEN_MIXING}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of_tokens", "by_mask", "of_each_by_mask"])
def test_places_that_differ_from_rank_to_rank_are_refused(name: str) -> None:
    picks = {
        "of_tokens": lambda m, x, b: x[:, b["input_ids"][0] % 7].sum(),
        "by_mask": lambda m, x, b: (x * b["labels"].bool()[..., None])[row_of(x), (x[..., 0] > 0).long()[0]].sum(),
        "of_each_by_mask": lambda m, x, b: x[x[..., 0] > 0].sum(-1).cumsum(0).amax(),
    }
    model = Model(lambda m, x, b: picks[name](m, x, b))
    report = cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed(1, 13))
    assert {refusal.reason for refusal in report.refusals} == {cp.Reason.TOKEN_MIXING}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "rows", "tokens"),
    [
        (2, "balanced", 2, 13),
        (3, "contiguous", 2, 14),
        (4, "dual_chunk", 1, 15),
        (4, "head_tail", 2, 13),
        (3, "balanced", 3, 14),
    ],
)
def test_picked_tokens_are_whole_on_more_ranks(pool: Pool, ranks: int, layout: str, rows: int, tokens: int) -> None:
    compare(pool, [*LOSSES], ranks, layout, rows, tokens)


class PicksFinite(PackedModel):
    """Its loss is of picked tokens, where all others may be nan."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        return self.how(logits, labels.clamp(min=0), labels > 4)


def nan_elsewhere(x: Tensor, m: Tensor) -> Tensor:
    return x.masked_fill(~m[..., None], torch.nan)


HOWS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "nan": (lambda x, y, m: F.cross_entropy(nan_elsewhere(x, m)[m], y[m]), True),
    "scaled": (lambda x, y, m: F.cross_entropy(nan_elsewhere(x, m)[m] / 3, y[m]), True),
    "norm without eps": (lambda x, y, m: F.cross_entropy(F.layer_norm(x[m], (WORDS,), eps=0.0), y[m]), False),
    "rms norm without eps": (lambda x, y, m: F.cross_entropy(F.rms_norm(x[m], (WORDS,), eps=0.0), y[m]), False),
    "exp": (lambda x, y, m: (x[m] / 9 + 1).exp().sum(), True),
    "exp of what overflows at 0": (lambda x, y, m: (800 - (x[m] * 0 + 800)).exp().sum() * x.sum(), True),
}


@pytest.mark.shared
@pytest.mark.parametrize("how", HOWS)
def test_tokens_that_are_not_picked_reach_no_gradient(how: str) -> None:
    function, right = HOWS[how]
    model = PicksFinite(function).double()
    sharding = cp.Sharding(2, PACKED, cp.DocumentIds("doc_ids"), "head_tail")
    torch._dynamo.reset()
    with contextlib.nullcontext() if right else pytest.raises(cp.RewriteRefused):
        report = cp.check(model, sharding, packed_batch(1, 13))
        assert report.largest <= 1e-9
        assert not any(error != error for error in report.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "rows", "tokens"),
    [(3, "contiguous", 2, 14), (4, "dual_chunk", 1, 15)],
)
def test_tokens_in_order_on_ranks(pool: Pool, ranks: int, layout: str, rows: int, tokens: int) -> None:
    compare(pool, [*ORDERED], ranks, layout, rows, tokens)


def test_tokens_in_order_of_several_lengths() -> None:
    sharding, model = cp.Sharding(3, TOKENS, PACKING), Picked(["in_order", "medians"]).double()
    torch._dynamo.reset()
    for tokens in (13, 20):
        assert cp.check(model, sharding, packed(2, tokens)).largest <= 1e-9


def test_tokens_of_no_document_are_in_no_order() -> None:
    batch = packed(1, 13)
    batch["doc_ids"][:, -2:] = -1
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids", padding=-1))
    for name in ("in_order", "medians"):
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="no document"):
            cp.check(Picked([name]).double(), sharding, batch)
