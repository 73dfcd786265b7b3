"""Refusals name each cause once, in words that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

import cp_rewrite as cp
from tests.border.model import HEADS, TOKENS, WIDTH, Batch, Model, document_mask, pack
from tests.border.test_errors import ordered

DRY = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
UNRESOLVED = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), resolve=False)


def refusals(model: nn.Module, batch: Batch | None = None, sharding: cp.Sharding | None = None) -> Sequence[cp.Refusal]:
    torch._dynamo.reset()  # all models here have one forward
    return cp.explain(model, sharding or DRY)(**(batch or pack())).refusals


def sized_by_experts(model: Model, h: Tensor, b: Batch) -> Tensor:
    """As jetmoe."""
    sizes = F.one_hot(h[..., :4].argmax(-1).flatten(), 4).sum(0).tolist()
    return torch.cat(h.flatten(0, 1).split(sizes)).view_as(h)


def test_sizes_read_from_a_tensor_are_refused() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = refusals(Model(mix=sized_by_experts))
    assert any("tolist" in str(r) for r in found), found


def with_attention_module(model: Any) -> None:
    model.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


def through_module(model: Any, h: Tensor, b: Batch) -> Tensor:
    return model.attention(h, h, h, attn_mask=~document_mask(b)[0, 0], need_weights=False)[0]


def through_module_with_weights(model: Any, h: Tensor, b: Batch) -> Tensor:
    return model.attention(h, h, h, attn_mask=~document_mask(b)[0, 0])[0]


@pytest.mark.parametrize("mix", [through_module, through_module_with_weights])
def test_attention_module_is_read_or_named_once(mix: Callable[[Any, Tensor, Batch], Tensor]) -> None:
    found = refusals(Model(mix=mix, extra=with_attention_module))
    assert len(found) <= 1, found
    assert all("T x T tensor" not in r.detail and "ttention" in r.detail for r in found), found


def mask_of_all(b: Batch) -> Tensor:
    """Every channel of two must agree."""
    ids = torch.stack([b["doc_ids"], b["doc_ids"]], -1)
    index = torch.arange(ids.shape[1])
    return ((ids[:, :, None] == ids[:, None, :]).all(-1) & (index[:, None] >= index[None, :]))[:, None]


def mask_of_all_keys(b: Batch) -> Tensor:
    return document_mask(b) & document_mask(b).all(-1, keepdim=True)


@pytest.mark.parametrize("mask", [mask_of_all, mask_of_all_keys])
def test_all_over_a_dim_of_a_mask_is_read_or_named(mask: Callable[[Batch], Tensor]) -> None:
    found = refusals(Model(mask=mask))
    assert len(found) <= 1, found
    assert all("all" in r.detail for r in found), found


def mask_of_ids(b: Batch) -> Tensor:
    return (b["input_ids"][:, :, None] >= b["input_ids"][:, None, :])[:, None]


def mask_of_one_row(b: Batch) -> Tensor:
    """A tensor that comes in: every token sees the keys that it marks."""
    return b["mask"] & document_mask(b)


@pytest.mark.parametrize("mask", [mask_of_ids, mask_of_one_row])
def test_unproven_mask_is_refused_once(mask: Callable[[Batch], Tensor]) -> None:
    found = refusals(Model(mask=mask), pack() | {"mask": torch.ones(1, 1, 1, 1).bool()})
    assert len(found) == 1, [str(r) for r in found]
    assert found[0].reason.name.startswith("MASK"), found


def written_out(h: Tensor, mask: Tensor, cap: float) -> Tensor:
    scores = (h @ h.mT).clamp(max=cap) if cap else h @ h.mT
    return h + torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ h


@pytest.mark.parametrize(
    ("cap", "mask", "reason"), [(0, mask_of_ids, "MASK_WRONG_SOURCE"), (3, document_mask, "KERNEL")]
)
def test_attention_written_out_is_refused_once(cap: float, mask: Callable[[Batch], Tensor], reason: str) -> None:
    def mix(model: Model, h: Tensor, b: Batch) -> Tensor:
        return written_out(h[:, None], mask(b), cap)[:, 0]

    found = refusals(Model(mix=mix))
    assert [r.reason.name for r in found] == [reason], [str(r) for r in found]


def test_what_is_wrong_behind_unproven_attention_is_refused_too() -> None:
    found = refusals(Model(mix=ordered, mask=mask_of_ids))
    assert [r.reason.name for r in found] == ["MASK_WRONG_SOURCE", "TOKEN_MIXING"], [str(r) for r in found]


class Layer(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + F.scaled_dot_product_attention(h, h, h, mask, dropout_p=0.5)


def test_repeated_layers_are_folded() -> None:
    def layers(model: Any) -> None:
        model.layers = nn.ModuleList(Layer() for _ in range(3))

    def mix(model: Any, h: Tensor, b: Batch) -> Tensor:
        for layer in model.layers:
            h = layer(h[:, None], document_mask(b))[:, 0]
        return h

    (_, said, _) = str(cp.RewriteRefused(refusals(Model(mix=mix, extra=layers)))).splitlines()
    assert said.endswith("(in 3 layers)"), said
    assert "DROPOUT" in said


@torch.library.custom_op("border::flash_attn_rows", mutates_args=())
def flash_attn_rows(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("border::selective_scan", mutates_args=())
def selective_scan(x: Tensor) -> Tensor:
    return x.clone()


for made in (flash_attn_rows, selective_scan):
    made.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (lambda m, h, b: flash_attn_rows(h), "is attention, by its name"),
        (lambda m, h, b: selective_scan(h), "is a scan over tokens, by its name"),
        (lambda m, h, b: h.cumsum(1), "a running sum over tokens"),
        (
            lambda m, h, b: (
                F.pad(h, (0, 0, 0, -h.shape[1] % 4)).unflatten(1, (-1, 4)).cumsum(2).flatten(1, 2)[:, : h.shape[1]]
            ),
            "pad rows to whole chunks where the batch is made",
        ),
        (lambda m, h, b: F.conv1d(h.mT, torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH).mT, "a convolution over"),
        (lambda m, h, b: F.avg_pool1d(h.mT, 3, 1, 1).mT, "pooling over tokens"),
        (lambda m, h, b: h + F.pad(h, (0, 0, 1, -1)), "a shift over tokens"),
        (lambda m, h, b: h + b["doc_ids"].cumsum(1)[..., None], "make it from the global row"),
    ],
)
def test_hint_fits_the_op(mix: Callable[[Any, Tensor, Batch], Tensor], says: str) -> None:
    (found,) = refusals(Model(mix=mix), sharding=UNRESOLVED)
    assert says in found.detail
    assert all(word not in str(found) for word in ("shift_labels", "local_ops"))


def test_shift_of_labels_is_offered_where_labels_are_shifted() -> None:
    def shifts(model: Model, logits: Tensor, b: Batch) -> Tensor:
        labels = F.pad(b["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / b["num_items"]

    (found,) = refusals(Model(shifts), sharding=UNRESOLVED)
    assert "shift_labels=True" in found.detail


@pytest.mark.parametrize("packing", [cp.PaddingMask("attention_mask"), cp.WholeRows()])
def test_padded_rows_of_encoder_and_decoder_name_the_mask_that_the_annotation_does_not(packing: Any) -> None:
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=16)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32)
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads, use_cache=False, forced_eos_token_id=None))
    ids, mask = torch.randint(4, 16, (2, 13)), (torch.arange(13) < torch.tensor([[13], [9]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_input_ids": ids}
    batch["decoder_attention_mask"] = mask.clone()
    found = refusals(model.eval(), batch, cp.Sharding(2, dict.fromkeys(batch, 1), packing))
    assert {r.reason for r in found} == {cp.Reason.MASK_WRONG_SOURCE}, found
    assert any("the mask reads 'decoder_attention_mask'" in r.detail for r in found), found
