"""Logits that a model returns beside its loss cost nothing unless they are read, and are right where they are."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.stand_in import StandIn
from cp_rewrite.calls.left_out import as_given
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import RECIPES, SMALL
from tests.helpers.one_process import assert_gradients
from tests.helpers.peak import peak_bytes
from tests.helpers.pool import Pool

from .test_parallelize import gradients

ROWS = [[40, 1, 30, 57]]
VOCAB = 16_384
MODELS = ("llama", "gpt2", "qwen3_moe", "gemma2")
DOORS: dict[str, Callable[..., Any]] = {
    "parallelize": lambda model, mesh, sharding: cp.parallelize(model, mesh, sharding),
    "ddp": lambda model, mesh, sharding: cp.parallelize(model, mesh, sharding, data_parallel="ddp"),
    "backend": lambda model, mesh, sharding: torch.compile(model, backend=cp.backend(sharding), fullgraph=True),
}


def with_large_head(name: str) -> nn.Module:
    """A causal language model whose logits weigh most; gemma2 caps them."""
    transformers: Any = importlib.import_module("transformers")
    recipe = RECIPES[name]
    torch.manual_seed(0)
    sizes = {**SMALL, **recipe.options, "vocab_size": VOCAB, "attn_implementation": "sdpa"}
    sizes |= {"final_logit_softcapping": 30.0} if name == "gemma2" else {}
    config = getattr(transformers, f"{recipe.family}Config")(**sizes)
    model = getattr(transformers, recipe.family + recipe.head)(config)
    model.loss_type = "ForCausalLM"  # of GPT-2 it would warn, which can't be traced
    return model


class LossAlone(nn.Module):
    """The same model, changed by hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return {"loss": self.model(**batch).loss}


def batch_of(rows: Any = ROWS) -> dict[str, Tensor]:
    batch = make_batch(rows)
    return {name: value for name, value in batch.items() if name in TOKENS}


def annotate(mesh: DeviceMesh, tile: Any = 16, **options: Any) -> cp.Sharding:
    torch._dynamo.reset()
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager", tile=tile, **options)


