"""A torch.autograd.Function whose forward and backward treat tokens alone: one process's loss and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.planning.names import LAYOUTS
from tests.helpers.one_process import check_all, check_or_refuse, compare
from tests.helpers.packed_model import TOKENS, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool
from tests.helpers.versions import OLD

Mix = Callable[["Functions", Tensor], Tensor]
Loss = Callable[["Functions", Tensor, Tensor], Tensor]


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` of a Function: forward(*operands) -> (results, saved); backward(saved, *gradients) -> gradients."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            results, saved = forward(*operands)
            ctx.save_for_backward(*saved)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx.saved_tensors, *gradients)

    return Function.apply


def rms_forward(x: Tensor, w: Tensor) -> Any:
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * r * w, (x * r, r, w)


def rms_backward(saved: Any, g: Tensor) -> Any:
    x, r, w = saved
    away = g * w
    return r * (away - x * (away * x).mean(-1, keepdim=True)), (g * x).sum((0, 1))


def fused_forward(h: Tensor, w: Tensor, y: Tensor, mean: bool) -> Any:
    scores, kept = h @ w.t(), y != -100
    count = kept.sum() if mean else 9.0
    target = y.clamp(min=0)
    losses = scores.logsumexp(-1) - scores.gather(-1, target[:, None])[:, 0]
    away = (scores.softmax(-1) - F.one_hot(target, w.shape[0])) * kept[:, None] / count
    return (losses * kept).sum() / count, (away @ w, away.t() @ h)


def chunk_losses(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of each token, and their gradients of logits."""
    scores, kept, target = x @ w.t(), y != -100, y.clamp(min=0)
    losses = scores.logsumexp(-1) - scores.gather(-1, target[:, None])[:, 0]
    return losses * kept, (scores.softmax(-1) - F.one_hot(target, w.shape[0])) * kept[:, None]


def in_chunks(*tensors: Tensor) -> Any:
    return zip(*(x.chunk(4) for x in tensors), strict=True)


def chunked_forward(h: Tensor, w: Tensor, y: Tensor) -> Any:
    total, of_weight = h.new_zeros(()), torch.zeros_like(w)
    of_rows: list[Tensor] = []
    for x, t in in_chunks(h, y):
        losses, away = chunk_losses(x, w, t)
        total += losses.sum()
        of_rows.append(away @ w)
        of_weight.add_(away.t() @ x)
    return total / 9, (torch.cat(of_rows) / 9, of_weight / 9)


def chunked_backward(saved: Any, g: Tensor) -> Any:
    """Makes each chunk's logits once more."""
    h, w, y = saved
    of_weight = torch.zeros_like(w)
    of_rows: list[Tensor] = []
    for x, t, upstream in in_chunks(h, y, g):
        away = chunk_losses(x, w, t)[1] * upstream[:, None]
        of_rows.append(away @ w)
        of_weight += away.t() @ x
    return torch.cat(of_rows), of_weight, None


silu_mul = function(
    lambda a, b: (F.silu(a) * b, (a, b)),
    lambda s, g: (g * s[1] * s[0].sigmoid() * (1 + s[0] * (1 - s[0].sigmoid())), g * F.silu(s[0])),
)
squared_relu = function(lambda x: (F.relu(x).square(), (x,)), lambda s, g: g * 2 * F.relu(s[0]))
reversal = function(lambda x: (x.view_as(x), ()), lambda s, g: -0.3 * g)
rounded = function(lambda x: (x.round(), ()), lambda s, g: g)
rms_norm = function(rms_forward, rms_backward)
linear = function(lambda x, w: (x @ w.t(), (x, w)), lambda s, g: (g @ s[1], g.flatten(0, 1).t() @ s[0].flatten(0, 1)))
fused_loss = function(fused_forward, lambda s, g: (g * s[0], g * s[1], None, None))
fused_in_chunks = function(chunked_forward, lambda s, g: (g * s[0], g * s[1], None))
made_again = function(
    lambda h, w, y: (torch.cat([chunk_losses(x, w, t)[0] for x, t in in_chunks(h, y)]), (h, w, y)), chunked_backward
)
two_results = function(
    lambda x, w: ((x * w, x.sin(), (x > 0).int()), (x, w)),
    lambda s, a, b, _: (a * s[1] + b * s[0].cos(), (a * s[0]).flatten(0, 1).sum(0)),
)
auxiliary = function(lambda x, loss: (x * 1, (loss,)), lambda s, g: (g, torch.ones_like(s[0])))
clipped = function(lambda x: (x * 1, ()), lambda s, g: g.clamp(-1e-3, 1e-3))
raised = function(lambda x: (x * 1, ()), lambda s, g: g + 0.01)
scaled = function(lambda x: (x * 1, ()), lambda s, g: g * 3)


