"""Attention nodes: every way to call them, and every refusal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason, Refusal
from cp_rewrite.passes.values.state import Site
from tests.helpers.matching import BATCH, PACKED, heads, match_model, reasons, the_site
from tests.passes.mask_spellings import DOCUMENTS, POSITIONS, annotate, make_batch


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


def test_a_window_that_a_caller_passes_is_fixed_by_a_guard() -> None:
    def model(window: int, **b: Tensor) -> Tensor:
        x, index = heads(b), torch.arange(b["doc_ids"].shape[1])
        near = index[:, None] - index < window + 1
        return F.scaled_dot_product_attention(x, x, x, attn_mask=PACKED(**b) & near)

    with torch._dynamo.config.patch(assume_static_by_default=False):  # as Dynamo does once it changed
        assert the_site(model, batch={**BATCH, "window": 3}).mask == PackedMask(window=(3, 0))


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


def test_three_dims_are_rows_of_one_head_or_heads_of_one_row() -> None:
    def one_head(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)[:, 0]] * 3, is_causal=True)

    def merged(**b: Tensor) -> Tensor:
        x = heads(b).flatten(0, 1) * 1.0
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert the_site(one_head).form == "BTD"
    assert the_site(one_head, batch=make_batch([[5, 3, 4]])).form == "HTD"
    assert reasons(merged) == {Reason.SHAPE}


def test_products_broadcast_one_head() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        return F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], attn_mask=PACKED(**b))

    assert the_site(model).key.meta["example_value"].shape[1] == 1


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


def test_no_mask_in_a_block_compiled_alone_needs_the_users_word() -> None:
    def block(**b: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[heads(b)] * 3, is_causal=True)

    whole = PackedMask(packed=False)
    for assumed in (None, PackedMask(), PackedMask(causal=False, packed=False)):
        sharding = annotate(DOCUMENTS, assume_mask=assumed, block_tokens={"hidden_states": 1})
        assert reasons(block, sharding) == {Reason.MASK_OPAQUE}
    sharding = annotate(DOCUMENTS, assume_mask=whole, block_tokens={"hidden_states": 1})
    assert the_site(block, sharding).mask == whole


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

    assert reasons(Biased()) == {Reason.MASK_NOT_PACKED}


def test_a_value_named_like_the_packing_is_not_the_packing() -> None:
    class Embeds(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(64))

        def forward(self, **b: Tensor) -> Tensor:
            doc_ids = self.table[b["input_ids"]]
            mask = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
            return F.scaled_dot_product_attention(*[heads(b)] * 3, attn_mask=mask.tril())

    assert reasons(Embeds()) == {Reason.MASK_NOT_PACKED}


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
