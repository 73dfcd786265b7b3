"""`nn.MultiheadAttention`, alone and in torch's encoders, against one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason
from tests.helpers.matching import BATCH
from tests.helpers.pool import Pool
from tests.passes.mask_spellings import DOCUMENTS

NAMES = ("input_ids", "doc_ids")
BOTH = {name: BATCH[name] for name in NAMES}


class Model(nn.Module):
    """`call(attention, x, hidden)`: hidden is true where a token of another document or to the right stands."""

    def __init__(self, call: Any, attention: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.attention, self.call = nn.Embedding(64, 16), attention, call
        for weight in attention.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, **b: Tensor) -> Tensor:
        ids = b["doc_ids"]
        tokens = ids.shape[1]
        hidden = (ids[:, :, None] != ids[:, None]) | torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        return self.call(self.attention, self.table(b["input_ids"]), hidden)


def module(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(16, 4, batch_first=True, **options)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)


def triangle(x: Tensor, diagonal: int = 1) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), -math.inf).triu(diagonal)


def documents(attention: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    return attention(x, x, x, attn_mask=hidden.repeat_interleave(4, 0))[0]


def causal(attention: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return attention(x, x, x, need_weights=False, attn_mask=triangle(x), is_causal=True)[0]


def one_more(attention: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return attention(x, x, x, need_weights=False, attn_mask=triangle(x, 2))[0]


def two_sources(attention: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return attention(x, x.tanh(), x.sin(), need_weights=False, attn_mask=triangle(x) < 0)[0]


def one_row(attention: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    return attention(x[0], x[0], x[0], need_weights=False, attn_mask=hidden[0])[0][None]


def encoder(attention: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    return attention(x, mask=hidden.repeat_interleave(4, 0), is_causal=False)


WHOLE = PackedMask(packed=False)
ANNOTATED = cp.Sharding(2, dict.fromkeys(NAMES, 1), DOCUMENTS, across_documents=True)
CASES = [
    (documents, module(), PackedMask()),
    (causal, module(bias=False), WHOLE),
    (one_more, module(), PackedMask(False, (None, 1), packed=False)),
    (two_sources, module(kdim=16, vdim=16), WHOLE),
    (two_sources, nn.MultiheadAttention(16, 2, batch_first=True), WHOLE),
    (one_row, module(), PackedMask()),
    (encoder, nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), PackedMask()),
]


def rows_of(call: Any) -> dict[str, Tensor]:
    return {name: value[:1] if call is one_row else value for name, value in BOTH.items()}


def run(model: Model, sharding: cp.Sharding) -> Tensor:
    """The output in global order, after a backward whose gradients are summed."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(rows_of(model.call)) as local:
        out = compiled(**local)
        (out.sin() * local.has_token[..., None]).sum().backward()
    cp.sum_gradients(model.parameters(), sharding)
    return sharding.unshard(out, 1).detach()


def assert_as_on_one_process(model: Model, out: Tensor, grads: dict[str, Tensor]) -> None:
    model.zero_grad()
    expected = model(**rows_of(model.call))
    expected.sin().sum().backward()
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(grads[name], weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("call", "attention", "means"), CASES)
def test_modules_are_read(call: Any, attention: nn.Module, means: PackedMask) -> None:
    torch._dynamo.reset()
    report = cp.explain(Model(call, attention), ANNOTATED)(**rows_of(call))
    assert report.ok, str(report)
    assert {site.mask for site in report.sites} == {str(means)}


@pytest.mark.slow
@pytest.mark.parametrize(("call", "attention", "means"), CASES)
def test_modules_give_what_they_gave(call: Any, attention: nn.Module, means: PackedMask) -> None:
    model = Model(call, attention)
    out = run(
        model,
        replace(ANNOTATED, mesh=1, inner="eager", verify="first_step"),
    )
    assert_as_on_one_process(model, out, {name: p.grad.clone() for name, p in model.named_parameters()})


def encoder_of_rank(mesh: DeviceMesh) -> Any:
    call, attention, _ = CASES[-1]
    model = Model(call, attention)
    out = run(model, replace(ANNOTATED, mesh=mesh, inner="eager"))
    return out, {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.slow
def test_an_encoder_on_two_ranks(pool: Pool) -> None:
    call, attention, _ = CASES[-1]
    for out, grads in pool.run(2, encoder_of_rank):
        assert_as_on_one_process(Model(call, attention), out, grads)


def weights_read(attention: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    out, weights = attention(x, x, x)
    return out * weights.amax()


def in_autocast(attention: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return causal(attention, x, _)


@pytest.mark.parametrize(
    ("call", "attention", "reason"),
    [
        (weights_read, module(), Reason.UNREAD_ATTENTION),
        (causal, module(add_bias_kv=True), Reason.UNREAD_ATTENTION),
        (causal, module(add_zero_attn=True), Reason.UNREAD_ATTENTION),
        (in_autocast, module(), Reason.UNREAD_ATTENTION),
        (causal, module(dropout=0.1), Reason.DROPOUT),
    ],
)
def test_other_modules_are_refused(call: Any, attention: nn.Module, reason: Reason) -> None:
    torch._dynamo.reset()
    report = cp.explain(Model(call, attention), ANNOTATED)(**BOTH)
    assert {refusal.reason for refusal in report.refusals} == {reason}


def test_padding_of_keys() -> None:
    """Rows of one document each, told by a mask of padding that is true where keys are hidden."""

    def model(attention: nn.Module, **b: Tensor) -> Tensor:
        x = table(b["input_ids"])
        return attention(x, x, x, key_padding_mask=b["mask"] == 0, need_weights=False)[0]

    table, attention = nn.Embedding(64, 16), module()
    mask = torch.ones_like(BATCH["input_ids"])
    mask[0, 7:] = 0
    sharding = cp.Sharding(2, {"input_ids": 1, "mask": 1}, cp.PaddingMask("mask"))
    torch._dynamo.reset()
    report = cp.explain(lambda **b: model(attention, **b), sharding)(input_ids=BATCH["input_ids"], mask=mask)
    assert [site.mask for site in report.sites] == ["same document & full"], str(report)
