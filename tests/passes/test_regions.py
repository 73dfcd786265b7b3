"""Where attention hides: checkpointed and nested regions, contexts, autocast, many masks, blocks compiled alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.end_to_end.test_models import difference
from tests.helpers.models import Titan, build_model
from tests.helpers.pool import Pool

LENGTHS = [[13, 1, 7, 29, 31]]


class Checkpointed(Titan):  # pyright: ignore[reportUntypedBaseClass]
    """Every block is recomputed in the backward; its mask comes from outside."""

    def block(self, layer: Any, h: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(super().block, layer, h, freqs_cis, mask, use_reentrant=False)  # type: ignore[return-value]


class Nested(Titan):  # pyright: ignore[reportUntypedBaseClass]
    """Blocks are calls of one region, which is compiled once. No rotary: torch's regions take no complex tensors."""

    def attention(self, layer: Any, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer[w](x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for w in ("wq", "wk", "wv"))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return layer["wo"](out.transpose(1, 2).flatten(2))

    @torch.compiler.nested_compile_region
    def region(self, layer: Any, h: Tensor, mask: Tensor) -> Tensor:
        return Titan.block(self, layer, h, h, mask)

    def block(self, layer: Any, h: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        return self.region(layer, h, mask)  # pyright: ignore[reportCallIssue]


class OnlyAttention(Nested):  # pyright: ignore[reportUntypedBaseClass]
    """A region that returns what attention returns."""

    @torch.compiler.nested_compile_region
    def only(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def attention(self, layer: Any, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer[w](x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for w in ("wq", "wk", "wv"))
        out: Tensor = self.only(q, k, v, mask)  # pyright: ignore[reportCallIssue]
        return layer["wo"](out.transpose(1, 2).flatten(2))

    def block(self, layer: Any, h: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        return Titan.block(self, layer, h, h, mask)


class Both(Nested):  # pyright: ignore[reportUntypedBaseClass]
    """Checkpointed regions."""

    def region(self, layer: Any, h: Tensor, mask: Tensor) -> Tensor:
        run = functools.partial(Titan.block, self)
        return checkpoint(run, layer, h, h, mask, use_reentrant=False)  # type: ignore[return-value]


class Contexts(Titan):  # pyright: ignore[reportUntypedBaseClass]
    """Attention inside `sdpa_kernel`."""

    def attention(self, layer: Any, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
            return super().attention(layer, x, freqs_cis, mask)


class Autocast(Titan):  # pyright: ignore[reportUntypedBaseClass]
    """Blocks in bf16."""

    def block(self, layer: Any, h: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().block(layer, h, freqs_cis, mask).float()


class Windows(Titan):  # pyright: ignore[reportUntypedBaseClass]
    """Three masks: each layer its own window."""

    def block(self, layer: Any, h: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        index = torch.arange(h.shape[1])
        window = 4 + 5 * list(self.layers.values()).index(layer)
        return super().block(layer, h, freqs_cis, mask & (index[:, None] - index < window))


CASES: dict[str, type[nn.Module]] = {
    "checkpointed": Checkpointed,
    "nested": Nested,
    "nested, only attention": OnlyAttention,
    "nested, checkpointed": Both,
    "sdpa_kernel": Contexts,
    "autocast": Autocast,
    "windows": Windows,
    "dynamic": Titan,
}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def build(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case]()


def sharded(mesh: DeviceMesh, case: str, inner: Any) -> tuple[float, dict[str, Tensor]]:
    torch._dynamo.reset()
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner=inner)
    model = build(case)
    compiled = torch.compile(
        model, backend=cp.backend(sharding), fullgraph=True, dynamic=True if case == "dynamic" else None
    )
    with sharding.shard(make_batch(LENGTHS), shift_labels=True) as local:
        loss: Tensor = compiled(**local).loss
    grads = gradients(model, loss)
    cp.sum_gradients(model.parameters(), sharding)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=sharding.group)
    return float(total), grads


@pytest.mark.parametrize(
    ("case", "inner"),
    [
        ("sdpa_kernel", "eager"),
        ("windows", "eager"),
        # Ahead-of-time compilation matters to what a region keeps and returns.
        *(pytest.param(case, "aot_eager", marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_attention_is_found_and_right_wherever_it_hides(pool: Pool, case: str, inner: str) -> None:
    model = build(case)
    expected: Tensor = model(**make_batch(LENGTHS)).loss
    grads = gradients(model, expected)
    limit = 2e-2 if case == "autocast" else 1e-5  # two roundings to bf16 in another order
    for loss, found in pool.run(2, sharded, case, inner):
        assert abs(loss - float(expected.detach())) <= limit * float(expected.detach())
        assert found.keys() == grads.keys()
        assert max(difference(found[name], grad, grads) for name, grad in grads.items()) <= limit


def test_a_checkpointed_exchange_is_recomputed_not_kept() -> None:
    """The gathered rows of a region are no output of it."""
    report = cp.explain(Checkpointed(), cp.Sharding(2, TOKENS, cp.PositionIds("position_ids")), shift_labels=True)(
        **make_batch(LENGTHS)
    )
    assert report.ok
    assert report.ops_after["cp_rewrite.exchange_rows"] == 2
    assert report.ops_after["tag_activation_checkpoint"] == 2


def per_block(mesh: DeviceMesh, lie: bool) -> tuple[float, dict[str, Tensor]] | str:
    """A transformers model whose layers are compiled one by one: their masks come in as tensors."""
    torch._dynamo.reset()
    sharding = cp.Sharding(
        mesh,
        {"input_ids": 1, "position_ids": 1, "labels": 1},
        cp.PositionIds("position_ids"),
        inner="eager" if lie else "aot_eager",
        assume_mask=cp.PackedMask(causal=not lie),
        block_tokens={"hidden_states": 1, "position_embeddings[0]": 1, "position_embeddings[1]": 1},
    )
    model: Any = build_model("llama")
    for layer in model.model.layers:
        layer.compile(backend=cp.backend(sharding), fullgraph=True, dynamic=True)
    try:
        with sharding.shard(make_batch(LENGTHS), shift_labels=True) as local:
            loss: Tensor = model(**local).loss
            grads = gradients(model, loss)
    except cp.MaskMismatch as error:
        return str(error)
    cp.sum_gradients(model.parameters(), sharding)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=sharding.group)
    return float(total), grads


@pytest.mark.slow
def test_layers_compiled_one_by_one_with_an_assumed_mask(pool: Pool) -> None:
    model = build_model("llama")
    expected: Tensor = model(**make_batch(LENGTHS)).loss
    grads = gradients(model, expected)
    for result in pool.run(2, per_block, False):
        assert not isinstance(result, str), result
        loss, found = result
        assert abs(loss - float(expected.detach())) <= 1e-5 * float(expected.detach())
        assert max(difference(found[name], grad, grads) for name, grad in grads.items()) <= 1e-5


def test_a_wrongly_assumed_mask_raises_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, per_block, True)
    assert first == second
    assert "assumed to be 'same document & full'" in first


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, "'longrope'"),
        ({"type": "su"}, "'su'"),
        ({"rope_type": "yarn", "factor": 2.0}, None),
    ],
)
def test_a_rope_that_is_chosen_by_length_is_refused_outside_of_blocks(rope: Any, refused: str | None) -> None:
    torch._dynamo.reset()
    blocks = {"hidden_states": 1, "position_embeddings[0]": 1, "position_embeddings[1]": 1}
    sharding = cp.Sharding(
        1, TOKENS, cp.PositionIds("position_ids"), inner="eager", assume_mask=cp.PackedMask(), block_tokens=blocks
    )
    model: Any = build_model("llama")
    model.config.rope_parameters = rope
    for layer in model.model.layers:
        layer.compile(backend=cp.backend(sharding), fullgraph=True, dynamic=True)
    with sharding.shard(make_batch(LENGTHS), shift_labels=True) as local:
        if refused is None:
            model(**local)
        else:
            with pytest.raises(cp.RewriteRefused, match=f"TOKEN_COUNT.*rope_type {refused}"):
                model(**local)
