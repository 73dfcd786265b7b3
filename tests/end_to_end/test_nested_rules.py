"""Models that are right are right inside of a checkpoint too: one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.border.model import TOKENS
from tests.helpers import packed_model

from . import (
    test_chunked_losses,
    test_fewer_tokens,
    test_neighbours,
    test_own_backward,
    test_picked,
    test_resolved,
    test_scans,
    test_tables,
)


class Checkpointed(nn.Module):
    """All of a model in a checkpoint; of several losses the sum."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        out: Any = checkpoint(self.model, use_reentrant=False, **batch)
        return out if isinstance(out, Tensor) else sum(out.values(), out.popitem()[1] * 0.3)


Make = Callable[[Sequence[str]], nn.Module]
PACKED = packed_model.packed_batch(1, 13), packed_model.TOKENS
CHUNKED = [name for name in test_chunked_losses.LOSSES if name != "of_checkpoints"]
WRITTEN = ("load_balanced", "batch_norm")
"""A buffer that is written to can't be an input of a checkpoint."""
MODELS: dict[str, tuple[Make, Sequence[str], tuple[Mapping[str, Any], Mapping[str, int]]]] = {
    "neighbours": (test_neighbours.Neighbours, test_neighbours.CASES, PACKED),
    "fewer": (test_fewer_tokens.Fewer, test_fewer_tokens.CASES, PACKED),
    "tables": (test_tables.Tables, [*test_tables.MIXES], PACKED),
    "functions": (test_own_backward.Functions, test_own_backward.CASES, PACKED),
    "sums": (test_resolved.Resolved, [name for name in test_resolved.CASES if name not in WRITTEN], PACKED),
    # checkpoints of chunks in a checkpoint are refused
    "chunks": (lambda names: test_chunked_losses.Chunked(names[0]), CHUNKED, PACKED),
    "scans": (test_scans.model_of, [*test_scans.MIXES], (test_scans.packed(1, 13), {**TOKENS, "position_ids": 1})),
    "picked": (test_picked.Picked, [*test_picked.LOSSES], (test_picked.packed(1, 13), TOKENS)),
}
CASES = [
    (kind, list(names[first :: 1 + len(names) // 6]) if kind != "chunks" else [names[first]])
    for kind, (_, names, _) in MODELS.items()
    for first in range(1 + len(names) // 6 if kind != "chunks" else len(names))
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), CASES)
def test_rules_hold_in_a_checkpoint(kind: str, names: Sequence[str]) -> None:
    make, _, (batch, tokens) = MODELS[kind]
    torch._dynamo.reset()
    sharding = cp.Sharding(2, tokens, cp.DocumentIds("doc_ids"), "head_tail")
    assert cp.check(Checkpointed(make(names)).double(), sharding, batch).largest <= 1e-9


class Region(packed_model.PackedModel):
    """Its attention is a region that is compiled once, for two calls: that of one call is no region."""

    def mix(self, h: Tensor) -> Tensor:
        return self.attended(h, None)

    @torch.compiler.nested_compile_region
    def attended(self, h: Tensor, mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
        return super().attended(h, None)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_region_runs_on_the_batch_alone() -> None:
    batch, tokens = PACKED
    torch.use_deterministic_algorithms(True)  # memory that is not written holds the largest whole numbers then
    try:
        report = cp.check(Region().double(), cp.Sharding(2, tokens, cp.WholeRows()), batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.largest <= 1e-9
