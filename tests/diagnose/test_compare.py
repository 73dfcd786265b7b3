"""Masks compared on the first call, and whole models against one process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.calls import compare_masks
from cp_rewrite.diagnose import check, check_op
from cp_rewrite.masks import MaskMismatch
from tests.end_to_end.test_chunked_losses import Chunked
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers import packed_model
from tests.helpers.models import build_model
from tests.helpers.pool import Pool

pytestmark = pytest.mark.long

prove_masks: Any = importlib.import_module("cp_rewrite.passes.match.prove_masks")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def make_sharding(mesh: Any = 1, **options: Any) -> cp.Sharding:
    values: dict[str, Any] = {"inner": "eager", "verify": "first_step", **options}
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), **values)


SEEN_BELOW = ("torchtitan", "nanogpt", "gemma2_flex")


def run_model(name: str, sharding: cp.Sharding, batch: dict[str, Tensor]) -> None:
    model = build_model(name).requires_grad_(False)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch, shift_labels=True) as local:
        compiled(**local)


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2_eager", *SEEN_BELOW))]
)
def test_true_masks_pass(name: str) -> None:
    run_model(name, make_sharding(across_documents=True), make_batch([[13, 1, 7], [20, 1]]))


@torch.library.custom_op("cp_rewrite_tests::shift", mutates_args=())
def shift(x: Tensor) -> Tensor:
    return x.roll(1, 1)


@shift.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("cp_rewrite_tests::shift", lambda ctx, grad: grad.roll(-1, 1))


class Shifted(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Mixes tokens in an op that the user vouches for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        x = shift(self.embed(input_ids)).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)


def lie(monkeypatch: pytest.MonkeyPatch, mask: cp.PackedMask) -> None:
    monkeypatch.setattr(prove_masks, "prove", lambda *_, **__: mask)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(
            name,
            mask,
            marks=pytest.mark.slow if name == "gemma2_flex" or (name == "mistral") == (mask.left is None) else (),
        )
        for name in ("mistral", "torchtitan", "gemma2_flex")
        for mask in (cp.PackedMask(causal=False), cp.PackedMask(window=(5, 0)), cp.PackedMask(packed=False))
    ],
    ids=str,
)
def test_a_wrong_reading_of_a_mask_raises(monkeypatch: pytest.MonkeyPatch, name: str, mask: cp.PackedMask) -> None:
    lie(monkeypatch, mask)
    with pytest.raises(MaskMismatch, match=r"see key \d+ in row 0"):
        run_model(name, make_sharding(across_documents=True), make_batch([[13, 1, 9]]))


def test_masks_are_compared_beside_a_loop_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding = cp.Sharding(3, packed_model.TOKENS, cp.DocumentIds("doc_ids"), "contiguous")
    model, batch = Chunked("of_hidden_states").double(), packed_model.packed_batch(2)
    assert cp.check(model, sharding, batch).largest <= 1e-9
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        lie(patch, cp.PackedMask(causal=False))
        with pytest.raises(MaskMismatch, match=r"see key \d+ in row"):
            cp.check(model, sharding, batch)
    torch._dynamo.reset()
    monkeypatch.setattr(compare_masks, "SAMPLE", 4)
    assert cp.check(model, sharding, batch).largest <= 1e-9


def test_long_rows_are_sampled_at_the_front_and_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_masks, "SAMPLE", 8)
    documents = cp.Documents.from_lengths([5, 6, 7, 9])
    assert compare_masks.windows([documents]) == [(0, 8), (18, 26)]
    run_model("torchtitan", make_sharding(), make_batch([[5, 6, 7, 9]]))
    lie(monkeypatch, cp.PackedMask(causal=False))
    torch._dynamo.reset()
    with pytest.raises(MaskMismatch):
        run_model("torchtitan", make_sharding(), make_batch([[5, 6, 7, 9]]))


def with_mask(input_ids: Tensor, position_ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    x = F.one_hot(input_ids, 64).float()[:, None] + position_ids[:, None, :, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def local_masks(mesh: DeviceMesh, layout: Any) -> list[str]:
    """The outcome for each of five mask tensors that a rank makes of its own tokens, right or wrong."""
    sharding = make_sharding(mesh, assume_mask=cp.PackedMask(), layout=layout, verify="never")
    outcomes: list[str] = []
    for kind in ("documents", "positions", "causal only", "not causal", "bias"):
        torch._dynamo.reset()
        compiled = torch.compile(with_mask, backend=cp.backend(sharding), fullgraph=True)
        with sharding.shard(make_batch([[13, 1, 7, 29, 4]])) as local:
            pos = local["position_ids"]
            doc = torch.from_numpy(local.plan.rows[0].document_ids()[local.plan.local_indices(sharding.rank)])
            doc = (pos.diff(prepend=pos[:, :1] - 1) != 1).cumsum(1) if kind == "positions" else doc
            mask = (doc[:, :, None] == doc[:, None, :]) | (kind == "causal only")
            mask = (mask.tril() if kind != "not causal" else mask)[:, None]
            mask = torch.where(mask, 0.5, -torch.inf) if kind == "bias" else mask
            torch._dynamo.maybe_mark_dynamic(mask, [2, 3])
            try:
                compiled(**local, mask=mask)
                outcomes.append("passes")
            except MaskMismatch as error:
                outcomes.append("raises" if "assumed" in str(error) else str(error))
    return outcomes


@pytest.mark.parametrize("layout", ["balanced", pytest.param("dual_chunk", marks=pytest.mark.slow)])
def test_assumed_masks_are_compared_with_the_tensor_that_comes_in(pool: Pool, layout: str) -> None:
    for outcomes in pool.run(2, local_masks, layout):
        assert outcomes == ["passes", "passes", "raises", "raises", "raises"]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("torchtitan", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("nanogpt", 2), ("gemma2", 4)))],
)
def test_check_compares_a_model_with_one_process(name: str, world_size: int) -> None:
    sharding = cp.Sharding(world_size, TOKENS, cp.PositionIds("position_ids"), across_documents=name == "nanogpt")
    report = cp.check(build_model(name), sharding, make_batch([[13, 1, 7, 29, 5]]), shift_labels=True)
    assert {"loss", "logits"} <= set(report.outputs)
    assert report.gradients.keys() == dict(build_model(name).named_parameters()).keys()
    assert report.largest < 1e-5, str(report)


def test_check_compares_masks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, cp.PackedMask(window=(5, 0)))
    sharding = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"))
    with pytest.raises(MaskMismatch):
        cp.check(build_model("torchtitan"), sharding, make_batch([[13, 1, 7, 29]]), shift_labels=True)


class LargestOfAll(packed_model.PackedModel):
    """Scales hidden states by their largest."""

    def mix(self, h: Tensor) -> Tensor:
        return h / h.abs().amax()


def test_check_takes_the_largest_over_ranks() -> None:
    sharding = cp.Sharding(2, packed_model.TOKENS, cp.DocumentIds("doc_ids"))
    report = cp.check(LargestOfAll(), sharding, packed_model.packed_batch())
    assert report.largest < 1e-5, str(report)


class TokensAnywhere(packed_model.PackedModel):
    """Returns logits with their tokens in other places than behind the rows of the batch."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> dict[str, Tensor]:
        places = {
            "last": logits.transpose(1, 2),
            "first": logits.transpose(0, 1),
            "behind heads": logits.unflatten(2, (1, -1)).transpose(1, 2),
            "in one": logits.flatten(0, 1),
            "in all": logits.flatten(),
            "alone": torch.arange(labels.shape[1]).float(),
        }
        return {"loss": super().loss(logits, labels, num_items), **places}


