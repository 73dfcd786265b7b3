"""Token locality: what is proven, what is refused and how, where positions are found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.batch.gradients import token_mean
from cp_rewrite.passes.locality.ends import why_static
from cp_rewrite.passes.locality.rules.table import RULES
from cp_rewrite.refusal import Reason
from tests.helpers.packed_model import SHARDING, TOKENS, WIDTH, PackedModel, judge, packed_batch


class Mixed(PackedModel):
    """The packed model with a function of hidden states after attention."""

    def __init__(self, function: Callable[[Mixed, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def extra(self) -> None:
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.experts = nn.Parameter(torch.randn(5, WIDTH, WIDTH))
        self.rms = nn.RMSNorm(WIDTH)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)

    def mix(self, h: Tensor) -> Tensor:
        return self.function(self, h)


def filled(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[..., :4] = h[..., 4:8]
    out[..., 4] += 1
    return out


def masked_write(h: Tensor) -> Tensor:
    h = h.clone()
    h[h > 3] = 3.0
    return h


def picked_experts(m: Mixed, h: Tensor) -> Tensor:
    x = h.flatten(0, 1)
    weight, chosen = (x @ m.table.T).softmax(-1).topk(2, dim=-1)
    y = torch.bmm(x[:, None, None].expand(-1, 2, -1, -1).flatten(0, 1), m.experts[chosen.flatten()])
    return (y.view(*chosen.shape, -1) * weight[..., None]).sum(1).view_as(h)


def over_depth(m: Mixed, h: Tensor) -> Tensor:
    """Each token attends to what earlier layers made of it."""
    layers = torch.stack([h, m.out(h), h.sin()], 2).flatten(0, 1).unflatten(-1, (2, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(layers, layers, layers, is_causal=True)
    return y[:, :, -1].flatten(1).view_as(h)


def to_memory(m: Mixed, h: Tensor) -> Tensor:
    """Tokens attend to 5 rows of weights; 4 query heads share 2 of them."""
    query = h.unflatten(-1, (4, -1)).transpose(1, 2)
    memory = m.table[:, :12].unflatten(-1, (2, -1)).transpose(0, 1).expand(h.shape[0], -1, -1, -1)
    seen = torch.arange(5) < (h[:, None, :, :1] > 0) + 4
    y = F.scaled_dot_product_attention(query, key=memory, value=memory, attn_mask=seen, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


def over_heads(m: Mixed, h: Tensor) -> Tensor:
    x = h.unflatten(-1, (4, -1))
    return F.scaled_dot_product_attention(x, x, x).flatten(2)


LOCAL: dict[str, Callable[[Mixed, Tensor], Tensor]] = {
    "pointwise": lambda m, h: torch.tanh(h * 2 + m.table[0]).clamp(min=0).where(h > 0, -h),
    "views": lambda m, h: h.unflatten(-1, (2, -1)).transpose(1, 2).contiguous().permute(0, 2, 1, 3).flatten(2),
    "flat rows and back": lambda m, h: h.reshape(-1, WIDTH).mul(2).view(h.shape),
    "three dims to one and back": lambda m, h: h.reshape(-1).sin().view(h.shape),
    "chunk and cat": lambda m, h: torch.cat(h.chunk(3, dim=-1)[::-1], dim=-1),
    "split and stack": lambda m, h: torch.stack(h.split(WIDTH // 2, -1), 0).sum(0).repeat(1, 1, 2),
    "copies of all tokens": lambda m, h: (
        torch.bmm(h.flatten(0, 1).repeat(len(m.experts), 1).view(len(m.experts), -1, WIDTH), m.experts)
        .sum(0)
        .view_as(h)
    ),
    "slices of features": lambda m, h: torch.cat([-h[..., WIDTH // 2 :], h[..., : WIDTH // 2]], -1),
    "whole slice": lambda m, h: h[:, 0:][:, : h.shape[1]],
    "norms": lambda m, h: m.rms(F.layer_norm(h, (WIDTH,))) / h.norm(dim=-1, keepdim=True),
    "matmuls": lambda m, h: (h @ m.table.T) @ m.table + torch.einsum("btd,de->bte", h, m.experts[0]),
    "per head product": lambda m, h: torch.einsum(
        "bthd,hde->bthe", h.unflatten(-1, (2, -1)), m.experts[:2, :12, :12]
    ).flatten(2),
    "kernel of one": lambda m, h: m.point(h.mT).mT,
    "group norm per token": lambda m, h: F.group_norm(h.flatten(0, 1), 2).view_as(h),
    "lookup by value": lambda m, h: h + m.table[(h[..., 0] > 0).long()] + F.embedding((h[..., 1] > 0).long(), m.table),
    "one hot": lambda m, h: F.one_hot((h[..., 0] > 0).long(), WIDTH) * h,
    "select features by constant": lambda m, h: h[..., torch.arange(WIDTH - 1, -1, -1)],
    "write into new memory": lambda m, h: filled(h),
    "masked write": lambda m, h: masked_write(h),
    "complex rotation": lambda m, h: torch.view_as_real(
        torch.view_as_complex(h.unflatten(-1, (-1, 2))) * torch.polar(m.table[0, :12], m.table[1, :12])
    ).flatten(2),
    "swiglu": lambda m, h: F.glu(torch.cat([h, h], -1)) + F.silu(h) * F.gelu(h, approximate="tanh") + F.logsigmoid(h),
    "constants": lambda m, h: h + torch.ones(h.shape[0], h.shape[1], 1) + torch.full_like(h, 2.0) + h.new_zeros(()),
    "experts by index": picked_experts,
    "attention over depth": over_depth,
    "attention to a memory": to_memory,
    "attention over heads": over_heads,
    "dropout of zero": lambda m, h: F.dropout(h, 0.0) + F.dropout(h, 0.5, training=False),
    "checkpoint": lambda m, h: checkpoint(lambda x: x + m.out(x), h, use_reentrant=False),  # type: ignore[dict-item]
    "no grad": lambda m, h: h + torch.no_grad()(lambda x: x * 2)(h),
}


def autocast(m: Mixed, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.out(h)


LOCAL["autocast"] = autocast
TOGETHER = [list(LOCAL)[first::4] for first in range(4)]
"""Functions beside each other in one graph, which is captured once for all of them."""


@pytest.mark.shared
@pytest.mark.parametrize(
    ("names", "rows"),
    [
        *(pytest.param(names, 1, marks=pytest.mark.slow if i else ()) for i, names in enumerate(TOGETHER)),
        *((names, 2) for names in TOGETHER),
    ],
)
def test_per_token_computation_is_proven(names: list[str], rows: int) -> None:
    verdict = judge(Mixed(lambda m, h: sum((LOCAL[name](m, h) for name in names), h)), packed_batch(rows))
    assert not verdict.refusals, str(verdict)
    assert not verdict.locality.positions


def test_a_mask_alone_is_not_looked_at() -> None:
    """The mask's T x T comparisons and arange are dead after the rewrite."""
    verdict = judge(PackedModel())
    assert not verdict.refusals
    assert not verdict.locality.positions
    assert len(verdict.sites) == 1


