"""Tensors of one process as ranks hold them, and back: rows in the ranks' orders, what fills ranks up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.batch.tokens import cut_tokens
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch

Axes = Sequence[Any]
"""For each dim the factors that it counts: None, or a tuple of "B", "T" and numbers, major first."""


@lru_cache(maxsize=256)
def plan_of(tokens: int, rows: int, ranks: int) -> BatchPlan:
    """Each row of the batch is cut in an order of its own."""
    lengths = [[tokens - 1 - row % (tokens - 1), 1 + row % (tokens - 1)] for row in range(rows)]
    return plan_batch([cp.Documents.from_lengths(each, tokens) for each in lengths], ranks, "dual_chunk")


class Cuts:
    """How a batch of `rows` of `tokens` is cut over ranks."""

    def __init__(self, tokens: int, rows: int, ranks: int) -> None:
        self.plan, self.tokens, self.rows, self.ranks = plan_of(tokens, rows, ranks), tokens, rows, ranks
        self.local = self.plan.local_size

    def cut(self, x: Tensor, dim: int, place: int, labels: bool) -> Tensor:
        """A rank's rows; those without a token are copies of some others, and of labels no targets."""
        indices = self.plan.local_indices(place)
        others = np.random.default_rng(place).integers(0, self.tokens, indices.shape)
        held = indices if labels else np.where(indices < 0, others, indices)
        return cut_tokens(x, dim, held, -100)

    def joined(self, parts: Sequence[Tensor], axes: Axes) -> Tensor:
        """(B or 1, T, …) of ranks' tensors with these axes."""
        fronts = [self.front(x, axes, self.local) for x in parts]
        whole = fronts[0].new_zeros((fronts[0].shape[0], self.tokens, *fronts[0].shape[2:]))
        for place, front in enumerate(fronts):
            for row in range(len(whole)):
                indices = torch.from_numpy(self.plan.local_indices(place)[row])
                whole[row, indices[indices >= 0]] = front[row, indices >= 0]
        return whole

    def front(self, x: Tensor, axes: Axes, tokens: int) -> Tensor:
        """(B or 1, `tokens`, …) the same entries, as a view."""
        sizes, order = [], []
        for dim, size in zip(axes, x.shape, strict=True):
            for factor in dim or (size,):
                order.append(factor)
                sizes.append(tokens if factor == "T" else self.rows if factor == "B" else factor)
        x = x.contiguous().view(sizes).movedim(order.index("T"), 0)
        order = ["T", *(factor for factor in order if factor != "T")]
        return x.movedim(order.index("B"), 0) if "B" in order else x[None]

    def fill(self, x: Tensor, axes: Axes, place: int) -> Tensor:
        """(N, …) the rows of a rank's tensor that are no tokens."""
        front = self.front(x, axes, self.local)
        return front[torch.from_numpy(self.plan.local_indices(place)[: len(front)] < 0)]

    def cut_like(self, whole: Tensor, axes: Axes, like: Tensor, place: int) -> Tensor:
        """A rank's part of a tensor of one process, 0 in rows without a token."""
        local = torch.zeros(like.shape, dtype=whole.dtype)
        front, given = self.front(local, axes, self.local), self.front(whole.contiguous(), axes, self.tokens)
        for row in range(len(front)):
            indices = torch.from_numpy(self.plan.local_indices(place)[row])
            front[row, indices >= 0] = given[row, indices[indices >= 0]]
        return local

    def axes(self, ndim: int, dim: int) -> Axes:
        """Axes of a tensor with its tokens at `dim` and, where a batch has several rows, these in the dim before."""
        return [("T",) if i == dim else ("B",) if i == dim - 1 and self.rows > 1 else None for i in range(ndim)]
