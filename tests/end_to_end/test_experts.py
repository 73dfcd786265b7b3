"""Mixtures of experts that dispatch tokens in each way that is written: one process's loss and gradients."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_rewrite as cp
from tests.end_to_end import test_models
from tests.helpers import models
from tests.helpers.one_process import check_or_refuse, compare
from tests.helpers.packed_model import WIDTH, PackedModel
from tests.helpers.pool import Pool

EXPERTS, EACH = 4, 2
Dispatch = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]
"""(model, tokens (N, C), weights (N, k), experts (N, k)) -> (N, C)"""


class Experts(PackedModel):
    """The packed model with experts, dispatched in several ways beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        if {*names} - {"masked", "counted"}:
            importlib.import_module("transformers.integrations.moe")  # which brings grouped products

    def extra(self) -> None:
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)
        self.load: Tensor
        self.register_buffer("load", torch.zeros(EXPERTS))

    def mix(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(EACH, -1)
        found = [DISPATCHES[name](self, x, weights, chosen) * (1 + i / 9) for i, name in enumerate(self.names)]
        return h + sum(found, x).view_as(h)

    def expert(self, x: Tensor, number: int) -> Tensor:
        return F.silu(x @ self.up[number]) @ self.down[number]

    def grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        """All experts at once; in fp64 torch's own product has no kernel."""
        product: Any = torch.ops.transformers.grouped_mm_fallback
        return product(F.silu(product(x, self.up, ends)), self.down, ends)


def masked(m: Experts, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return sum((m.expert(x, e) * ((c == e) * w).sum(-1, keepdim=True) for e in range(EXPERTS)), torch.zeros_like(x))


def chosen_by_where(m: Experts, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Each expert gets its tokens, as many as there happen to be."""
    out, mask = torch.zeros_like(x), F.one_hot(c, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        place, token = torch.where(mask[number])
        out.index_add_(0, token, m.expert(x[token], number) * w[token, place, None])
    return out


def by_sort(
    back: Callable[[Tensor, Tensor, Tensor], Tensor], pick: Callable[[Tensor, Tensor], Tensor] = lambda x, p: x[p]
) -> Dispatch:
    """Rows sorted by expert. back: (sorted rows, their places, tokens) -> tokens. pick: sorted rows."""

    def dispatch(m: Experts, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        keys, order = c.flatten().sort(stable=True)
        sizes = torch.histc(keys.to(x.dtype), bins=EXPERTS, min=0, max=EXPERTS - 1)
        rows = m.grouped(pick(x, order // EACH), sizes.cumsum(0, dtype=torch.int32))
        return back(rows * w.flatten()[order, None], order, x)

    return dispatch


def columns(places: Tensor, x: Tensor) -> Tensor:
    return places[:, None].expand(-1, x.shape[1])


def put(rows: Tensor, order: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(order.shape[0], x.shape[1], dtype=x.dtype)
    out[order] = rows
    return out.view(-1, EACH, x.shape[1]).sum(1)


def counted(m: Experts, x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As statistics of a router are kept, and used."""
    m.load.add_(torch.histc(c.flatten().to(x.dtype), bins=EXPERTS, min=0, max=EXPERTS))
    load = torch.histc(c.flatten().float(), EXPERTS, 0, EXPERTS) + F.one_hot(c, EXPERTS).sum((0, 1))
    return x * (load / load.sum()).to(x.dtype)[c].sum(-1, keepdim=True) + x * m.load.square().sum() / 999


DISPATCHES: dict[str, Dispatch] = {
    "masked": masked,
    "back_by_index": by_sort(lambda y, p, x: y[p.argsort()].view(-1, EACH, x.shape[1]).sum(1)),
    "back_by_put": by_sort(put),
    "back_by_index_add": by_sort(lambda y, p, x: torch.zeros_like(x).index_add(0, p // EACH, y)),
    "back_in_place": by_sort(lambda y, p, x: torch.zeros_like(x).index_add_(0, p // EACH, y)),
    "back_by_scatter": by_sort(lambda y, p, x: x.scatter_add(0, columns(p // EACH, x), y)),
    "gathered": by_sort(put, lambda x, p: x.gather(0, columns(p, x))),
    "index_select": by_sort(put, lambda x, p: x.index_select(0, p)),
    "counted": counted,
}


def test_experts_are_right() -> None:
    assert check_or_refuse(Experts([name for name in DISPATCHES if name != "counted"])) is None


@pytest.mark.slow
def test_counts_of_experts_are_right(pool: Pool) -> None:
    compare(pool, Experts, ["masked", "counted"], 2, "head_tail", 1, 13)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DISPATCHES if name != "counted"])  # threads share a buffer
@pytest.mark.parametrize("rows", [1, 2])
def test_every_dispatch_is_right(name: str, rows: int) -> None:
    assert check_or_refuse(Experts([name]), rows=rows) is None


BESIDE: dict[str, Dispatch] = {
    "chosen_by_where": chosen_by_where,
    "added_to_others": by_sort(lambda y, p, x: torch.zeros_like(x).index_add(0, (p // EACH).flip(0), y)),
    "added_by_order": by_sort(lambda y, p, x: torch.zeros_like(x).index_add(0, p.argsort() // EACH, y)),
    "largest": by_sort(lambda y, p, x: x.scatter_reduce(0, columns(p // EACH, x), y, "amax")),
    "wrong_divisor": by_sort(lambda y, p, x: torch.zeros_like(x).index_add(0, p // (EACH + 1), y)),
    "unsorted": by_sort(lambda y, p, x: torch.zeros_like(x).index_add(0, p // EACH, y * y.cumsum(0))),
    "places_as_values": by_sort(lambda y, p, x: torch.zeros_like(x).index_add(0, p // EACH, y * p[:, None])),
    "first_of_group": by_sort(put, lambda x, p: x[p] * (torch.arange(p.shape[0]) < 4)[:, None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_other_dispatches_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISPATCHES, "beside", BESIDE[name])
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    refused = check_or_refuse(Experts(["beside"]), rows=2)
    assert refused is not None
    assert "TOKEN_MIXING" in refused or "POSITION_GENERATOR" in refused


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "qwen2_moe_aux_loss", "olmoe_aux_loss", "gpt_oss", "deepseek_v3"]
)
def test_experts_of_transformers_by_batched_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = models.RECIPES[name]
    options = {**recipe.options, "experts_implementation": "batched_mm"}
    monkeypatch.setitem(models.RECIPES, name, dataclasses.replace(recipe, options=options))
    torch._dynamo.reset()
    packing = test_models.packing_of(name)
    model, sharding = models.build_model(name), cp.Sharding(2, test_models.TOKENS, packing, across_documents=True)
    report = cp.check(model, sharding, test_models.batch_of(test_models.LENGTHS), shift_labels=True)
    assert max(report.gradients.values()) <= 1e-5
    assert report.outputs["loss"] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe_aux_loss", "olmoe_aux_loss"])
def test_logits_of_routers_come_out_of_checkpoints(name: str, called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = models.RECIPES[name.replace("qwen3_moe_aux_loss", "qwen2_moe_aux_loss")]
    options = {**recipe.options, "experts_implementation": "batched_mm", "output_hidden_states": called}
    family = "Qwen3Moe" if name.startswith("qwen3") else recipe.family
    monkeypatch.setitem(models.RECIPES, name, dataclasses.replace(recipe, family=family, options=options))
    torch._dynamo.reset()
    model: Any = models.build_model(name, called).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    report = cp.check(
        model,
        cp.Sharding(2, test_models.TOKENS, test_models.packing_of(name)),
        test_models.batch_of(test_models.LENGTHS),
        shift_labels=True,
    )
    assert report.largest <= 1e-5
