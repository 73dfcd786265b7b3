"""Sums over tokens of no document: which of them take in what attention gave to padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cp_rewrite as cp
from tests.helpers.packed_model import TOKENS, WIDTH, PackedModel, judge


class PaddedSum(PackedModel):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits.square().sum() / num_items


def test_sums_over_padding_are_reported() -> None:
    report = judge(PaddedSum()).locality
    assert not report.refusals
    assert len(report.inserts) == 1


class Summed(PackedModel):
    """More sums over all tokens, of what each of them has."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor, num_items: Tensor
    ) -> Any:
        self.doc_ids = doc_ids
        return super().forward(input_ids, position_ids, doc_ids, labels, num_items)

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        total = super().loss(logits, labels, num_items)
        for each, _ in SUMS.values():
            more = each(logits, labels, self.doc_ids)
            total = total + more.sum() / num_items
        return total


SUMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "all": (lambda x, labels, ids: x.logsumexp(-1), True),
    "other label": (lambda x, labels, ids: x.logsumexp(-1) * (labels != 7), True),
    "one id of padding": (lambda x, labels, ids: x.logsumexp(-1) * (ids != -1), True),
    "ids of padding too": (lambda x, labels, ids: x.logsumexp(-1) * (ids >= -1), True),
    "ids that wrap": (lambda x, labels, ids: x.logsumexp(-1).masked_fill(ids.short() < 0, 0.0), True),
    "padding alone": (lambda x, labels, ids: torch.where(ids < 0, x.sum(-1), 0.0), True),
    "labels": (lambda x, labels, ids: x.logsumexp(-1) * (labels != -100), False),
    "ids": (lambda x, labels, ids: x.logsumexp(-1) * (ids >= 0), False),
    "ids as int": (lambda x, labels, ids: x.logsumexp(-1) * (ids.int() > -1) * 2, False),
    "filled": (lambda x, labels, ids: x.logsumexp(-1).masked_fill(ids < 0, 0.0), False),
    "and": (lambda x, labels, ids: ((x.argmax(-1) == labels) & (ids >= 0)).float(), False),
    "ones": (lambda x, labels, ids: torch.ones_like(x[..., 0]), False),
    "unattended": (lambda x, labels, ids: ids.float(), False),
}


def test_sums_over_tokens_of_no_document_are_reported() -> None:
    report = judge(Summed()).locality
    assert not report.refusals
    sums = [node for node in report.padding_sums[0].graph.nodes if "more.sum()" in (node.stack_trace or "")]
    sums = [node for node in sums if node.target == "sum"]
    assert len(sums) == len(SUMS)
    found = {name: node in report.padding_sums for name, node in zip(SUMS, sums, strict=True)}
    assert found == {name: counts for name, (_, counts) in SUMS.items()}
    assert len(report.padding_sums) == sum(found.values())


class SummedBlock(nn.Module):
    def forward(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        return hidden_states.sum() + 0 * input_ids.sum()


def test_a_blocks_arguments_were_attended() -> None:
    batch = {"input_ids": torch.ones(1, 14, dtype=torch.long), "hidden_states": torch.ones(1, 14, WIDTH)}
    blocks = cp.Sharding(4, TOKENS, cp.DocumentIds("doc_ids"), block_tokens={"hidden_states": 1})
    report = judge(SummedBlock(), batch, blocks, also_dynamic=["hidden_states"]).locality
    assert len(report.inserts) == 2
    assert ["hidden_states.sum()" in (node.stack_trace or "") for node in report.padding_sums] == [True]
    given = cp.Sharding(4, {**TOKENS, "hidden_states": 1}, cp.DocumentIds("doc_ids"))
    assert not judge(SummedBlock(), batch, given).locality.padding_sums
