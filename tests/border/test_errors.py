"""Errors say what is wrong, where, once, and before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.border import padding
from tests.border.forks import Failure, Forks
from tests.border.model import HEADS, TOKENS, WIDTH, Batch, Model, document_mask, keep_tokens, pack
from tests.border.outcome import KEPT, Case, Kind, observe

DRY = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
UNRESOLVED = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), resolve=False)


def refusals(model: nn.Module, batch: Batch | None = None, sharding: cp.Sharding | None = None) -> Sequence[cp.Refusal]:
    torch._dynamo.reset()  # all models here have one forward
    return cp.explain(model, sharding or DRY)(**(batch or pack())).refusals


# Labels under another name.


def shifted_loss(model: Model, logits: Tensor, b: Batch) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), b["shift_labels"].flatten(), reduction="sum")
    return total / b["num_items_in_batch"]


def named_targets() -> Case:
    batch = pack()
    batch["targets"] = batch.pop("labels")
    tokens = {"input_ids": 1, "doc_ids": 1, "targets": 1}
    return Case(lambda: Model(shifted_loss), [batch], tokens, shard={"shift_labels": True, "label_arg": "targets"})


def test_labels_of_another_name_are_shifted(forks: Forks) -> None:
    outcome = observe(forks, named_targets)
    assert outcome.kind is Kind.RIGHT, str(outcome)


# What the model does not take.


class WithoutIds(Model):
    """One document a row: no mask, and no document ids."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:  # type: ignore[override]
        h = self.embed(input_ids)[:, None]
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0]
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="sum") / num_items


def test_what_only_the_annotation_reads_is_dropped() -> None:
    batch, sharding = pack((14,)), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    assert cp.explain(WithoutIds(), sharding)(**batch).ok
    assert cp.check(WithoutIds(), sharding, batch).largest < 1e-5
    with sharding.shard(batch, drop=("doc_ids",)) as local:
        assert sorted(local) == ["input_ids", "labels", "num_items"]
    with pytest.raises(TypeError, match="unexpected keyword") as raised, sharding.shard(batch) as local:
        WithoutIds()(**local)
    assert raised.value.__notes__ == [
        "cp_rewrite: shard(batch, drop=('doc_ids',)) keeps back what the model does not take"
    ]
    for drop, kind in (("doc_ids", TypeError), (("ids",), KeyError)):
        with pytest.raises(kind, match=r"^.?drop "), sharding.shard(batch, drop=drop):
            pass


# Arguments that are not named in tokens, or at a wrong dim.


