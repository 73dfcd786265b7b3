"""flash-attn's functions, by hand and by transformers: read as the operators they call. A stand-in takes its place."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason, Refusal
from cp_rewrite.passes.capture.attention import part_flash_attn
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from cp_rewrite.passes.values.state import Site
from tests.helpers import flash_attn_stand_in as flash
from tests.helpers.pool import Pool
from tests.passes.mask_spellings import capture

from .test_match_varlen import LENGTHS, Attend, Model, annotate, make_batch

Window = tuple[int, int]


def varlen(call: Any = flash.flash_attn_varlen_func, size: int = 8, **how: Any) -> Attend:
    """`size`: the head dim of queries and keys, of up to 8."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Window) -> Any:
        q, k, v = (x[..., :size] for x in (q, k, v))
        out = call(q, k, v, cu, cu.clone(), 64, 64, causal=window[1] == 0, window_size=window, **how)
        return nn.functional.pad(out, (0, 8 - size))

    return attend


def rows(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Window) -> Tensor:
    return flash.flash_attn_func(q[None], k[None], v[None], causal=window[1] == 0, window_size=window)[0]


def found(attend: Attend, window: Window = (-1, 0), capacity: Any = None, **more: Tensor) -> list[Site | Refusal]:
    sharding = annotate(2, capacity=capacity)
    gm = capture(Model(attend, window), {**make_batch(), **more}, dynamic=None)
    part_flash_attn(gm)
    gm.graph.lint()
    matched = match_sites(gm, sharding, TokenAxis.read(gm, sharding).unified())
    return [*matched.sites, *matched.refusals]


@pytest.mark.parametrize(
    ("attend", "window", "expected", "softcap"),
    [
        (varlen(softcap=3.0, size=6), (6, 0), PackedMask(window=(6, 0)), 3.0),
        (rows, (4, 3), PackedMask(causal=False, window=(4, 3), packed=False), 0.0),
        pytest.param(varlen(flash.flash_attn_3_varlen_func), (-1, 0), PackedMask(), 0.0, marks=pytest.mark.slow),
        pytest.param(varlen(), (-1, -1), PackedMask(causal=False), 0.0, marks=pytest.mark.slow),
    ],
)
def test_windows(attend: Attend, window: Window, expected: PackedMask, softcap: float) -> None:
    sites = found(attend, window)
    assert [(site.mask, site.softcap) for site in sites if isinstance(site, Site)] == [(expected, softcap)] * 2, sites


def other_keys(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Window) -> Any:
    return flash.flash_attn_varlen_func(q, k, v, cu, cu + 1, 64, 64, causal=True)


def with_weights(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Window) -> Any:
    out, lse, _ = flash.flash_attn_varlen_func(q, k, v, cu, cu.clone(), 64, 64, return_attn_probs=True)
    return out * lse.t()[..., None]


class Otherwise(flash.FlashAttnVarlenFunc):
    """Its backward has another window than its forward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = flash.FlashAttnVarlenFunc.forward(ctx, *args)
        ctx.how = (*ctx.how[:3], 5, *ctx.how[4:])
        return out


def other_backward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Window) -> Any:
    how = 0.0, None, True, (3, 3), 0.0, None, False, False, None, True
    return Otherwise.apply(q, k, v, cu, cu.clone(), 64, 64, *how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (varlen(dropout_p=0.1), Reason.DROPOUT),
        (varlen(alibi_slopes=torch.ones(4)), Reason.KERNEL),
        (varlen(flash.flash_attn_3_varlen_func, attention_chunk=4), Reason.KERNEL),
        (other_keys, Reason.MASK_WRONG_SOURCE),
        (with_weights, Reason.KERNEL),
        (other_backward, Reason.NESTED_REGION),
    ],
)
def test_refusals(attend: Attend, reason: Reason) -> None:
    assert {f.reason for f in found(attend) if isinstance(f, Refusal)} == {reason}


class TwoOffsets(Model):  # pyright: ignore[reportUntypedBaseClass]
    """Takes offsets of keys of their own, as transformers' models do."""

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor, other: Tensor | None = None) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: Window) -> Any:
            return flash.flash_attn_varlen_func(q, k, v, cu, other, 64, 64, causal=True)

        self.attend = attend
        return super().forward(input_ids, cu_seqlens, labels)


