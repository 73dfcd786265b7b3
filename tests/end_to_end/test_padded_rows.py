"""Rows of one document each: padded, with a 2-d padding mask, and whole. On gloo against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.models import build_model
from tests.helpers.packed_model import HEADS, VOCAB, PackedModel
from tests.helpers.pool import Pool

TOKENS = {"input_ids": 1, "position_ids": 1, "attention_mask": 1, "labels": 1}


def padded_batch(lengths: tuple[int, ...], total: int, left: bool = False) -> dict[str, Tensor]:
    index = torch.arange(total)
    marks = torch.stack([index >= total - n if left else index < n for n in lengths]).long()
    ids = torch.randint(0, 64, marks.shape, generator=torch.Generator().manual_seed(total))
    positions = (marks.cumsum(1) - 1).clamp(min=0)
    labels = ids.masked_fill(marks == 0, -100).masked_fill(positions == 0, -100)
    return {"input_ids": ids, "attention_mask": marks, "position_ids": positions, "labels": labels}


BATCHES = [padded_batch((13, 20, 17), 20), padded_batch((16,), 16), padded_batch((9, 14), 15, left=True)]


def steps(model: Any, loss_of: Callable[[dict[str, Tensor]], Tensor]) -> list[tuple[float, dict[str, Tensor]]]:
    found: list[tuple[float, dict[str, Tensor]]] = []
    for batch in BATCHES:
        model.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        found.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    return found


def train_as_rank(mesh: DeviceMesh) -> list[tuple[float, dict[str, Tensor]]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.PaddingMask("attention_mask"), inner="eager")
    model = build_model("llama")
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with sharding.shard(batch, shift_labels=True) as local:
            return compiled(**local).loss

    results: list[tuple[float, dict[str, Tensor]]] = []
    for loss, grads in steps(model, loss_of):
        parts = torch.tensor(loss)
        for x in (parts, *grads.values()):
            torch.distributed.all_reduce(x, group=sharding.group)
        results.append((parts.item(), grads))
    return results


@pytest.mark.slow
def test_padded_rows_equal_one_process(pool: Pool) -> None:
    model = build_model("llama")
    expected = steps(model, lambda batch: model(**batch).loss)
    for results in pool.run(2, train_as_rank):
        for (loss, grads), (wanted, values) in zip(results, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            for name, value in values.items():
                assert float((grads[name] - value).norm() / value.norm()) <= 1e-5, name


class Masked(PackedModel):
    """`of`: the mask of marks (B, T), and of which keys stand at or before a query."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, input_ids: Tensor, marks: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(input_ids)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        index = torch.arange(marks.shape[1], device=marks.device)
        return self.attention(q, k, v, self.of(marks, index[:, None] >= index)).transpose(1, 2).flatten(2)


LOWEST = torch.finfo(torch.float32).min
CAUSAL, WHOLE = cp.PackedMask(), cp.PackedMask(packed=False)
MEANINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], cp.PackedMask]] = {
    "keys": (lambda m, c: c & m.bool()[:, None, None], CAUSAL),
    "equal to 1": (lambda m, c: c & (m == 1)[:, None, None], CAUSAL),
    "added": (lambda m, c: (1.0 - m[:, None, None].float()) * LOWEST + torch.where(c, 0.0, LOWEST), CAUSAL),
    "both": (lambda m, c: (m[:, None, :, None] * m[:, None, None]).bool() & c, CAUSAL),
    "an encoder's": (lambda m, _: m.bool()[:, None, None], cp.PackedMask(causal=False)),
    "not read": (lambda m, c: c.expand(len(m), 1, -1, -1), WHOLE),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("keys", "not read") else [pytest.mark.slow]) for name in MEANINGS]
)
def test_what_masks_of_padding_mean(name: str) -> None:
    of, expected = MEANINGS[name]
    sharding = cp.Sharding(2, {"input_ids": 1, "marks": 1}, cp.PaddingMask("marks"))
    report = cp.explain(Masked(of), sharding)(input_ids=torch.arange(16)[None] % VOCAB, marks=torch.ones(1, 16).long())
    assert [site.mask for site in report.sites] == [str(expected)]
    assert not report.refusals


@pytest.mark.parametrize("right", [None, 0])
def test_masks_of_queries_alone_are_refused(right: int | None) -> None:
    """The next layer's queries, behind padding or before it, would see what padding saw."""
    sharding = cp.Sharding(2, {"input_ids": 1, "marks": 1}, cp.PaddingMask("marks"))
    model = Masked(lambda m, c: ((c | (right is None)) & m.bool()[:, None, :, None]) | torch.eye(len(c)).bool())
    report = cp.explain(model, sharding)(input_ids=torch.arange(16)[None] % VOCAB, marks=torch.ones(1, 16).long())
    assert [refusal.reason for refusal in report.refusals] == [cp.Reason.MASK_NOT_PACKED], str(report)


def test_padding_masks_that_are_none() -> None:
    sharding = cp.Sharding(2, {"marks": 1}, cp.PaddingMask("marks"))
    for marks, said in (([1, 2, 0, 0], "holds 0 and 1"), ([1, 0, 1, 0], "separate runs")):
        with pytest.raises(ValueError, match=said), sharding.shard({"marks": torch.tensor([marks])}):
            pass


def test_whole_rows_are_one_document_each() -> None:
    sharding = cp.Sharding(2, {"idx": 1}, cp.WholeRows(), layout="contiguous")
    with sharding.shard({"idx": torch.arange(16).view(2, 8)}) as local:
        assert [row.lengths.tolist() for row in local.plan.rows] == [[8], [8]]
        assert local["idx"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
