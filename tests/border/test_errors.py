"""Errors say what is wrong and where, before anything has run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.border import padding
from tests.border.forks import Failure, Forks
from tests.border.model import TOKENS, Batch, Model, keep_tokens, pack
from tests.border.outcome import KEPT, Case, Kind, observe

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


def of_next_token(model: Model, logits: Tensor, b: Batch) -> Tensor:
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), reduction="sum")
    return total / b["num_items"]


def both_ways(b: Batch) -> Tensor:
    return (b["doc_ids"][:, :, None] == b["doc_ids"][:, None, :])[:, None]


LEARNS_TO_COPY: dict[str, tuple[Callable[[Batch], Tensor], dict[str, Any], bool]] = {
    "as they are": (lambda b: b["input_ids"].clone(), {}, True),
    "as they are, but at documents' starts": (lambda b: b["input_ids"].where(b["doc_ids"] > 0, -100), {}, True),
    "the next tokens": (lambda b: F.pad(b["input_ids"][:, 1:], (0, 1), value=-100), {}, False),
    "shifted by the model": (lambda b: b["input_ids"].clone(), {"loss": of_next_token}, False),
    "of hidden tokens": (lambda b: (b["input_ids"] + 1) % 19, {}, False),
    "of a model that looks ahead": (lambda b: b["input_ids"].clone(), {"mask": both_ways}, False),
}
"""How labels are made of the batch, the model's parts, and whether a warning says that it learns to copy."""


@pytest.mark.parametrize("name", LEARNS_TO_COPY)
def test_labels_that_nobody_shifts_are_one_warning(name: str) -> None:
    labels, parts, warned = LEARNS_TO_COPY[name]
    torch._dynamo.reset()  # the first call of a graph warns
    sharding, b = cp.Sharding(1, TOKENS, cp.DocumentIds("doc_ids"), inner="eager"), pack((9, 8, 10))
    b["labels"] = labels(b)
    compiled: Any = torch.compile(Model(**parts), backend=cp.backend(sharding), fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with sharding.shard(b) as local:
                compiled(**local)
    said = [str(warning.message) for warning in caught if "learns to copy" in str(warning.message)]
    assert len(said) == warned
    assert all("'labels' are 'input_ids' at each target" in text and "shift_labels=True" in text for text in said)


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
    with pytest.raises(TypeError) as raised, sharding.shard(batch, shift_labels=True) as local:
        WithoutIds()(**{name: local[name] for name in ("input_ids", "labels", "num_items", "shift_labels")})
    assert raised.value.__notes__[0].startswith("cp_rewrite: shift_labels=True is for models that take shift_labels")
    model, options = WithoutIds(), {"sharding": sharding}
    traced = torch.compile(lambda local: model(**local), backend="cp_rewrite", fullgraph=True, options=options)
    with pytest.raises(Unsupported) as refused, sharding.shard(batch, shift_labels=True) as local:
        traced(local)
    assert refused.value.__notes__[:2] == [
        *raised.value.__notes__,
        "cp_rewrite: shard(batch, drop=('doc_ids',)) keeps back what the model does not take",
    ]
    for drop, kind in (("doc_ids", TypeError), (("ids",), KeyError)):
        with pytest.raises(kind, match=r"^.?drop "), sharding.shard(batch, drop=drop):
            pass


# Arguments that are not named in tokens, or at a wrong dim.


def at_positions(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h * b["position_ids"][..., None].float().cos()


def with_features(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + b["features"].sum(-1, keepdim=True)


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


# The exception itself.


def ordered(model: Model, h: Tensor, b: Batch) -> Tensor:
    return torch.fft.fft(h, dim=1).real


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