def test_offsets_of_keys_are_compared_with_those_of_queries() -> None:
    batch = make_batch()
    same, others = batch["cu_seqlens"].clone(), batch["cu_seqlens"] + torch.tensor([0, 1, 0, 0, 0, 0])
    compiled = torch.compile(TwoOffsets(), backend=cp.backend(annotate(1, inner="eager")), fullgraph=True)
    with annotate(1, inner="eager").shard(batch) as local:
        compiled(**local, other=same)
        with pytest.raises(ValueError, match="are not those of the batch"):
            compiled(**local, other=others.int())


def transformer(name: str) -> nn.Module:
    """In fp64: in fp32 transformers warns of a cast, which can't be traced."""
    transformers: Any = importlib.import_module("transformers")
    flash.take_place_for_transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128}
    if name == "Gemma2":
        sizes["sliding_window"] = 7
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False, attn_implementation="flash_attention_2")
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def flattened() -> dict[str, Any]:
    collate: Any = importlib.import_module("transformers").DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ids = torch.randint(0, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": part.tolist()} for part in ids.split(LENGTHS)]
    return dict(collate(rows))


def step(model: nn.Module, loss: Tensor, *sync: Any) -> dict[str, Tensor]:
    loss.backward()
    if sync:
        cp.sum_gradients(model.parameters(), *sync)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_of_rank(mesh: DeviceMesh, name: str) -> tuple[float, dict[str, Tensor]]:
    tokens = {"input_ids": 1, "labels": 1, "position_ids": 1}
    sharding = cp.Sharding(mesh, tokens, cp.CuSeqlens("cu_seq_lens_q"), inner="aot_eager")
    model = transformer(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(flattened(), shift_labels=True) as local:
        loss = compiled(**local).loss
    grads = step(model, loss, sharding)
    torch.distributed.all_reduce(total := loss.detach().clone(), group=sharding.group)
    return total.item(), grads


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_flash_attention_2_of_transformers_equals_one_process(pool: Pool, name: str) -> None:
    model = transformer(name)
    loss: Tensor = model(**flattened()).loss
    grads = step(model, loss)
    for total, theirs in pool.run(2, step_of_rank, name):
        assert total == pytest.approx(loss.item(), rel=1e-6)  # in fp32, as rotary angles and Gemma's norms are
        assert theirs.keys() == grads.keys()
        for key, grad in grads.items():
            assert float((theirs[key] - grad).norm() / grad.norm()) <= 1e-6, key


@pytest.mark.slow
def test_a_model_that_decides_by_positions_is_told_what_to_do() -> None:
    batch = {name: value for name, value in flattened().items() if name in ("input_ids", "labels", "position_ids")}
    sharding = cp.Sharding(2, dict[str, int].fromkeys(batch, 1), cp.PositionIds("position_ids"))
    with pytest.raises(Exception, match="Data-dependent") as caught:
        cp.explain(transformer("Llama"), sharding, shift_labels=True)(**batch)
    assert any("attn_implementation='sdpa'" in note for note in caught.value.__notes__)


def by_hand(mesh: DeviceMesh | None, three: bool) -> tuple[float, dict[str, Tensor]]:
    call = flash.flash_attn_3_varlen_func if three else flash.flash_attn_varlen_func
    model = Model(varlen(call, 6, softcap=2.0), (9, 0)).double()
    if mesh is None:
        loss = model(**make_batch())
        return loss.item(), step(model, loss)
    sharding = annotate(mesh, inner="aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(make_batch()) as local:
        loss = compiled(**local)
    grads = step(model, loss, sharding)
    torch.distributed.all_reduce(total := loss.detach().clone(), group=sharding.group)
    return total.item(), grads


@pytest.mark.slow
@pytest.mark.parametrize("three", [False, True])
def test_functions_called_by_hand_equal_one_process(pool: Pool, three: bool) -> None:
    loss, grads = by_hand(None, three)
    for total, theirs in pool.run(2, by_hand, three):
        assert total == pytest.approx(loss, rel=1e-12)
        for key, grad in grads.items():
            assert float((theirs[key] - grad).norm() / grad.norm()) <= 1e-12, key