def joined(results: Sequence[Tensor]) -> Tensor:
    return results[0] + results[1] * results[2]


MIXES: dict[str, Mix] = {
    "silu_mul": lambda m, h: silu_mul(h, m.lin(h)),
    "squared_relu": lambda m, h: squared_relu(m.lin(h)),
    "reversal": lambda m, h: reversal(h).tanh(),
    "rounded": lambda m, h: rounded(m.lin(h)),
    "rms_norm": lambda m, h: rms_norm(h, m.w),
    "linear": lambda m, h: linear(h, m.lin.weight),
    "two_results": lambda m, h: joined(two_results(h, m.w)),
    "auxiliary": lambda m, h: auxiliary(h, m.lin(h).softmax(-1).mean((0, 1)).square().sum()),
    "clipped": lambda m, h: clipped(h),
    "raised": lambda m, h: raised(h.sin()),  # rows that fill a rank up have a gradient of their own
    "of_a_weight": lambda m, h: h * reversal(m.w),
    "spread_weight": lambda m, h: silu_mul(h, m.w.expand_as(h)),
    "checkpoint": lambda m, h: checkpoint(lambda x: rms_norm(silu_mul(x, m.lin(x)), m.w), h, use_reentrant=False),
}
LOSSES: dict[str, Loss] = {
    "fused_sum": lambda m, h, y: fused_loss(h.flatten(0, 1), m.head.weight, y.flatten(), False),
    "fused_mean": lambda m, h, y: fused_loss(h.flatten(0, 1), m.head.weight, y.flatten(), True),
    "fused_in_chunks": lambda m, h, y: fused_in_chunks(h.flatten(0, 1), m.head.weight, y.flatten()),
    "made_again": lambda m, h, y: made_again(h.flatten(0, 1), m.head.weight, y.flatten()).sum() / 9,
    "scaled_sum": lambda m, h, y: scaled(h.square().sum()),
    "scaled_mean": lambda m, h, y: scaled(h.square().mean()),
}
if OLD:
    del LOSSES["made_again"]  # its backward's chunks are of numbers, not of symbols
CASES = [*MIXES, *LOSSES]


class Functions(PackedModel):
    """The packed model with functions of hidden states, and losses of them, beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.hidden = names, Tensor()

    def extra(self) -> None:
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor, num_items: Tensor):
        h = self.embed(input_ids)
        mask = self.mask(h, doc_ids, position_ids, input_ids)
        h = self.attended(h, mask)
        h = sum((MIXES[name](self, h) * (1 + i / 9) for i, name in enumerate(self.names) if name in MIXES), h)
        losses = [LOSSES[name](self, h, labels) for name in self.names if name in LOSSES]
        return sum(losses, self.loss(self.head(h), labels, num_items))


def test_backwards_of_their_own_are_right() -> None:
    assert check_or_refuse(Functions(CASES[::2])) is None


@pytest.mark.slow
@pytest.mark.parametrize("names", [CASES, *([name] for name in LOSSES)])
def test_all_backwards_of_their_own_are_right(pool: Pool, names: Sequence[str]) -> None:
    compare(pool, Functions, names, 2, "head_tail", 1, 13)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("ranks", "rows", "tokens"), [(2, 2, 15), (3, 1, 17)])
def test_backwards_of_their_own_in_every_layout(pool: Pool, layout: str, ranks: int, rows: int, tokens: int) -> None:
    first = (sorted(LAYOUTS).index(layout) + ranks) % 3
    compare(pool, Functions, CASES[first::3], ranks, layout, rows, tokens)


class Counted(torch.autograd.Function):
    """Gives its operand doubled, and how many tokens it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
        return x * 2, x.shape[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def test_a_function_that_gives_a_number_beside_tensors_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXES, "counted", lambda m, h: Counted.apply(h)[0])
    assert check_or_refuse(Functions(["counted"])) is None


