"""Sums over tokens that a model uses as the whole: summed over ranks, they give one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.one_process import check_or_refuse, step_of_losses
from tests.helpers.packed_model import TOKENS, VOCAB, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool
from tests.helpers.versions import OLD

Loss = Callable[["Resolved", Tensor, Tensor], Any]
Mix = Callable[["Resolved", Tensor], Tensor]


class Resolved(PackedModel):
    """The packed model with other losses and functions of hidden states, beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.scale = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.weights = torch.nn.Parameter(torch.rand(VOCAB) + 0.5, requires_grad=False)
        self.pool = torch.nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.router = torch.nn.Linear(WIDTH, 4)
        self.norms = torch.nn.ModuleList(
            [torch.nn.BatchNorm1d(WIDTH), torch.nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)]
        )
        self.load: Tensor
        self.register_buffer("load", torch.zeros(4))

    def mix(self, h: Tensor) -> Tensor:
        return sum((MIXES[name](self, h) for name in self.names if name in MIXES), h)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> dict[str, Tensor]:
        found = {"": super().loss(logits, labels, num_items)}
        return found | {name: LOSSES[name](self, logits, labels) for name in self.names if name in LOSSES}


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels), reduction="none").view_as(labels)


def added_in_place(m: Resolved, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(*flat(x, y), reduction="sum") / 7
    loss += 0.1 * x.square().mean()
    return loss + x.amax() * 0.1


def has_gradient(function: Callable[[Tensor], Sequence[Tensor]]) -> bool:
    """True if this torch has the backward of a function."""
    try:
        torch.stack([*function(torch.ones(2, requires_grad=True))]).sum().backward()
    except (RuntimeError, NotImplementedError):
        return False
    return True


AMINMAX_HAS_A_GRADIENT = has_gradient(torch.aminmax)


def least_and_largest(x: Tensor) -> Tensor:
    low, high = x.relu().aminmax()
    return sum((a.sum() for a in x.aminmax(dim=1)), high - low)


def whitened(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-4)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x[..., 0], (y > 5).double(), reduction="sum"),
    "weighted_bce": lambda x, y: F.binary_cross_entropy(
        x.sigmoid()[..., 1], (y > 5).double(), x[..., 2].detach().exp(), reduction="sum"
    ),
    "soft_margin": lambda x, y: F.soft_margin_loss(x[..., 0], (y > 5) * 2.0 - 1, reduction="sum"),
    "soft_margins": lambda x, y: F.multilabel_soft_margin_loss(x[..., 0], (y > 5).double(), reduction="sum"),
    "poisson": lambda x, y: F.poisson_nll_loss(x[..., 0], y.double(), reduction="sum"),
    "hinge": lambda x, y: F.hinge_embedding_loss(x[..., 0], (y > 5) * 2 - 1, reduction="sum"),
    "ranking": lambda x, y: F.margin_ranking_loss(x[..., 0], x[..., 1], (y > 5) * 2 - 1, 0.5, reduction="sum"),
    "cosine": lambda x, y: F.cosine_embedding_loss(
        x.flatten(0, 1) + 1, x.flip(-1).flatten(0, 1), y.flatten() % 2 * 2 - 1, 0.1, reduction="sum"
    ),
    "huber": lambda x, y: F.huber_loss(x[..., 0], x[..., 1], reduction="sum"),
    "mse": lambda x, y: F.mse_loss(x[..., 1], x[..., 3] + 1, reduction="sum"),
    "l1": lambda x, y: F.l1_loss(x[..., 1], x[..., 2].exp(), reduction="sum"),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), x.flip(-1).log_softmax(-1), reduction="sum", log_target=True),
    "smoothed": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), x.flip(-1).softmax(-1).flatten(0, 1), reduction="sum", label_smoothing=0.1
    ),
    "of_fewer": lambda x, y: F.binary_cross_entropy_with_logits(x[:, 1:, 0], (y > 5).double()[:, 1:], reduction="sum"),
}
"""Over all tokens: rows that fill a rank up must be left out, whatever they hold."""
if OLD:
    del SUMS["weighted_bce"], SUMS["smoothed"]  # torch fixes the number of tokens

LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda m, x, y: F.cross_entropy(*flat(x, y)),
    "cross_entropy_weighted": lambda m, x, y: F.cross_entropy(*flat(x, y.clamp(min=0)), m.weights, ignore_index=0),
    "cross_entropy_smoothed": lambda m, x, y: F.cross_entropy(*flat(x, y), label_smoothing=0.1),
    "cross_entropy_per_class_dim": lambda m, x, y: F.cross_entropy(x.mT, y),
    "count_divides": lambda m, x, y: (losses(x, y) * (y != -100)).sum() / (y != -100).sum(),
    "count_clamped": lambda m, x, y: losses(x, y).sum() / (y != -100).sum().clamp(min=1).float(),
    "mean_of_all": lambda m, x, y: x.square().mean(),
    "mean_per_row": lambda m, x, y: x.sin().mean((1, 2)).exp().sum(),
    "mse_mean": lambda m, x, y: F.mse_loss(x[..., 0], x[..., 1]),
    "smooth_l1_mean": lambda m, x, y: F.smooth_l1_loss(x[..., 0], x[..., 1].detach()),
    "bce_mean": lambda m, x, y: F.binary_cross_entropy_with_logits(x[..., 0], (y > 5).double()),
    "kl_mean": lambda m, x, y: F.kl_div(x.log_softmax(-1), x.flip(-1).softmax(-1), reduction="sum") + x.mean(),
    "stacked_losses": lambda m, x, y: torch.stack([losses(x, y).sum() / 9, x.square().mean(), x.sum() / 50]).mean(),
    "sums_of_losses": lambda m, x, y: sum(SUMS[name](x, y) for name in SUMS) / 99,
    "exp_of_mean": lambda m, x, y: F.cross_entropy(*flat(x, y)).exp().sqrt() * m.scale.sum(),
    "weight_norm": lambda m, x, y: F.cross_entropy(*flat(x, y)) + 0.1 * m.scale.square().sum(),
    "sum_of_losses": lambda m, x, y: losses(x, y).sum() / 10,
    "picked": lambda m, x, y: (
        F.cross_entropy(x[y > 5], y[y > 5], label_smoothing=0.1)
        + x[x > 0.3].mean()
        + x[y > 5].mean(axis=0).exp().sum()
        + (x.masked_select(x < 0).sum() / 9 + x.flatten(0, 1)[y.flatten() > 5].sum((0, 1)) / 9).tanh()
    ),
    "weights_alone": lambda m, x, y: m.scale.square().sum(),
    "sum_and_weight_norm": lambda m, x, y: losses(x, y).sum() / 10 + 0.1 * m.scale.square().sum(),
    "in_place": added_in_place,
    "variance": lambda m, x, y: x.var() + x.std((0, 1)).sum() + torch.var_mean(x, unbiased=False)[0],
    "norm": lambda m, x, y: x.norm() + x.norm(dim=1).sum(),
    "norms_of_other_powers": lambda m, x, y: x.norm(torch.inf) + x.norm(1) / 9 + x.norm(3, dim=1).sum(),
    "amax": lambda m, x, y: x.amax((0, 1)).sum() + x.min() + x.relu().flatten(0, 1).amin(0).sum(),
    "max_of_each": lambda m, x, y: losses(x, y).sum() / 9 * x.detach().flatten(0, 1).max(0).values.exp().sum(),
    "logsumexp": lambda m, x, y: x.logsumexp((1, 2)).sum() + x.logsumexp(1).mean(),
    "product": lambda m, x, y: (1 + x / 9).prod(1).sum() + x.tanh()[..., 0].prod() + (y > -1).prod(1).sum(),
    "products_of_zeros": lambda m, x, y: (
        ((x > 0.5).any(-1) * (x[..., 0] + 1)).prod() + (x + 1).relu().flatten(0, 1).prod(0).sum()
    ),
    "aminmax": lambda m, x, y: least_and_largest(x if AMINMAX_HAS_A_GRADIENT else x.detach()),
    "whitened": lambda m, x, y: (whitened(losses(x, y)) * losses(x, y).detach()).mean(),
    "mean_on_tokens": lambda m, x, y: (losses(x, y) - F.cross_entropy(*flat(x, y))).square().sum() / 10,
    "batch_of_means": lambda m, x, y: ((x - x.mean((0, 1))).square().mean((0, 1)) + 1).log().sum(),
    "pooled_head": lambda m, x, y: F.cross_entropy(m.router(x.mean(1) @ m.pool), x.new_ones(len(x), dtype=torch.long)),
}
if OLD:
    del LOSSES["picked"]  # torch asks whether both picks are of one size


