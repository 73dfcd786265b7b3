"""The border of the proof: padding, fill, graph breaks, state, randomness, collectives, outputs, weights.

Each program here was once trained on silently otherwise than on one process. It ends right, refused, or in an error of
ours on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.border import draws, fill, padding, state
from tests.border.forks import Failure, Forks
from tests.border.model import HEADS, TOKENS, VOCAB, WIDTH, Batch, Model, cross_entropy, pack
from tests.border.outcome import KEPT, Case, Kind, Outcome, observe


def kept(outcome: Outcome) -> None:
    assert outcome.kind in KEPT, str(outcome)


# 1. Padding tokens of the packing.


@pytest.mark.parametrize("way", ["ids_at_end", "ids_between", "sums_end_early", "lengths_one_document"])
@pytest.mark.parametrize("loss", ["z_loss", "entropy", "load", "mean_over_ranks"])
def test_padding_reaches_no_result(forks: Forks, way: str, loss: str) -> None:
    kept(observe(forks, padding.make, way, loss))


@pytest.mark.parametrize("way", ["ids_at_end", "sums_end_early", "lengths_one_document"])
def test_labels_of_padding_are_an_error(forks: Forks, way: str) -> None:
    outcome = observe(forks, padding.make, way, "labels_counted")
    assert outcome.kind is Kind.RAISED, str(outcome)
    assert all("labels" in f.message and "padding" in f.message for f in outcome.failures)


@pytest.mark.parametrize("loss", ["cross_entropy", "z_loss_of_targets", "entropy_of_tokens", "norm_of_hidden"])
def test_padding_that_counts_nowhere_is_right(forks: Forks, loss: str) -> None:
    outcome = observe(forks, padding.make, "ids_at_end", loss)
    assert outcome.kind is Kind.RIGHT, str(outcome)


def positions_of_document(b: Batch) -> Tensor:
    """The whole document, and with it padding whose positions go on."""
    ids = (b["position_ids"] == 0).cumsum(1)
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def whole_row(b: Batch) -> Tensor:
    index = torch.arange(b["input_ids"].shape[1])
    return (index[:, None] >= index[None, :])[None, None]


def more_attention(model: Any) -> None:
    model.qkv_of_all = nn.Linear(WIDTH, 3 * WIDTH)


def attend_to_all(model: Any, h: Tensor, b: Batch) -> Tensor:
    """Tokens of documents see what attention within documents gave to padding."""
    q, k, v = model.qkv_of_all(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return h + F.scaled_dot_product_attention(q, k, v, attn_mask=whole_row(b)).transpose(1, 2).flatten(2)


def seen_padding(how: str) -> Case:
    if how == "whole_row_behind_documents":
        return Case(lambda: Model(mix=attend_to_all, extra=more_attention), [pack((5, 4), 5)])
    rest = [0, 1, 2, 3, 4] if how == "positions_start_again" else [4, 5, 6, 7, 8]
    given: Any = padding.WAYS["lengths_one_document"].given
    return Case(lambda: Model(mask=positions_of_document), [padding.by_positions(rest)], **given)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("whole_row_behind_documents", Kind.REFUSED),
        ("positions_go_on", Kind.RAISED),
        ("positions_start_again", Kind.RIGHT),
    ],
)
def test_padding_that_documents_see(forks: Forks, how: str, kind: Kind) -> None:
    outcome = observe(forks, seen_padding, how)
    assert outcome.kind is kind, str(outcome)


def attention_alone(model: Model, h: Tensor, b: Batch) -> Tensor:
    """Output of attention, made to length 1; no residual keeps it from 0."""
    attended = h - model.embed(b["input_ids"])
    return attended / attended.norm(dim=-1, keepdim=True)


def normalised_attention(padded: bool) -> Case:
    batch = pack((5, 4), 5) if padded else pack((5, 4, 4))
    return Case(lambda: Model(mix=attention_alone), [batch])


@pytest.mark.parametrize("padded", [True, False], ids=["padding", "odd"])
def test_attention_of_padding_rows_is_not_zero(forks: Forks, padded: bool) -> None:
    outcome = observe(forks, normalised_attention, padded)
    assert outcome.kind is Kind.RIGHT, str(outcome)


# 2. Rows that fill a rank up.


@pytest.mark.parametrize(
    ("factor", "place"),
    [
        ("reciprocal", "on_logits"),
        ("length_divides", "on_hidden"),
        ("logarithm", "on_logits"),
        ("unit_norm", "picked_by_where"),
        ("reciprocal", "on_losses"),
        ("softmax_of_allowed", "on_hidden"),
        ("embedding_before", "on_hidden"),
        ("whole_division", "on_logits"),
    ],
)
def test_rows_that_fill_a_rank_reach_no_gradient(forks: Forks, factor: str, place: str) -> None:
    outcome = observe(forks, fill.make, factor, place)
    assert outcome.kind is Kind.RIGHT, str(outcome)


def test_more_ranks_than_tokens(forks: Forks) -> None:
    kept(observe(forks, one_token, world_size=2))


def one_token() -> Case:
    return Case(Model, [pack((1,)) | {"labels": torch.tensor([[3]]), "num_items": torch.tensor(1.0)}])


# 3. Graph breaks.


@pytest.mark.parametrize("place", ["attribute", "number"], ids=["tensor", "item"])
@pytest.mark.parametrize("value", ["load", "targets"])
def test_what_goes_over_a_graph_break_is_unknown(forks: Forks, place: str, value: str) -> None:
    kept(observe(forks, state.make, "local", place, value, "graph_break"))


# 4. State.


@pytest.mark.parametrize("place", [name for name in state.PLACES if name != "number"])
@pytest.mark.parametrize("value", ["load", "loss"])
def test_state_is_assigned_as_it_is_written(forks: Forks, place: str, value: str) -> None:
    kept(observe(forks, state.make, "kept", place, value, "none"))


@pytest.mark.parametrize("place", ["attribute", "buffer_assigned", "buffer_written", "list"])
def test_state_that_all_ranks_share_is_right(forks: Forks, place: str) -> None:
    outcome = observe(forks, state.make, "kept", place, "items", "none")
    assert outcome.kind is Kind.RIGHT, str(outcome)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("use", ["kept", "gated", "carried"])
@pytest.mark.parametrize("place", ["attribute", "buffer_written", "buffer_data", "buffer_assigned"])
def test_state_is_kept_by_compilers_too(forks: Forks, inner: str, use: str, place: str) -> None:
    kept(observe(forks, state.make, use, place, "load", "none", inner))


# 5. Targets that are floats, under another name.


def squares(model: Model, logits: Tensor, b: Batch) -> Tensor:
    """Targets of 0 count as little as the proof says that rows without a token do."""
    return (logits[..., 0] * b["targets"]).sum() / b["num_items"]


def float_targets() -> Case:
    batch = pack((5, 4, 4))
    batch["targets"] = torch.linspace(1, 2, 13)[None]
    return Case(lambda: Model(squares), [batch], {**TOKENS, "targets": 1}, shard={"label_arg": "targets"})


def test_float_targets_are_filled_as_the_proof_says(forks: Forks) -> None:
    kept(observe(forks, float_targets))


# 6. Random numbers.


@pytest.mark.parametrize(
    ("draw", "region"),
    [
        ("python_number", "plain"),
        ("python_generator", "plain"),
        ("numpy_number", "plain"),
        ("python_number", "before_break"),
        ("drawn_outside", "plain"),
        ("rand_like", "mapped"),
        ("rand_like", "mapped_alike"),
        ("rand_like", "mapped_alone"),
        ("dropout", "checkpointed"),
    ],
)
def test_random_numbers(forks: Forks, draw: str, region: str) -> None:
    kept(observe(forks, draws.make, draw, region))


# 7. Collectives that the model calls itself.


def counted_over_ranks(local: bool, functional: bool) -> Callable[[Any, Tensor, Batch], Tensor]:
    """The loss over the number of targets, which the model sums over ranks itself."""

    def loss(model: Any, logits: Tensor, b: Batch) -> Tensor:
        count = (b["labels"] != -100).sum().float() if local else b["num_items"] * 1
        if model.sharding.world_size > 1 and functional:
            count = torch.ops._c10d_functional.all_reduce(count, "sum", model.sharding.group_name)
            count = torch.ops._c10d_functional.wait_tensor(count)
        elif model.sharding.world_size > 1:
            dist.all_reduce(count, group=model.sharding.group)
        total = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="sum")
        return total / count

    return loss


def collective(local: bool, functional: bool) -> Case:
    return Case(lambda: Model(counted_over_ranks(local, functional)), [pack()])


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "c10d"])
def test_sum_over_ranks_of_what_all_have_is_not_taken_for_one_process(forks: Forks, functional: bool) -> None:
    kept(observe(forks, collective, False, functional))


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "c10d"])
def test_sum_over_ranks_of_a_part_is_to_be_left_out(forks: Forks, functional: bool) -> None:
    """Without it the part is made whole."""
    outcome = observe(forks, collective, True, functional)
    assert outcome.kind is Kind.REFUSED, str(outcome)
    assert "adds up what is made whole without it: leave it out" in str(outcome)


# 8. Gathered outputs.


def flat_scores(model: Model, logits: Tensor, b: Batch) -> Tensor:
    return logits.flatten(0, 1)


def scores_of_tokens(model: Model, logits: Tensor, b: Batch) -> Tensor:
    return logits[0].T


def gathered(mesh: DeviceMesh, flat: bool, tokens: int) -> Tensor:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    model = Model(flat_scores if flat else scores_of_tokens)
    out: Tensor = cp.context_parallel(sharding, gather_outputs=True)(model)(**pack((10, tokens - 10)))
    return out.detach()


@pytest.mark.parametrize("flat", [True, False], ids=["(T, V)", "(V, T)"])
@pytest.mark.parametrize("tokens", [2 * VOCAB, 20])
def test_outputs_are_gathered_at_their_token_dim(forks: Forks, flat: bool, tokens: int) -> None:
    expected = Model(flat_scores if flat else scores_of_tokens)(**pack((10, tokens - 10)))
    for rank in forks.run(2, gathered, flat, tokens):
        assert not isinstance(rank, Failure), rank.trace
        torch.testing.assert_close(rank, expected.detach(), rtol=1e-4, atol=1e-5)


# 9. Weights.


def other_weights(rank: int, model: nn.Module) -> None:
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1e-3 * rank


def other_buffer(rank: int, model: nn.Module) -> None:
    model.register_buffer("shift", torch.tensor(float(rank)))


def shifted(model: Any, h: Tensor, b: Batch) -> Tensor:
    return h + model.shift


def unlike(what: str) -> Case:
    if what == "weights":
        return Case(Model, [pack()], on_rank=other_weights)
    return Case(lambda: Model(mix=shifted), [pack()], on_rank=other_buffer)


@pytest.mark.parametrize("what", ["weights", "buffers"])
def test_weights_that_differ_between_ranks_are_an_error(forks: Forks, what: str) -> None:
    outcome = observe(forks, unlike, what)
    assert outcome.kind is Kind.RAISED, str(outcome)


def test_plain_model_is_right(forks: Forks) -> None:
    for lengths in ((5, 4, 5), (5, 4, 4)):
        outcome = observe(forks, plain, lengths)
        assert outcome.kind is Kind.RIGHT, str(outcome)


def plain(lengths: tuple[int, ...]) -> Case:
    return Case(lambda: Model(cross_entropy), [pack(lengths)])
