"""Tokens of a tensor, cut to what one rank owns, and joined again from all ranks' parts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.batch.active.plan import to_device
from cp_rewrite.batch.active.take_tokens import beside, take_tokens
from cp_rewrite.planning.batch_plan import BatchPlan


def cut_tokens(x: Tensor, dim: int, indices: NDArray[np.int64], fill: float) -> Tensor:
    """What one rank gets of a tensor of the global batch. Inverse: `join_tokens` of all ranks' parts.

        T = 6 tokens of one row     a b c d e f
        indices                     0 5 -1
        result                      a f fill

    Args:
        x: T tokens at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        indices: (B, T_l) int64: the tokens to take of each row of the batch; -1: `fill`.
    Returns:
        x with T_l entries at `dim`.
    """
    cut = take_tokens(x, dim, to_device(torch.from_numpy(np.maximum(indices, 0)), x.device))
    if not (indices < 0).any():
        return cut
    hole = to_device(torch.from_numpy(indices < 0), x.device)
    return cut.masked_fill(beside(hole, x, dim), fill)


def join_tokens(x: Tensor, dim: int, plan: BatchPlan) -> Tensor:
    """A tensor of the global batch from all ranks' parts of it, which stand one behind another along `dim`.

    T = 4 tokens, rank 0 owns 0 and 3     parts 0 3 | 1 2     sources 0 2 3 1
    """
    sources = np.empty((len(plan.rows), plan.rows[0].total), dtype=np.int64)
    for rank in range(plan.world_size):
        for row, local in enumerate(plan.local_indices(rank)):
            sources[row, local[local >= 0]] = rank * plan.local_size + np.flatnonzero(local >= 0)
    return cut_tokens(x, dim, sources, 0)
