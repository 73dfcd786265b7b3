"""Attention nodes: every way to call them, grouped heads, nested regions, transformers models; and every refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason, Refusal
from cp_rewrite.passes.match import match_sites
from cp_rewrite.passes.sites import Site
from cp_rewrite.passes.sources import argument_names
from tests.mask_spellings import DOCUMENTS, POSITIONS, annotate, capture, ids_equal_and_index, make_batch

BATCH = make_batch([[5, 3, 4], [5, 1, 6]])
PACKED = ids_equal_and_index
Model = Callable[..., Any]


def heads(batch: dict[str, Tensor], count: int = 2) -> Tensor:
    return batch["input_ids"][:, None, :, None].float().expand(-1, count, -1, 4) * 1.0


def match_model(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> list[Site | Refusal]:
    batch = options.pop("batch", BATCH)
    gm = capture(model, batch, **options)
    sites, refusals = match_sites(gm, sharding or annotate(DOCUMENTS), argument_names(gm))
    return [*sites, *refusals]


def the_site(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> Site:
    (site,) = match_model(model, sharding, **options)
    assert isinstance(site, Site), site
    return site


def reasons(model: Model, sharding: cp.Sharding | None = None, **options: Any) -> set[Reason]:
    found = match_model(model, sharding, **options)
    assert all(isinstance(f, Refusal) for f in found)
    return {f.reason for f in found if isinstance(f, Refusal)}


# -- how attention is called ---------------------------------------------------------------------------------


def test_positional_arguments() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        return F.scaled_dot_product_attention(x, x, x, PACKED(**b), 0.0, False)

    site = the_site(model)
    assert site.mask == PackedMask()
    assert site.mask_node is not None
    assert site.scale is None


def test_keyword_arguments_and_scale() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        return F.scaled_dot_product_attention(query=x, key=x * 2, value=x * 3, scale=0.25, attn_mask=PACKED(**b))

    for dynamic in (True, False):
        site = the_site(model, dynamic=dynamic)
        assert site.scale == 0.25
        assert len({site.query, site.key, site.value}) == 3


def test_is_causal_and_no_mask_see_the_whole_row() -> None:
    def causal(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)] * 3, is_causal=True)

    def full(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)] * 3)

    assert the_site(causal).mask == PackedMask(packed=False)
    assert the_site(full).mask == PackedMask(causal=False, packed=False)
    assert the_site(full).mask_node is None


def test_one_mask_feeds_all_layers() -> None:
    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), PACKED(**b)
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    sites = match_model(model)
    assert len(sites) == 3
    assert {s.mask for s in sites if isinstance(s, Site)} == {PackedMask()}


def test_two_masks_in_one_model() -> None:
    def model(**b: Tensor) -> Tensor:
        x, i = heads(b), torch.arange(b["input_ids"].shape[1])
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=PACKED(**b))
        return F.scaled_dot_product_attention(x, x, x, attn_mask=PACKED(**b) & (i[:, None] - i[None] < 3))

    assert [s.mask for s in match_model(model) if isinstance(s, Site)] == [PackedMask(), PackedMask(window=(2, 0))]


def test_a_mask_changed_between_layers_is_two_masks() -> None:
    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), torch.where(PACKED(**b), 0.0, -1e9)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        i = torch.arange(b["input_ids"].shape[1])
        mask.masked_fill_(i[:, None] - i[None] >= 3, -1e9)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    assert [s.mask for s in match_model(model) if isinstance(s, Site)] == [PackedMask(), PackedMask(window=(2, 0))]


def test_weights_added_in_place_are_seen() -> None:
    class Biased(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(1))

        def forward(self, **b: Tensor) -> Tensor:
            with torch.no_grad():
                mask = torch.where(PACKED(**b), 0.0, -1e9)
                mask.add_(self.bias)
            return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=mask)

    assert reasons(Biased()) == {Reason.MASK_OPAQUE}


# -- grouped heads -------------------------------------------------------------------------------------------


def grouped(expand: Callable[[Tensor], Tensor], **options: Any) -> Model:
    def model(**b: Tensor) -> Tensor:
        k, v = heads(b, 2) + 1.0, heads(b, 2) - 1.0
        return F.scaled_dot_product_attention(heads(b, 6), expand(k), expand(v), attn_mask=PACKED(**b), **options)

    return model


def expand_reshape(x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, 3, t, d).reshape(b, h * 3, t, d)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "expand", [expand_reshape, lambda x: x.repeat_interleave(3, dim=1), lambda x: torch.repeat_interleave(x, 3, 1)]
)
def test_expanded_heads_are_taken_back(expand: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    site = the_site(grouped(expand), dynamic=dynamic)
    assert (site.key.name, site.value.name) == ("k", "v")
    assert site.key.meta["example_value"].shape[1] == 2


def test_multi_query_head_is_taken_back() -> None:
    def model(**b: Tensor) -> Tensor:
        k = heads(b, 1) + 1.0
        return F.scaled_dot_product_attention(heads(b, 6), *[k.expand(-1, 6, -1, -1)] * 2, attn_mask=PACKED(**b))

    assert the_site(model).key.meta["example_value"].shape[1] == 1


def test_enable_gqa() -> None:
    site = the_site(grouped(lambda x: x, enable_gqa=True))
    assert site.key.meta["example_value"].shape[1] == 2


@pytest.mark.parametrize(
    "expand",
    [
        lambda x: x.repeat(1, 3, 1, 1),
        lambda x: torch.cat([x, x, x], 1),
        lambda x: expand_reshape(x.flip(2)).flip(2),
        lambda x: x[:, None].expand(-1, 3, -1, -1, -1).reshape(x.shape[0], 6, x.shape[2], 4),
    ],
)
def test_other_orders_of_heads_stay(expand: Callable[[Tensor], Tensor]) -> None:
    site = the_site(grouped(expand))
    shape = site.key.meta["example_value"].shape
    assert site.key.meta["example_value"].shape[1] == 6 or site.key.name.startswith("flip"), shape


# -- refusals ------------------------------------------------------------------------------------------------


def test_dropout_is_refused() -> None:
    def model(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=PACKED(**b), dropout_p=0.1)

    assert reasons(model, dynamic=False) == {Reason.DROPOUT}
    assert reasons(model, dynamic=True) == {Reason.DROPOUT}


def test_a_cache_of_keys_is_refused() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        past = torch.cat([torch.zeros_like(x), x], 2)
        return F.scaled_dot_product_attention(x, past, past, is_causal=True)

    assert reasons(model) == {Reason.QK_LENGTH}


def test_three_dims_are_refused() -> None:
    def model(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)[:, 0]] * 3, is_causal=True)

    assert reasons(model) == {Reason.SHAPE}


def test_every_reason_is_reported() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        odd = b["input_ids"].float().sin()[:, None, None, :]
        return F.scaled_dot_product_attention(x, x[:, :, :-1], x[:, :, :-1], odd[..., :-1], 0.5)

    assert reasons(model) == {Reason.DROPOUT, Reason.QK_LENGTH, Reason.MASK_WRONG_DIM}


def test_an_opaque_mask_needs_the_users_word() -> None:
    def model(mask: Tensor, **b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=mask)

    batch = {**BATCH, "mask": torch.ones(2, 1, 12, 12, dtype=torch.bool)}
    assert reasons(model, batch=batch) == {Reason.MASK_OPAQUE}
    sharding = annotate(DOCUMENTS, assume_mask=PackedMask(window=(3, 0)))
    site = the_site(model, sharding, batch=batch)
    assert site.assumed
    assert site.mask == PackedMask(window=(3, 0))


def test_a_stored_mask_is_opaque() -> None:
    class Stored(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        causal: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())

        def forward(self, **b: Tensor) -> Tensor:
            t = b["input_ids"].shape[1]
            return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=self.causal[:t, :t])

    assert reasons(Stored()) == {Reason.MASK_OPAQUE}


def test_a_learned_bias_is_refused() -> None:
    class Biased(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(64, 64))

        def forward(self, **b: Tensor) -> Tensor:
            t = b["input_ids"].shape[1]
            bias = self.table[:t, :t] * 2
            return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=bias.masked_fill(~PACKED(**b), -1e9))

    assert Reason.MASK_OPAQUE in reasons(Biased())


def test_a_value_named_like_the_packing_is_not_the_packing() -> None:
    class Embeds(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(64))

        def forward(self, **b: Tensor) -> Tensor:
            doc_ids = self.table[b["input_ids"]]
            mask = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
            return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=mask.tril())

    assert reasons(Embeds()) == {Reason.MASK_OPAQUE}


def test_factories_on_hidden_states_are_read() -> None:
    class Causal(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, **b: Tensor) -> Tensor:
            x, d = heads(b) * self.scale, b["doc_ids"]
            t = x.shape[2]
            keep = x.new_ones(t, t).tril() * (d[:, :, None] == d[:, None, :])
            return F.scaled_dot_product_attention(
                x, x, x, attn_mask=torch.zeros_like(keep).masked_fill(keep == 0, -1e9)[:, None]
            )

    assert the_site(Causal()).mask == PackedMask()


def test_inputs_of_other_lengths_are_refused() -> None:
    def model(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)] * 3, is_causal=True) + b["labels"].sum()

    sharding = cp.Sharding(2, {"input_ids": 1, "labels": 1, "position_ids": 1}, POSITIONS)
    found = match_model(model, sharding, batch={**BATCH, "labels": torch.zeros(2, 13)})
    assert [f.reason for f in found if isinstance(f, Refusal)] == [Reason.TOKEN_INPUT]


def test_two_dim_padding_mask_is_refused() -> None:
    def model(attention_mask: Tensor, **b: Tensor) -> Tensor:
        mask = PACKED(**b) & attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=mask)

    batch = {**BATCH, "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    assert reasons(model, batch=batch) == {Reason.MASK_WRONG_SOURCE}


# -- nested regions ------------------------------------------------------------------------------------------


def attention(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 1.5, x, attn_mask=mask)


def test_checkpointed_regions() -> None:
    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), PACKED(**b)
        for _ in range(2):
            x = checkpoint(attention, x, mask, use_reentrant=False)
        return x

    sites = match_model(model)
    assert all(isinstance(s, Site) and s.mask == PackedMask() for s in sites)
    bodies = {s.graph_module for s in sites if isinstance(s, Site)}
    assert len(sites) == len(bodies) == 2


def test_a_mask_made_inside_a_checkpoint() -> None:
    def block(x: Tensor, ids: Tensor, i: Tensor) -> Tensor:
        near = i[:, None] >= i[None, :]
        return attention(x, (ids[:, None, :, None] == ids[:, None, None, :]) & near)

    def model(**b: Tensor) -> Tensor:
        i = torch.arange(b["input_ids"].shape[1])
        return checkpoint(block, heads(b), b["doc_ids"], i, use_reentrant=False)

    assert the_site(model).mask == PackedMask()


def test_a_mask_handed_out_of_a_checkpoint() -> None:
    def model(**b: Tensor) -> Tensor:
        mask = checkpoint(PACKED, use_reentrant=False, **b)
        assert mask is not None
        return attention(heads(b), mask)

    assert the_site(model).mask == PackedMask()


def test_regions_compiled_once() -> None:
    block = torch.compiler.nested_compile_region(attention)

    def model(**b: Tensor) -> Tensor:
        x, mask = heads(b), PACKED(**b)
        return block(block(x, mask), mask)

    assert the_site(model).mask == PackedMask()


def test_one_region_with_two_masks_is_refused() -> None:
    block = torch.compiler.nested_compile_region(attention)

    def model(**b: Tensor) -> Tensor:
        x, i = heads(b), torch.arange(b["input_ids"].shape[1])
        mask = PACKED(**b)
        return block(block(x, mask), mask & (i[:, None] - i[None, :] < 3))

    found = match_model(model)
    assert [f.reason for f in found if isinstance(f, Refusal)] == [Reason.NESTED_REGION]


# -- argument names ------------------------------------------------------------------------------------------


def test_arguments_are_named_as_the_caller_names_them() -> None:
    class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        doc_ids: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("doc_ids", torch.zeros(2, 12))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Tensor, nested: dict[str, Tensor], *rest: Tensor, **more: Tensor) -> Tensor:
            return input_ids * self.weight + nested["position_ids"] + rest[0] + more["labels"] + self.doc_ids

    x = torch.zeros(2, 12)
    graphs: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Model(), backend=backend)(x, {"position_ids": x + 1}, x + 2, labels=x + 3)
    assert sorted(argument_names(graphs[0]).values()) == ["input_ids", "labels", "position_ids", "rest[0]"]


# -- transformers --------------------------------------------------------------------------------------------


def llama(layers: int, family: str = "Llama", **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, attn_implementation="sdpa", **options,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config)


TOKENS = {"input_ids": 1, "position_ids": 1}


def packed_batch() -> dict[str, Any]:
    return {k: BATCH[k] for k in TOKENS} | {"use_cache": False}


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("Llama", {}, PackedMask()),
        ("Mistral", {"sliding_window": 5}, PackedMask(window=(4, 0))),
        ("Qwen3", {"head_dim": 8}, PackedMask()),
    ],
)
def test_transformers_packed(family: str, options: Any, expected: PackedMask, dynamic: bool) -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    model = llama(2, family, **options).eval()
    found = match_model(model, sharding, batch=packed_batch(), dynamic=dynamic)
    assert [f.mask for f in found if isinstance(f, Site)] == [expected] * 2, found
    assert all(f.key.meta["example_value"].shape[1] == 2 for f in found if isinstance(f, Site))


def test_transformers_without_positions_sees_one_document() -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    batch = {"input_ids": BATCH["input_ids"], "use_cache": False}
    site = the_site(llama(1), sharding, batch=batch)
    assert site.mask == PackedMask(packed=False)


def test_transformers_four_dim_mask_is_opaque() -> None:
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    batch = packed_batch() | {"attention_mask": torch.ones(2, 1, 12, 12, dtype=torch.bool)}
    assert reasons(llama(1), sharding, batch=batch) == {Reason.MASK_OPAQUE}


@pytest.mark.slow
def test_matching_32_layers_is_fast() -> None:
    gm = capture(llama(32), packed_batch(), dynamic=None)
    sharding = cp.Sharding(2, TOKENS, POSITIONS)
    match_sites(gm, sharding, argument_names(gm))
    start = time.perf_counter()
    sites, _ = match_sites(gm, sharding, argument_names(gm))
    assert len(sites) == 32
    assert time.perf_counter() - start < 0.5


# -- flex_attention ------------------------------------------------------------------------------------------


def flex(mask: str = "causal", score: Callable[..., Tensor] | None = None) -> Model:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def model(**b: Tensor) -> Tensor:
        q, k = heads(b, 4) * 1.0, heads(b, 2) * 2.0
        ids, t = b["doc_ids"] if mask != "tokens" else b["input_ids"], b["doc_ids"].shape[1]

        def keep(row: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = ids[row, i] == ids[row, j]
            return same & (i >= j) & (i - j < 4) if mask == "window" else same & (i >= j)

        blocks = create_block_mask(keep, ids.shape[0], None, t, t, device="cpu")
        return flex_attention(q, k, k, block_mask=blocks, score_mod=score, enable_gqa=True)  # type: ignore[return-value]

    return model


def test_flex_mask_functions() -> None:
    site = the_site(flex(), dynamic=False)
    assert site.mask == PackedMask()
    assert site.node.meta["example_value"].shape == (2, 4, 12, 4)
    assert site.key.meta["example_value"].shape[1] == 2
    assert site.softcap == 0.0
    assert the_site(flex("window"), dynamic=False).mask == PackedMask(window=(3, 0))


def test_flex_soft_cap() -> None:
    assert the_site(flex(score=lambda s, *_: 20.0 * torch.tanh(s / 20.0)), dynamic=False).softcap == 20.0


def test_flex_refusals() -> None:
    assert reasons(flex("tokens"), dynamic=False) == {Reason.MASK_WRONG_SOURCE}
    assert reasons(flex(score=lambda s, *_: s + 1), dynamic=False) == {Reason.KERNEL}
    assert reasons(flex(score=lambda s, _, h, i, j: s - (i - j)), dynamic=False) == {Reason.KERNEL}


def test_sdpa_kernel_brackets_change_nothing() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def model(**b: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attention(heads(b), PACKED(**b))

    assert the_site(model).mask == PackedMask()
