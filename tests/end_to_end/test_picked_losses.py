"""Losses of tokens that a mask picks are as on one process, whatever the other tokens hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.end_to_end.test_batches_in_turn import pack
from tests.helpers.one_process import check_all, check_or_refuse
from tests.helpers.packed_model import TOKENS, VOCAB, WIDTH, PackedModel

Loss = Callable[["Picking", Tensor, Tensor, Tensor], Tensor]
"""(model, hidden states (B, T, C), labels (B, T), mask (B, T)) -> loss."""


class Picking(PackedModel):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.more = nn.Parameter(torch.randn(WIDTH))
        self.other_head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor, num_items: Tensor
    ) -> Tensor:
        h = self.inputs(input_ids, position_ids)
        mask = self.mask(h, doc_ids, position_ids, input_ids)
        h = self.attended(h, mask, self.angles(h, position_ids)[:, None])
        picked = labels != -100
        return torch.stack([(RIGHT | REFUSED)[name](self, h, labels, picked) for name in self.names]).sum()


def nan_elsewhere(x: Tensor, k: Tensor, number: float = torch.nan) -> Tensor:
    """`x` (B, T) or (B, T, C), a number in tokens that are not picked."""
    return x.masked_fill(~k if x.ndim == 2 else ~k[..., None], number)


def rows(x: Tensor, k: Tensor) -> Tensor:
    return nan_elsewhere(x, k)[k]


def logits(m: Picking, h: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return rows(m.head(h), k), rows(m.other_head(h), k)


def distilled(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    s, t = logits(m, h, k)
    each = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1).mean()
    return each + F.kl_div(s.log_softmax(-1), t.log_softmax(-1).detach(), reduction="batchmean", log_target=True)


def divergence(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    s, t = (x.log_softmax(-1) for x in logits(m, h, k))
    return (s.exp() * (s - torch.logaddexp(s, t))).sum(-1).mean()


def clipped(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """As PPO: advantages are whitened."""
    advantages = rows(h.mean(-1), k)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (rows(h.sum(-1), k) / 9).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def focal(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    each = F.cross_entropy(rows(m.head(h), k), y[k], reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean() + each.sum() / each.shape[0]


def weighted(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    each, weights = F.cross_entropy(rows(m.head(h), k), y[k], reduction="none"), rows(h.sum(-1), k).sigmoid()
    return (each * weights).sum() / weights.sum()


def by_size(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    r = rows(h, k)
    total = r.square().sum() / max(r.shape[0], 1) + r.sum() / r.numel() + r.tanh().sum() / (2 * len(r) - 1)
    return total + r.mean() * r.size(0) / 9


def gathered(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    logps, targets = rows(m.head(h), k).log_softmax(-1), y[k]
    return -logps.gather(1, targets[:, None]).mean() - logps[torch.arange(len(targets)), targets].sum() / 9


def written(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[k] = m.out(m.norm(rows(h, k)))
    h = h * 1
    h[k] = h[k] * 2
    h[y == 7] = m.more
    return m.head(out + h).square().mean() + h[k].square().mean()


def written_by_language(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """As XMOD's adapters."""
    out = torch.zeros_like(h)
    for i in range(2):
        mask = y % 2 == i
        out[mask] = m.out(rows(h, mask)).tanh() * (i + 1)
    return m.head(out).square().mean()