def balanced(m: Resolved, h: Tensor) -> Tensor:
    """A share of its expert's load and of its mean probability for each token."""
    p = m.router(h).softmax(-1)
    load = F.one_hot(p.argmax(-1), 4).float().mean((0, 1))
    m.load.add_(load)
    return h * (1 + (p * load * p.mean((0, 1))).sum(-1, keepdim=True))


MIXES: dict[str, Mix] = {
    "centered": lambda m, h: h - h.mean(1, keepdim=True),
    "batch_norm": lambda m, h: h + m.norms[0](h.mT).mT * h.sin() + m.norms[1](h.flatten(0, 1)).view_as(h) / 3,
    "batch_norm_by_hand": lambda m, h: (
        (h - h.mean((0, 1))) * torch.rsqrt(h.var((0, 1), unbiased=False) + 1e-5) * m.scale
    ),
    "global_scale": lambda m, h: h / h.detach().abs().amax(),
    "squashed_by_norm": lambda m, h: h * (3 / (h.square().sum().sqrt() + 1e-6)).clamp(max=1.0),
    "context_vector": lambda m, h: h + m.out(h.mean(1, keepdim=True)).tanh(),
    "load_balanced": balanced,
    "any_and_all": lambda m, h: (
        h * (1 + (h > 2.5).any(1)[:, None]) + h.sin() * ((h > -9).all().double() + (h > 0).all((0, 1)))
    ),
    "softmax_over_tokens": lambda m, h: (
        h + 3 * h * h.softmax(1) - (h[..., :4].flatten(0, 1) * 2).softmax(0).view(*h.shape[:2], 4).sum(-1, keepdim=True)
    ),
    "log_softmax_over_tokens": lambda m, h: h + (h * 3).log_softmax(1) / 9 * m.scale,
    "softmax_of_fewer": lambda m, h: h + (h[:, :-2].softmax(1) * h[:, :-2]).sum(1, keepdim=True),
    "attention_pool": lambda m, h: h + (m.router(h).softmax(1).mT @ h).mean(1, keepdim=True),
    "own_expert": lambda m, h: h * (1 + F.one_hot((h[..., 0] > 0).long(), 2).sum((0, 1)))[(h[..., 0] > 0).long(), None],
}
CASES = (*LOSSES, *MIXES)
TOGETHER = [CASES[first::4] for first in range(4)]
"""Cases in one graph, which is compiled once for all of them."""
PARTS = frozenset(
    {"", "sum_of_losses", "max_of_each", "count_clamped", "sum_and_weight_norm", "mean_on_tokens", "sums_of_losses"}
)
"""Cases whose result comes back as this rank's part."""


def sharded_step(
    mesh: DeviceMesh, names: Sequence[str], batch: dict[str, Tensor], layout: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), layout, "all_gather", inner="aot_eager")
    torch._dynamo.reset()
    model = Resolved(names).double()
    with sharding.shard(batch) as local:
        found = step_of_losses(torch.compile(model, backend=cp.backend(sharding), fullgraph=True), local)
    cp.sum_gradients(model.parameters(), sharding)
    grads = {key: p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}
    return found, grads | {key: x.numpy() for key, x in model.named_buffers()}