def at_positions(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h * b["position_ids"][..., None].float().cos()


def with_features(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + b["features"].sum(-1, keepdim=True)


def given_mask(b: Batch) -> Tensor:
    return b["mask"]


def unnamed(name: str) -> Case:
    """An argument with a value per token, which `tokens` does not name, or names at a wrong dim."""
    batch = pack()
    if name == "labels":
        return Case(Model, [batch], {"input_ids": 1, "doc_ids": 1})
    if name == "position_ids":
        return Case(lambda: Model(mix=at_positions), [batch | {name: torch.arange(14)[None]}])
    return Case(lambda: Model(mix=with_features), [batch | {name: torch.rand(1, 14, 14)}], {**TOKENS, name: 2})


@pytest.mark.parametrize("name", ["labels", "position_ids", "features"])
def test_argument_that_is_missing_or_wrong_in_tokens_is_named(forks: Forks, name: str) -> None:
    outcome = observe(forks, unnamed, name)
    assert outcome.kind in (Kind.RAISED, Kind.REFUSED), str(outcome)
    assert all(name in f.message and "tokens" in f.message for f in outcome.failures), str(outcome)


def wrong_dims(rows: int, dims: list[str]) -> Case:
    batch = {key: x.expand(rows, -1).contiguous() if x.ndim else x for key, x in pack().items()}
    return Case(Model, [batch], {**TOKENS, **dict.fromkeys(dims, 0)})


@pytest.mark.parametrize(
    ("rows", "dims"), [(14, ["input_ids", "doc_ids", "labels"]), (14, ["labels"]), (2, ["input_ids"]), (1, ["labels"])]
)
def test_wrong_token_dim_is_named(forks: Forks, rows: int, dims: list[str]) -> None:
    outcome = observe(forks, wrong_dims, rows, dims)
    assert outcome.kind in (Kind.RAISED, Kind.REFUSED), str(outcome)
    assert all("tokens" in f.message for f in outcome.failures), str(outcome)


# Sums of terms that are each 0 at padding.


@pytest.mark.parametrize("loss", ["sum_of_terms", "z_loss_of_targets", "mean_by_mask", "count_of_targets"])
def test_sum_of_terms_is_no_false_alarm(forks: Forks, loss: str) -> None:
    outcome = observe(forks, padding.make, "odd", loss)
    assert outcome.kind is Kind.RIGHT, str(outcome)


# Numbers read from tensors (jetmoe).


def sized_by_experts(model: Model, h: Tensor, b: Batch) -> Tensor:
    sizes = F.one_hot(h[..., :4].argmax(-1).flatten(), 4).sum(0).tolist()
    return torch.cat(h.flatten(0, 1).split(sizes)).view_as(h)


def test_sizes_read_from_a_tensor_are_refused() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = refusals(Model(mix=sized_by_experts))
    assert any("tolist" in str(r) for r in found), found


# Layers kept in a set (gemma4).


def by_type(model: Any, h: Tensor, b: Batch) -> Tensor:
    angles = {name: h * scale for name, scale in model.types}
    return h + angles["full"].cos() + angles["sliding"].sin()


def other_order(rank: int, model: Any) -> None:
    """As a set of strings is walked under another PYTHONHASHSEED."""
    model.types = [("full", 2.0), ("sliding", 3.0)][:: 1 - 2 * rank]


def unordered() -> Case:
    return Case(lambda: Model(mix=by_type), [pack()], on_rank=other_order)


def test_order_of_a_set_is_no_difference_or_is_explained(forks: Forks) -> None:
    outcome = observe(forks, unordered)
    assert outcome.kind in KEPT, str(outcome)
    assert outcome.kind is Kind.RIGHT or "PYTHONHASHSEED" in outcome.detail, str(outcome)


# Each cause once, in words that fit.


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
    return given_mask(b) & document_mask(b)


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

    (_, said) = str(cp.RewriteRefused(refusals(Model(mix=mix, extra=layers)))).splitlines()
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
            "a scan over tokens (linear attention",
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


# The exception itself.


def ordered(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h.sort(1).values


def test_refusal_is_the_exception_itself(forks: Forks) -> None:
    outcome = observe(forks, refused)
    assert outcome.kind is Kind.REFUSED
    assert not any(f.wrapped for f in outcome.failures)


def refused() -> Case:
    return Case(lambda: Model(mix=ordered), [pack()])


def outside_of_a_batch(mesh: DeviceMesh) -> None:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    torch.compile(Model(), backend=cp.backend(sharding), fullgraph=True)(**pack())


def with_another_batch(mesh: DeviceMesh) -> None:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    compiled = torch.compile(Model(), backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(pack()):
        compiled(**pack())


def with_another_graph(mesh: DeviceMesh) -> None:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    model = Model(mix=ordered if mesh.get_local_rank() else keep_tokens)
    with sharding.shard(pack()) as local:
        torch.compile(model, backend=cp.backend(sharding), fullgraph=True)(**local)


@pytest.mark.parametrize("call", [outside_of_a_batch, with_another_batch, with_another_graph])
def test_error_while_compiling_is_the_exception_itself(forks: Forks, call: Callable[[DeviceMesh], None]) -> None:
    for rank in forks.run(2, call):
        assert isinstance(rank, Failure)
        assert rank.ours, rank.trace
        assert not rank.wrapped, rank.trace