def test_a_function_whose_results_have_no_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo gives none to what torchao's float8 product makes of its operands."""
    explain: Any = importlib.import_module("cp_rewrite.diagnose.explain")
    capture = explain.capture

    def without_values(*given: Any) -> Any:
        state = capture(*given)
        for node in state.graph_module.graph.nodes:
            if node.target in ("tanh", torch.tanh):
                del node.meta["example_value"]
        return state

    monkeypatch.setattr(explain, "capture", without_values)
    monkeypatch.setitem(MIXES, "hidden", lambda m, h: h.tanh() * 2)
    report = cp.explain(Functions(["hidden"]), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed_batch())
    assert "NO_LOCALITY_RULE: tanh is not shown by the graph" in str(report)


def decayed(saved: Any, g: Tensor) -> Any:
    return g * saved[0], 0.1 * saved[0]


# Made here: torch can't trace what makes a class.
_flipped = function(lambda x: (x * 2, ()), lambda s, g: g.flip(1))
_rolled = function(lambda x: (x * 2, ()), lambda s, g: g.roll(1, 1))
_centered = function(lambda x: (x * 2, ()), lambda s, g: g - g.mean(1, keepdim=True))
_normed = function(lambda x: (x * 2, ()), lambda s, g: g / g.norm())
_summed_forward = function(lambda x: (x * x.cumsum(1), ()), lambda s, g: g)
_fill_is_summed = function(lambda x, w: (x * w, ()), lambda s, g: (g, (g + 1).sum((0, 1))))
_decayed = function(lambda x, w: (x * w, (w,)), decayed)
_not_summed = function(lambda x, w: (x * w, (x,)), lambda s, g: (g, (g * s[0]).sum((0, 1)) / s[0].shape[1]))
_norm_of_a_sum = function(lambda x, w: (x * w, (x,)), lambda s, g: (g, F.normalize((g * s[0]).sum((0, 1)), dim=0)))

BESIDE: dict[str, Mix] = {
    "flipped": lambda m, h: _flipped(h),
    "rolled": lambda m, h: _rolled(h),
    "centered": lambda m, h: _centered(h),
    "normed": lambda m, h: _normed(h),
    "summed_forward": lambda m, h: _summed_forward(h),
    "fill_is_summed": lambda m, h: _fill_is_summed(h, m.w),
    "decayed": lambda m, h: _decayed(h, m.w),
    "not_summed": lambda m, h: _not_summed(h, m.w),
    "norm_of_a_sum": lambda m, h: _norm_of_a_sum(h, m.w),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_backwards_that_mix_tokens_are_right_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXES, "beside", BESIDE[name])
    check_or_refuse(Functions(["beside"]))


def _mean_made_again(m: Any, h: Tensor, y: Tensor) -> Tensor:
    return made_again(h.flatten(0, 1), m.head.weight, y.flatten()).mean()


def test_a_mean_of_losses_that_a_backward_makes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one chunk has a number and another a tensor, they are not alike."""
    monkeypatch.setitem(LOSSES, "beside", _mean_made_again)
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
    torch._dynamo.reset()
    for report in check_all(Functions(["beside"]).double(), sharding, [packed_batch(1, 13), packed_batch(1, 18)]):
        assert report.largest <= 1e-7, str(report)
