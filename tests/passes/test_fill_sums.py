"""Sums over tokens leave out the rows that fill a rank up, and are masked only where they must be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.passes.locality.claims import B, Dims, T
from cp_rewrite.passes.locality.rules.rule import spread
from tests.helpers.packed_model import SHARDING, TOKENS, PackedModel, judge, packed_batch
from tests.helpers.pool import Pool


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (((B,), (T,), None), (2, 3, 1)),
        ((None, (T,), (B,)), (3, 2)),
        (((B, T), None), (6, 1)),
        (((T, B),), (6,)),
        (((T,),), (3,)),
        ((None, (T,), None), (3, 1)),
        (((T, 4),), (12,)),
        ((None, (B, T, 2)), (12,)),
        (((2, B), None, (T, 2)), (4, 1, 6)),
    ],
)
def test_a_mask_of_tokens_has_the_dims_of_a_tensor(dims: Dims, shape: tuple[int, ...]) -> None:
    has_token = torch.tensor([[True, True, False], [True, False, False]])
    found = spread(has_token, dims)
    assert found.shape == shape
    # By places: entry (b, t, i) of the factors in their order, then joined as the dims say.
    known: dict[Any, Any] = {B: 2, T: 3}
    sizes = [known.get(factor, factor) for dim in dims for factor in dim or (1,)]
    axes = {factor: place for place, factor in enumerate(f for dim in dims for f in dim or (1,)) if factor in (B, T)}
    expected = [has_token[at[axes[B]] if B in axes else 0, at[axes[T]]] for at in itertools.product(*map(range, sizes))]
    assert found.flatten().tolist() == [bool(x) for x in expected]


def sums_of(h: Tensor, labels: Tensor) -> list[Tensor]:
    """Each is another number where a row without a token counts."""
    each = h.square().mean(-1)
    flat = h.flatten(0, 1)
    return [
        each.sum(),
        (each > 0.5).sum(),
        (labels > 3).flatten().float().cos().sum(0),
        torch.count_nonzero(h.argmax(-1) + 1),
        torch.einsum("btc,btc->", h, h.tanh()),
        (flat.T @ flat).sum(),
        torch.dot(each.flatten(), each.flatten()),
        h.transpose(1, 2).cos().flatten(1).sum(),
        F.mse_loss(h, h.detach() + 1, reduction="sum"),
        F.binary_cross_entropy_with_logits(each, (labels > 3).float(), reduction="sum"),
        F.poisson_nll_loss(each, labels.float(), reduction="sum"),
        F.cross_entropy(flat, labels.flatten(), ignore_index=1, reduction="sum"),
        checkpoint(lambda x: x.exp().sum(), each, use_reentrant=False),  # pyright: ignore[reportUnknownLambdaType]
        torch.ones_like(each).sum(),
        (torch.arange(h.shape[1]) + 1.0).log().sum(),
    ]


class Sums(PackedModel):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        own = super().loss(logits, labels, num_items)
        found = sums_of(logits, labels)
        return own + sum(x for x in found if x.requires_grad), *found


def step(model: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    loss, *others = model(**values)
    loss.backward()
    return {f"sum {i}": x.detach() for i, x in enumerate([loss, *others])}


def step_of_rank(mesh: DeviceMesh, batch: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), "head_tail", inner="aot_eager")
    model = Sums()
    torch._dynamo.reset()
    with sharding.shard(batch) as local:
        parts = step(torch.compile(model, backend=cp.backend(sharding), fullgraph=True), dict(local))
    cp.sum_gradients(model.parameters(), sharding)
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.numpy() for name, x in parts.items()}, grads


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sums_are_those_of_one_process(pool: Pool, rows: int) -> None:
    batch = packed_batch(rows, 13)
    batch["labels"] = batch["labels"].clamp(min=0)
    model = Sums()
    expected = step(model, batch)
    ranks = pool.run(2, step_of_rank, batch)
    for name, value in expected.items():
        total = sum(torch.as_tensor(parts[name]).double() for parts, _ in ranks)
        torch.testing.assert_close(total, value.double(), rtol=1e-5, atol=1e-6, msg=name)
    for _, grads in ranks:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(torch.from_numpy(grads[name]), parameter.grad, rtol=1e-4, atol=1e-4)


class Proven(PackedModel):
    """Each term is 0 in rows without a token."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        keep = labels != -100
        z = torch.where(keep, logits.logsumexp(-1).square(), 0.0)
        return super().loss(logits, labels, num_items) + z.sum() + (logits[..., 0] * keep).sum(), keep.sum()


def test_what_is_proven_to_be_zero_is_left_alone() -> None:
    report = judge(Proven()).locality
    assert not report.refusals
    assert not report.inserts


def test_the_report_says_where_a_sum_is_masked() -> None:
    report = cp.explain(Sums(), SHARDING)(**packed_batch())
    assert any("each.sum()" in line and "fill a rank up" in line for line in report.inserts), report.inserts
    assert "inserted" in str(report)
    assert "+where: float32[1, S" in report.diff.replace("where_1", "where"), report.diff