def test_a_refusal_names_the_users_line_and_the_fix() -> None:
    verdict = judge(Mixed(lambda m, h: h + h[:, :1]))
    (refusal,) = verdict.refusals
    assert refusal.reason is cp.Reason.TOKEN_MIXING
    assert "test_locality.py" in refusal.where
    assert "h + h[:, :1]" in refusal.where
    assert "a choice by their place" in refusal.detail
    assert "shift_labels" not in refusal.detail


def test_copies_of_all_tokens_are_no_copies_of_each() -> None:
    verdict = judge(Mixed(lambda m, h: h.flatten(0, 1).repeat(3, 1).view(-1, 3, WIDTH).sum(1).view_as(h)))
    assert "view" in str(verdict)


def test_one_refusal_does_not_bring_others() -> None:
    """Nodes behind a refused op are not refused once more; those beside it are."""
    verdict = judge(Mixed(lambda m, h: (h.cumsum(1) * 2).softmax(1).flip(1) + h.roll(1, 1)))
    assert ["cumsum" in r.detail or "roll" in r.detail for r in verdict.refusals] == [True, True]


class TokenMean(PackedModel):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return self.after(token_mean(total, (labels != -100).sum(), SHARDING))

    def after(self, mean: Tensor) -> Tensor:
        return mean


class ExpOfTokenMean(TokenMean):
    def after(self, mean: Tensor) -> Tensor:
        return mean.exp() * 2 + 1


class PenaltyOnTokenMean(TokenMean):
    def after(self, mean: Tensor) -> Tensor:
        return mean + self.head.weight.square().sum()


def test_token_mean_is_a_global_value() -> None:
    assert not judge(TokenMean()).refusals
    assert not judge(ExpOfTokenMean()).refusals


def test_a_term_of_weights_alone_would_count_once_per_rank() -> None:
    assert "once per rank" in str(judge(PenaltyOnTokenMean()))


class TokenMeanOfGlobalCount(PackedModel):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return token_mean(total, num_items, SHARDING)


def test_token_mean_wants_the_ranks_own_count() -> None:
    assert "this rank's number of tokens" in str(judge(TokenMeanOfGlobalCount()))


@torch.library.custom_op("locality::per_token", mutates_args=())
def per_token(x: Tensor) -> Tensor:
    """An op whose name says nothing about tokens."""
    return x * 2