def step_bytes(mesh: DeviceMesh, name: str, wrapped: bool, tile: Any = 16) -> tuple[int, float, dict[str, Tensor]]:
    """The peak of the second step's forward and backward, beside what was there; its loss and gradients."""
    sharding, plain = annotate(mesh, tile), with_large_head(name)
    model = cp.parallelize(LossAlone(plain) if wrapped else plain, mesh, sharding)
    losses: list[float] = []

    def step() -> None:
        with sharding.shard(batch_of(), shift_labels=True) as local:
            loss = model(**local)["loss"]
        loss.backward()
        losses.append(loss.item())

    step()
    model.zero_grad()
    return peak_bytes(step), losses[-1], gradients(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_takes_what_a_wrapped_one_does(pair: Pool, name: str) -> None:
    """Forward and backward; gradients are the same."""
    found = pair.run(2, step_bytes, name, False)
    wrapped = pair.run(2, step_bytes, name, True)
    for (taken, loss, grads), (least, their_loss, theirs) in zip(found, wrapped, strict=True):
        assert taken <= 1.2 * least
        assert loss == pytest.approx(their_loss, rel=1e-6)
        assert_gradients(grads, theirs, 1e-6)


def read_logits(mesh: DeviceMesh, door: str) -> dict[str, Any]:
    """Results for a caller of an unmodified model who reads logits: before and after the backward, after a step, in an
    evaluation, and with a loss of them."""
    sharding, plain, alone = annotate(mesh), with_large_head("llama"), with_large_head("llama")
    model = DOORS[door](plain, mesh, sharding)
    found: dict[str, Any] = {}

    def outputs() -> Any:
        with sharding.shard(batch_of(), shift_labels=True) as local:
            return model(**local)

    out = outputs()
    found["kind"] = type(out.logits)
    found["error"] = float((sharding.unshard(out.logits, 1) - alone(**batch_of()).logits).abs().max())
    found["gradient"] = error_of(lambda: (out.loss + out.logits.square().mean()).backward())
    model.zero_grad()
    out = outputs()
    out.loss.backward()
    found["after the backward"] = error_of(lambda: out.logits.sum())
    out = outputs()
    if door == "backend":
        cp.sum_gradients(plain.parameters(), sharding)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found["after a step"] = error_of(lambda: out.logits.sum())
    with torch.no_grad():
        found["evaluation"] = outputs().logits.isfinite().all().item()
        if door != "backend":
            found["plain"] = type(model(**batch_of()).logits)
    return found


def evaluated_logits(mesh: DeviceMesh, autograd_off: Callable[[], Any], head_apart: bool) -> list[float]:
    """Largest errors of logits of a model that is evaluated alone, read in a batch's block, for several lengths.
    head_apart: the head is a block, whose weights are dropped behind it."""
    sharding, alone = annotate(mesh), with_large_head("llama")
    plain: Any = with_large_head("llama")
    blocks = [*plain.model.layers, plain.lm_head] if head_apart else None
    model, errors = cp.parallelize(plain, mesh, sharding, blocks=blocks).eval(), list[float]()
    for rows in ([[40, 1, 30, 57]], [[20, 9]], [[40, 1, 30, 57]]):
        with autograd_off(), sharding.shard(batch_of(rows), shift_labels=True) as local:
            out = model(**local)
            assert type(out.logits) is StandIn
            errors.append(float((sharding.unshard(out.logits, 1) - alone(**batch_of(rows)).logits).abs().max()))
        assert out.logits.isfinite().all(), "they are there behind the block too"
    return errors


@pytest.mark.parametrize(("autograd_off", "head_apart"), [(torch.no_grad, True), (torch.inference_mode, False)])
def test_logits_of_an_evaluation_are_read_under_fsdp(
    pair: Pool, autograd_off: Callable[[], Any], head_apart: bool
) -> None:
    """Its weights are shards again when the call ends, since no backward follows."""
    assert all(error < 1e-4 for found in pair.run(2, evaluated_logits, autograd_off, head_apart) for error in found)


def stand_in(trained: bool = True) -> StandIn:
    """A stand-in of 8 numbers, which a product makes."""
    left, right = torch.arange(1.0, 5).view(4, 1) / 3, torch.tensor([[1.0, 0.1]])
    return StandIn.of((2, 4), torch.float32, left.device, trained, lambda: (left @ right).t())


@pytest.mark.parametrize("trained", [True, False])
def test_a_stand_in_is_what_it_stands_for(trained: bool) -> None:
    """Described without its numbers; shown, stored, compiled, written to and first read in any mode with them."""
    value = stand_in(trained).value().detach()
    made = stand_in(trained)
    assert (made.shape, made.dtype, len(made), made.requires_grad) == ((2, 4), torch.float32, 2, trained)
    assert made is not None
    assert made._value is None
    assert repr(made.detach()) == repr(value)
    assert pickle.loads(pickle.dumps(stand_in(trained).detach())).equal(value)
    assert copy.deepcopy(stand_in(False)).equal(value)
    torch._dynamo.reset()
    assert torch.compile(lambda x: x.square() + len(x), backend="eager")(stand_in(trained)).equal(value.square() + 2)
    written = stand_in(trained)
    written += 1
    written[0, 0] = 7
    assert written[1].equal(value[1] + 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert stand_in(trained).detach().equal(value)
    seen = stand_in(trained)
    with torch.inference_mode():
        assert seen.argmax().item() == 3
    assert seen.square().requires_grad == trained


class Both(torch.autograd.Function):
    """Hands on what it is given, as DDP does with all outputs where it looks for unused weights."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def test_only_a_gradient_that_is_there_raises() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss, logits = Both.apply(weight.square().sum(), stand_in())  # type: ignore[misc]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.equal(2 * torch.ones(3))
    assert "keep_outputs=True" in error_of(lambda: logits.sum().backward())


@pytest.mark.parametrize("write", ["counted", "data", "fused"])
def test_all_writes_to_a_weight_are_seen(write: str) -> None:
    """torch counts the first kind alone."""
    weight = nn.Parameter(torch.randn(8, 4))
    weight.grad = torch.randn(8, 4)
    read = as_given(weight)
    assert read() is weight
    if write == "data":
        weight.data.add_(1e-3)
    else:
        torch.optim.AdamW([weight], lr=1e-4, fused=write == "fused").step()
    assert "was changed since" in error_of(read)
    weight.untyped_storage().resize_(0)  # as FSDP does
    assert "shards again" in error_of(read)


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("door", [*DOORS])
def test_who_reads_logits_gets_right_ones(pair: Pool, door: str) -> None:
    """Logits are those of this rank's tokens; a gradient that comes to them, or weights that are gone, raise."""
    for found in pair.run(2, read_logits, door):
        assert found["kind"] is StandIn
        assert found["error"] < 1e-5
        assert "keep_outputs=True" in found["gradient"]
        assert ("shards again" in found["after the backward"]) == (door == "parallelize")
        assert ("was changed since" in found["after a step"]) == (door != "parallelize")
        assert found["evaluation"]
        assert found.get("plain") is not StandIn
