"""Memory that recurrences keep for their backward, as forecast, beside what the fakes of their ops return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite import torch_internals
from cp_rewrite.diagnose.target import Target
from cp_rewrite.ops.states import by_kernels
from cp_rewrite.planning.cost.memory import Needs
from cp_rewrite.planning.plan_input import STATES
from tests.helpers.recurrent_model import DIM, HEADS, TOKENS, VOCAB, WIDTH, packed

_ops: Any = torch.ops.cp_rewrite
ROW, CUT = HEADS * DIM, 2


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rows, self.out = nn.Linear(WIDTH, 3 * ROW + HEADS), nn.Linear(ROW, WIDTH)
        self.rate = nn.Parameter(-torch.ones(HEADS))

    def operands(self, h: Tensor) -> list[Tensor]:
        q, k, v, beta = self.rows(h).split([ROW] * 3 + [HEADS], -1)
        q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v))
        if self.kind == "ssd":
            return [v, F.softplus(beta), self.rate, q[:, :, :1], k[:, :, :1]]
        return [q, k, v, F.logsigmoid(q if self.kind == "kimi_delta" else beta), beta.sigmoid()]

    def forward(self, h: Tensor) -> Tensor:
        more = () if self.kind == "ssd" else (1.0, True)
        return h + self.out(getattr(_ops, self.kind)(*self.operands(h), None, *more).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers, self.checkpoints = nn.ModuleList(Layer(kind) for _ in range(2)), checkpoints

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpoints else layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="sum")


def forecast(model: Model, speeds: str) -> tuple[Target, Needs]:
    sharding = cp.Sharding(2, TOKENS, cp.CuSeqlens("cu_seqlens"), "contiguous", speeds=speeds, reset_states=True)
    target = cp.explain(model, sharding)(**packed((70, 70, 60))).target
    assert target is not None
    assert target.needs is not None
    return target, target.needs


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kimi_delta", "ssd"])
def test_what_recurrences_keep_is_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the layer's input, what the op is given and gives, what its forward solves, and states at cuts."""
    target, on_gpus = forecast(Model(kind), "h100")
    tokens = target.rows
    assert (tokens, target.cuts) == (100, CUT)
    monkeypatch.setattr(by_kernels, "runs_by_kernels", lambda *_: True)
    with torch_internals.FakeTensorMode():
        given = [x.detach() for x in Layer(kind).operands(torch.empty(1, tokens, WIDTH))]
        tables = [torch.empty(CUT, dtype=torch.int32) for _ in STATES]
        more = () if kind == "ssd" else (1.0, True)
        out, *states, kept_by_it = getattr(_ops, f"{kind}_on_pieces")(*given, tables, *more, "")
    solved = sum(x.numel() // tokens for x in kept_by_it[4:])  # behind q and k, in place of those given, and factors
    made = given[3:] if kind != "ssd" else given[1:2]  # the others are views of one product
    kept = WIDTH + 3 * ROW + HEADS + sum(x.numel() // tokens for x in (*made, out)) + solved
    assert [layer.kept for layer in on_gpus.layers] == [kept] * 2
    assert target.cuts * on_gpus.layers[0].states == sum(x.numel() * x.element_size() for x in states)
    _, on_cpus = forecast(Model(kind), "cpu")
    assert [layer.kept for layer in on_cpus.layers] == [kept - solved] * 2


def test_states_at_cuts_are_kept_or_made_again() -> None:
    target, needs = forecast(Model("gated_delta_rule"), "h100")
    again, checkpointed = forecast(Model("gated_delta_rule", checkpoints=True), "h100")
    assert checkpointed == needs.checkpointed()
    more = target.cuts * needs.layers[0].states
    for found, times in ((target, 2), (again, 1)):
        uncut = replace(found, cuts=0)
        assert found.memory is not None
        assert uncut.memory is not None
        assert found.memory.peak - uncut.memory.peak == times * more