def test_check_finds_tokens_anywhere() -> None:
    sharding = cp.Sharding(2, packed_model.TOKENS, cp.DocumentIds("doc_ids"), "head_tail")
    report = cp.check(TokensAnywhere(), sharding, packed_model.packed_batch(2, 13))
    assert len(report.outputs) == 7
    assert report.largest < 1e-5, str(report)


class Doubling(packed_model.PackedModel):
    """Scales hidden states by a buffer that each step doubles."""

    def extra(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def mix(self, h: Tensor) -> Tensor:
        out: Tensor = h * self.scale.clone()
        self.scale.mul_(2)
        return out


def test_check_begins_each_run_with_the_same_buffers() -> None:
    sharding = cp.Sharding(2, packed_model.TOKENS, cp.DocumentIds("doc_ids"))
    assert cp.check(Doubling(), sharding, packed_model.packed_batch()).largest < 1e-5


class NotANumber(packed_model.PackedModel):
    """Gives NaN beside a loss that is right, `where` of: on one process, on the ranks, or on both."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> dict[str, Tensor]:
        loss = super().loss(logits, labels, num_items)
        compiled = torch.compiler.is_compiling()
        bad = self.where == "both" or compiled == (self.where == "ranks")
        return {"loss": loss, "beside": loss.detach() * (float("nan") if bad else 1.0)}


@pytest.mark.parametrize(
    ("where", "said"), [("one", "of one process"), ("ranks", "of the ranks"), ("both", "of one process and the ranks")]
)
def test_check_says_where_it_is_given_nan(where: str, said: str) -> None:
    sharding = cp.Sharding(2, packed_model.TOKENS, cp.DocumentIds("doc_ids"))
    report = cp.check(NotANumber(where), sharding, packed_model.packed_batch())
    assert report.largest == float("inf")
    assert f"NaN in    beside, {said}\n" in str(report)
    assert max(report.gradients.values()) < 1e-5


def test_nan_counts_as_infinite() -> None:
    nan, inf = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")])
    one, two = torch.ones(2), torch.full((2,), 2.0)
    for measure in (check.difference, check_op.difference):
        for actual, expected in ((nan, one), (one, nan), (inf, one), (one, inf), (inf, -inf), (nan, inf)):
            assert measure(actual, expected) == float("inf")
        assert measure(inf, inf) == 0
        assert measure(two, one) == 1
    assert check.difference(nan, nan) == float("inf")
    assert check_op.difference(nan, nan) == 0  # an op that is given values it has no number for
    assert check.floor_of([nan, inf, one]) == pytest.approx(1e-3 * 2**0.5)


def test_check_shows_what_differs() -> None:
    """An op that the user vouches for, wrongly."""
    options: dict[str, Any] = {"local_ops": ("cp_rewrite_tests::shift",), "capacity": cp.Capacity(8, 8, 64)}
    options["across_documents"] = True
    sharding = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), **options)
    report = cp.check(Shifted(), sharding, make_batch([[13, 1, 7, 29]]))
    assert report.outputs["output"] > 1e-2
    assert report.gradients["embed.weight"] > 1e-2
    assert "output    output" in str(report)


def test_check_refuses_as_the_model_would() -> None:
    sharding = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"))
    with pytest.raises(cp.RewriteRefused, match="MASK_WRONG_SOURCE"):
        cp.check(build_model("torchtitan_eos_mask"), sharding, make_batch([[13, 8]]), shift_labels=True)


class SumOfAll(packed_model.PackedModel):
    """Adds a sum over all tokens, padding too."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits.square().mean()


def test_check_says_what_a_call_would_of_padding() -> None:
    batch, sharding = packed_model.packed_batch(), cp.Sharding(2, packed_model.TOKENS, cp.DocumentIds("doc_ids"))
    batch["doc_ids"][:, -3:], batch["labels"][:, -3:] = -1, -100
    with pytest.raises(ValueError, match="takes in all tokens, but 3 of this batch are padding"):
        cp.check(SumOfAll(), sharding, batch)
