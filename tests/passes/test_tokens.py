"""Which inputs of a graph carry tokens, and one refusal for one mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.torch_internals import hint
from tests.helpers.packed_model import SHARDING, PackedModel, capture, judge

DYNAMIC = {"x": 1, "pos": 1, "labels": 1, "shift_labels": 1}


def annotate(tokens: dict[str, int], **more: Any) -> cp.Sharding:
    return cp.Sharding(4, tokens, cp.CuSeqlens("cu"), **more)


def axis_of(batch: dict[str, Tensor], sharding: cp.Sharding, cut: dict[str, int] | None = None) -> TokenAxis:
    def model(**batch: Tensor) -> Tensor:
        return torch.stack([value.sum() for value in batch.values()])

    def look(gm: fx.GraphModule) -> TokenAxis:
        return TokenAxis.read(gm, sharding, cut).unified()

    return capture(model, batch, look, {name: dim for name, dim in DYNAMIC.items() if name in batch})


def test_places_names_and_sizes() -> None:
    batch = {
        "cu": torch.zeros(3),
        "labels": torch.zeros(2, 9),
        "x": torch.zeros(2, 9, 4),
        "shift_labels": torch.zeros(2, 9),
    }
    axis = axis_of(batch, annotate({"x": 1, "labels": 1}), {"shift_labels": 1})
    assert not axis.refusals
    assert sorted(axis.names.values()) == sorted(batch)
    # Only the batch's cut makes `shift_labels`.
    assert [(found.name, found.dim) for found in axis.inputs] == [("labels", 1), ("x", 1), ("shift_labels", 1)]
    nodes = axis.inputs[0].node.graph.find_nodes(op="placeholder")  # symbols' among them
    assert [nodes[found.place] for found in axis.inputs] == [found.node for found in axis.inputs]
    assert [hint(found.tokens) for found in axis.inputs] == [9, 9, 9]
    assert axis.rows == 2
    (count,) = axis.counts  # three symbols, which guards have made one
    assert count.is_Symbol


def refused(batch: dict[str, Tensor], sharding: cp.Sharding) -> str:
    (refusal,) = axis_of(batch, sharding).refusals
    assert refusal.reason is cp.Reason.TOKEN_INPUT
    return refusal.detail


def test_an_argument_without_the_dim() -> None:
    batch = {"x": torch.zeros(2, 9), "pos": torch.zeros(9, 2)}
    detail = "tokens['pos'] is dim 2, but pos has shape (9, s"
    assert refused(batch, annotate({"x": 1, "pos": 2})).startswith(detail)
    assert refused(batch, annotate({"x": 1}, block_tokens={"pos": 2})).startswith("block_" + detail)


def test_no_argument_that_carries_tokens() -> None:
    assert refused({"pos": torch.zeros(9)}, annotate({"x": 1})) == (
        "none of the arguments named in tokens (x) reaches the graph"
    )


def test_other_numbers_of_tokens_and_of_rows() -> None:
    sharding = annotate({"x": 1, "pos": 1})
    found = refused({"x": torch.zeros(2, 9), "pos": torch.zeros(2, 8)}, sharding)
    assert found.startswith("pos has s")
    assert " tokens in dim 1, x has s" in found
    found = refused({"x": torch.zeros(3, 9), "pos": torch.zeros(1, 9)}, sharding)
    assert found.startswith("pos has 1 rows of tokens, x has 3, whose tokens are dim 1: expand it before the cut")
    found = refused({"pos": torch.zeros(1, 9), "x": torch.zeros(3, 9)}, sharding)
    assert found.startswith("pos has 1 rows of tokens, x has 3, whose tokens are dim 1: expand it before the cut")


def test_one_token() -> None:
    assert refused({"x": torch.zeros(2, 1)}, annotate({"x": 1})).startswith("a rank has 1 token")


def test_one_mistake_is_refused_once() -> None:
    """Matching and the locality check leave to the axis what is wrong with it."""
    sharding = dataclasses.replace(SHARDING, tokens={**SHARDING.tokens, "labels": 2})
    verdict = judge(PackedModel(), sharding=sharding, dynamic=False)
    assert len(verdict.refusals) == 1, str(verdict)
    assert "tokens['labels'] is dim 2" in str(verdict)