def flattened(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    h, k, y = h.flatten(0, 1), k.flatten(), y.flatten()
    return F.mse_loss(h[k].sum(-1), y[k].double())


def shifted(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    scores, y = m.head(h)[:, :-1], y[:, 1:]
    k = y != -100
    return F.nll_loss(scores[k].log_softmax(-1), y[k]) + F.mse_loss(scores[k][:, 0], y[k].double())


def parts(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    a, b = rows(h, k).chunk(2, -1)
    c = torch.stack([a, b], 1).transpose(1, 2).reshape(-1, WIDTH).view(-1, 2, WIDTH // 2).softmax(-1)
    return (torch.cat([a, b.sigmoid()], -1) * c.flatten(1)).mean() + rows(h, k).topk(3, -1).values.mean()


def infinite(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    return F.mse_loss(nan_elsewhere(h, k, torch.inf)[k], nan_elsewhere(m.out(h), k, -torch.inf)[k])


def picked_twice(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """Loss of those picked tokens that a mask of picked values picks."""
    scores, targets, each = rows(m.head(h), k), y[k], rows(h.sum(-1), k)
    keep = (targets != 3) & (each > -9)
    again = scores[keep][targets[keep] % 3 > 0]
    features = rows(h, k)
    hard = F.cross_entropy(scores, targets, reduction="none")
    losses = F.cross_entropy(scores[keep], targets[keep]) + hard[hard > hard.mean().detach()].mean()
    losses = losses + scores[keep].sum() / scores[keep].shape[0] + again.square().mean()
    return losses + features[features > 0].exp().mean() + features.masked_select(features < 0).sum() / 9


def at_places(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """At all places where a mask is true: the same as by the mask."""
    places, flat = k.nonzero(), k.flatten().nonzero().squeeze(-1)
    losses = F.cross_entropy(m.head(nan_elsewhere(h, k)[torch.where(k)]), y[k.nonzero(as_tuple=True)])
    losses = losses + h[places[:, 0], places[:, 1]].exp().mean() + h.flatten(0, 1).index_select(0, flat).sin().mean()
    out = h * 1
    out[k.nonzero(as_tuple=True)] = rows(m.out(h), k)
    return losses + y.flatten()[flat].sum() / len(flat) + m.head(out).square().mean() + h.sum() / places.shape[0]


def mask_made_twice(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
    each = F.cross_entropy(m.head(h)[y != -100], y[y != -100], reduction="none")
    return (each * h[y != -100].sum(-1).sigmoid()).mean() + m.head(h)[y != -100].gather(1, y[y != -100][:, None]).mean()


RIGHT: dict[str, Loss] = {
    "mse": lambda m, h, y, k: F.mse_loss(rows(h.sum(-1), k), y[k].double()) + F.mse_loss(*logits(m, h, k)),
    "l1": lambda m, h, y, k: F.l1_loss(*logits(m, h, k)) + F.smooth_l1_loss(*logits(m, h, k), beta=0.5),
    "huber": lambda m, h, y, k: F.huber_loss(*logits(m, h, k), delta=2.0, reduction="sum") / 9,
    "with_logits": lambda m, h, y, k: F.binary_cross_entropy_with_logits(
        rows(m.head(h), k), F.one_hot(y[k], VOCAB).double(), pos_weight=torch.full((VOCAB,), 2.0).double()
    ),
    "binary": lambda m, h, y, k: F.binary_cross_entropy(rows(h.sum(-1).sigmoid(), k), (y[k] % 2).double()),
    "nll": lambda m, h, y, k: F.nll_loss(rows(m.head(h).log_softmax(-1), k), y[k]),
    "smoothed": lambda m, h, y, k: F.cross_entropy(rows(m.head(h), k), y[k], label_smoothing=0.1, ignore_index=3),
    "distilled": distilled,
    "divergence": divergence,
    "clipped": clipped,
    "focal": focal,
    "weighted": weighted,
    "by_size": by_size,
    "gathered": gathered,
    "written": written,
    "written_by_language": written_by_language,
    "flattened": flattened,
    "shifted": shifted,
    "parts": parts,
    "infinite": infinite,
    "picked_twice": picked_twice,
    "at_places": at_places,
    "mask_made_twice": mask_made_twice,
    "counted_events": lambda m, h, y, k: (
        F.poisson_nll_loss(rows(h.sum(-1), k), y[k])
        + F.margin_ranking_loss(rows(h.sum(-1), k), rows(h.mean(-1), k), y[k] % 2 * 2 - 1, margin=0.5)
    ),
    "norms": lambda m, h, y, k: rows(h, k).norm() + rows(h, k).norm(dim=-1).mean() + rows(h, k).norm(dim=0).sum(),
    "normalized": lambda m, h, y, k: (F.normalize(rows(h, k), dim=-1) * m.more).sum(-1).square().mean(),
    "cosine": lambda m, h, y, k: F.cosine_similarity(*logits(m, h, k), dim=-1).mean(),
    "deviation": lambda m, h, y, k: rows(h, k).std() + rows(h, k).var(0).sum() + rows(h, k).std(unbiased=False),
    "largest": lambda m, h, y, k: rows(h, k).amax(0).sum() + rows(h, k).max() - rows(h, k).amin(),
    "centered": lambda m, h, y, k: (rows(h, k) - rows(h, k).mean(0, keepdim=True)).square().mean(),
    "logarithm": lambda m, h, y, k: rows(h.abs(), k).log().mean() + rows(h.abs(), k).sqrt().sum() / 9,
    "ratio": lambda m, h, y, k: (rows(h, k) / (rows(m.out(h), k).abs() + 0.1)).mean(),
    "behind_a_large_number": lambda m, h, y, k: (rows(h * 0 + 800, k) - 800).exp().mean() * h.mean(),
    "entropy": lambda m, h, y, k: -(rows(m.head(h), k).softmax(-1) * rows(m.head(h), k).softmax(-1).log()).mean(),
    "embedded": lambda m, h, y, k: F.mse_loss(rows(h, k), m.embed(y[k])) + (h[k] * m.embed.weight[y[k]]).mean(),
    "chosen": lambda m, h, y, k: torch.where(y[k] > 9, rows(h.sum(-1), k), rows(h.mean(-1), k) * 2).mean(),
    "selected": lambda m, h, y, k: torch.masked_select(nan_elsewhere(h.sum(-1), k), k).square().mean(),
    "checkpointed": lambda m, h, y, k: checkpoint(  # type: ignore[return-value]
        lambda h, y: F.mse_loss(m.out(h)[k].sum(-1), y[k].double()), h, y, use_reentrant=False
    ),
}
REFUSED: dict[str, Loss] = {
    "beside_each_other": lambda m, h, y, k: (h[k][1:] - h[k][:-1]).square().mean(),
    "pairs": lambda m, h, y, k: (F.normalize(h[k], dim=-1) @ h[k].T).mean(),
    "in_order": lambda m, h, y, k: h[k].cumsum(0).mean(),
    "over_picks": lambda m, h, y, k: h[k].log_softmax(0)[:, 0].mean(),
    "changed": lambda m, h, y, k: h[k].add_(1).square().mean(),
    "picked_by_others": lambda m, h, y, k: h[k][y.flip(1)[k.flip(1)] > 5].mean(),
    "picked_by_place": lambda m, h, y, k: h[k][torch.arange(h[k].shape[0]) > 2].mean(),
    "at_rows_of_places": lambda m, h, y, k: h.sum(1)[k.nonzero()[:, 0]].mean(),
    "at_places_swapped": lambda m, h, y, k: (h @ h.mT)[0][k[0].nonzero()[:, 0]].mean(),
}


@pytest.mark.parametrize("rows", [1, 2])
def test_some_are_right(rows: int) -> None:
    names = ("mse", "distilled", "clipped", "by_size", "gathered", "written", "deviation", "logarithm", "picked_twice")
    assert check_or_refuse(Picking(*names), rows, 13) is None


def test_a_pick_that_is_refused_refuses_no_other() -> None:
    said = check_or_refuse(Picking("in_order", "mse", "gathered"))
    assert said is not None
    assert said.count("  - ") == 1
    assert "cumsum(0)" in said


def test_torch_can_not_compare_counts_of_masks_that_are_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RIGHT, "twice", lambda m, h, y, k: F.mse_loss(h[y != -100][:, 0], y[y != -100].double()))
    with pytest.raises(torch._dynamo.exc.UserError) as raised:
        check_or_refuse(Picking("twice"))
    assert "compute it once" in "".join(raised.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_picks_in_turn(name: str) -> None:
    torch._dynamo.reset()
    ranks = 2 + [*RIGHT, *REFUSED].index(name) % 3
    sharding = cp.Sharding(ranks, TOKENS, cp.DocumentIds("doc_ids"), "head_tail")
    lengths: Any = [([20, 4],), ([5, 4, 5],)] if ranks < 4 else [([20, 4], [6, 18])]
    batches = [pack(*rows) for rows in lengths]
    try:
        worst = [report.largest for report in check_all(Picking(name).double(), sharding, batches)]
    except cp.RewriteRefused:
        assert name in REFUSED
    else:
        assert name in RIGHT
        assert max(worst) <= 1e-9


def test_results_have_the_dtype_that_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are fp64, which a sum of no dims would take on; weights of another dtype would be an error then."""

    def loss(m: Picking, h: Tensor, y: Tensor, k: Tensor) -> Tensor:
        r = h[k]
        each = [
            F.mse_loss(r, r * 2),
            r.mean(),
            r.std(),
            r.sum() / r.shape[0],
            F.kl_div(r, r.softmax(-1), reduction="batchmean"),
        ]
        return torch.stack([F.linear(x.expand(WIDTH), m.out.weight).mean() for x in each]).sum()

    monkeypatch.setitem(RIGHT, "narrow", loss)
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), "head_tail")
    torch._dynamo.reset()
    assert cp.check(Picking("narrow"), sharding, pack([20, 4])).largest <= 1e-4