def compare(pool: Pool, names: Sequence[str], ranks: int, layout: str, rows: int, tokens: int) -> None:
    batch = packed_batch(rows, tokens)
    model = Resolved(names).double()
    expected = step_of_losses(model, batch)
    tensors = {key: p.grad for key, p in model.named_parameters() if p.grad is not None} | dict(model.named_buffers())
    results = pool.run(ranks, sharded_step, names, batch, layout)
    found = {name: [losses[name] for losses, _ in results] for name in expected}
    found = {name: [sum(parts)] if name in PARTS else parts for name, parts in found.items()}
    for name, loss in expected.items():
        assert found[name] == pytest.approx([loss] * len(found[name]), rel=1e-8), f"the loss of {name!r}"
    for _, grads in results:
        for key, tensor in tensors.items():
            torch.testing.assert_close(torch.from_numpy(grads[key]), tensor, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    "names",
    [
        ["count_divides", "sum_of_losses", "amax", "load_balanced", "softmax_over_tokens", "batch_norm", "picked"],
        *(pytest.param(names, marks=pytest.mark.slow) for names in TOGETHER),
    ],
)
def test_sums_are_made_whole(pool: Pool, names: Sequence[str]) -> None:
    compare(pool, names, 2, "head_tail", 1, 13)


class Together(Resolved):
    """One loss, of those that are whole on every rank."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        found = super().loss(logits, labels, num_items)
        return sum(loss * (1 + i / 7) for i, (name, loss) in enumerate(found.items()) if name not in PARTS)


def test_many_sums_are_made_whole() -> None:
    assert check_or_refuse(Together(CASES[::3])) is None


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "rows"), [(3, "contiguous", 2), (4, "dual_chunk", 1), (4, "balanced", 1)])
def test_sums_are_made_whole_on_more_ranks(pool: Pool, ranks: int, layout: str, rows: int) -> None:
    compare(pool, [*CASES], ranks, layout, rows, 14)


class Direct(PackedModel):
    """Attention reads at once what is made whole."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q.cumsum(2), F.normalize(k, dim=2), v.cummax(2).values, attn_mask=mask)


def test_attention_reads_what_is_made_whole() -> None:
    assert check_or_refuse(Direct()) is None


class Anew(PackedModel):
    """Sums that are read whole, set to 0, and added up once more in the same memory."""

    def mix(self, h: Tensor) -> Tensor:
        kinds, sums = (h[..., 1] > 0).long(), h.new_zeros(h.shape[0], 2)
        for x in h.detach()[..., :2].unbind(-1):
            sums.zero_()
            sums.scatter_add_(1, kinds, x)
            h = h + sums.gather(1, kinds)[..., None]
        return h


def test_sums_that_begin_anew_in_their_memory_are_made_whole() -> None:
    assert check_or_refuse(Anew()) is None


def test_what_torch_takes_apart_in_two_ways_is_right() -> None:
    """With gradients and without."""

    class Margin(Resolved):
        def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
            return F.multi_margin_loss(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="sum")

    assert check_or_refuse(Margin(()), 2, 17) is None


def test_they_are_refused_where_nothing_is_to_be_resolved() -> None:
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), resolve=False)
    report = cp.explain(Resolved(("mean_of_all",)), sharding)(**packed_batch())
    assert {refusal.reason for refusal in report.refusals} == {cp.Reason.TOKEN_MIXING}
    report = cp.explain(Resolved(("mean_of_all",)), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed_batch())
    (found,) = report.collectives
    assert (found.op, found.bytes) == ("sum_over_ranks", 4)
    assert "x.square().mean()" in found.where
    assert "mean over the tokens of all ranks" in found.why