@per_token.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_unknown_op_is_named_and_can_be_vouched_for() -> None:
    model = Mixed(lambda m, h: torch.ops.locality.per_token(h))
    (refusal,) = judge(model).refusals
    assert refusal.reason is cp.Reason.NO_LOCALITY_RULE
    assert "locality::per_token" in refusal.detail
    vouched = cp.Sharding(4, TOKENS, cp.DocumentIds("doc_ids"), local_ops=("locality::per_token",))
    assert not judge(model, sharding=vouched).refusals


class Weighted(PackedModel):
    def forward(self, weights: Tensor, **rest: Tensor) -> Any:  # type: ignore[override]
        self.weights = weights
        return super().forward(**rest)

    def mix(self, h: Tensor) -> Tensor:
        return h * self.weights[..., None]


def test_an_input_as_long_as_the_tokens_must_be_named() -> None:
    batch = packed_batch()
    batch["weights"] = torch.ones(1, 14)
    verdict = judge(Weighted(), batch, also_dynamic=["weights"])
    assert any(r.reason is cp.Reason.TOKEN_INPUT and "'weights'" in r.detail for r in verdict.refusals), str(verdict)


@pytest.mark.parametrize(("name", "dim"), [("num_items", 1), ("table", 0)])
def test_an_annotated_input_must_have_its_token_dim(name: str, dim: int) -> None:
    class TwoInputs(PackedModel):
        def forward(self, table: Tensor, **rest: Tensor) -> Any:  # type: ignore[override]
            return super().forward(**rest) + 0 * table.sum()

    sharding = cp.Sharding(4, {**TOKENS, name: dim}, cp.DocumentIds("doc_ids"))
    verdict = judge(TwoInputs(), {**packed_batch(), "table": torch.ones(3, 3)}, sharding)
    assert any(r.reason is cp.Reason.TOKEN_INPUT and name in r.detail for r in verdict.refusals), str(verdict)


class Arange(PackedModel):
    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return torch.arange(h.shape[1]).expand(h.shape[0], -1)[..., None].float() + 3


@pytest.mark.parametrize("rows", [1, 2])
def test_arange_is_reported(rows: int) -> None:
    verdict = judge(Arange(), packed_batch(rows))
    assert not verdict.refusals, str(verdict)
    apart = verdict.locality.row_positions
    assert (apart is None) == (rows == 1)
    (position,) = apart.generators if apart else verdict.locality.positions
    assert position.node.target is torch.arange
    assert position.kind == "arange"


class Table(PackedModel):
    def extra(self) -> None:
        self.places = nn.Parameter(torch.randn(1, 64, WIDTH))

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embed(input_ids) + self.places[:, : input_ids.shape[1]]


def test_tables_of_positions_are_reported() -> None:
    report = judge(Table()).locality
    assert not report.refusals
    (position,) = report.positions
    assert (position.kind, position.dim) == ("table", 1)


def test_a_table_is_taken_by_a_slice_alone() -> None:
    class Both(Table):
        def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.embed(input_ids) + self.places[0, : input_ids.shape[1], None].sum(1)

    (refusal,) = judge(Both()).refusals
    assert refusal.reason is cp.Reason.POSITION_GENERATOR


def test_a_dim_cut_to_the_token_count_is_refused() -> None:
    verdict = judge(Mixed(lambda m, h: h + h.repeat(1, 1, 9)[..., : h.shape[1]].sum(-1, keepdim=True)))
    assert verdict.reasons == {"POSITION_GENERATOR"}


def test_graphs_of_fixed_shapes_are_refused() -> None:
    (refusal,) = judge(PackedModel(), dynamic=False).refusals
    assert refusal.reason is cp.Reason.TOKEN_INPUT


class CountedInPython(PackedModel):
    def mix(self, h: Tensor) -> Tensor:
        return h * sum(1 for _ in range(h.shape[1]))


def test_a_line_that_fixes_the_token_count_is_named() -> None:
    report = cp.explain(CountedInPython(), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**packed_batch())
    assert any(r.reason is cp.Reason.TOKEN_COUNT and "range(h.shape[1])" in r.detail for r in report.refusals), report


def test_each_op_has_one_rule() -> None:
    ops = [op for rule in RULES for op in rule.ops.split()]
    assert len(ops) == len(set(ops))


def test_a_size_that_opt_einsum_fixed_is_refused_with_how_to_switch_it_off() -> None:
    tokens = sympy.Symbol("s0", integer=True)
    guard = SimpleNamespace(expr=sympy.Eq(tokens, 7), sloc="x = einsum(…)  # model.py:3 (opt_einsum/contract.py:317)")
    extents: Any = SimpleNamespace(tokens=7, shape_env=SimpleNamespace(guards=[guard]))
    no_inputs: Any = SimpleNamespace(inputs=(), names={})
    refusal = why_static(extents, no_inputs)
    assert refusal.reason is Reason.TOKEN_COUNT
    assert "torch.backends.opt_einsum.enabled = False" in refusal.detail
