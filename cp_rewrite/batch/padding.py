"""Tokens of no document: no attention reaches them, so no target may stand on one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.planning.batch_plan import BatchPlan

IGNORE_INDEX = -100
"""Label of a token that is no target (torch's cross_entropy default)."""


def padding_tokens(plan: BatchPlan) -> NDArray[np.bool_] | None:
    """(B, T) bool: the tokens of no document; None where there are none."""
    if all(int(row.lengths.sum()) == row.total for row in plan.rows):
        return None
    return np.stack([row.document_ids() < 0 for row in plan.rows])


def check_labels(name: str, labels: Tensor, dim: int, padding: NDArray[np.bool_], source: str = "") -> None:
    """Raise where a token of no document is a target.

    On one process it would be trained on what the model's own mask lets it see; here it sees nothing.

    Args:
        labels: whole numbers of the global batch, T tokens at `dim`; rows of the batch at `dim - 1`.
        padding: (B, T) bool, of `padding_tokens`.
        source: the argument whose labels these are, moved one token to the front.
    Raises:
        ValueError: it names the first such place. On a GPU, which the host does not wait for, an assertion there.
    """
    shape = [1] * labels.ndim
    shape[dim] = padding.shape[1]
    if len(padding) > 1:
        shape[dim - 1] = len(padding)
    targets = (labels != IGNORE_INDEX) & torch.from_numpy(padding).view(shape).to(labels.device)
    if labels.is_cuda:
        torch._assert_async(~targets.any(), f"{name} has targets at tokens of no document (padding): set them to -100")
    elif labels.device.type == "cpu" and targets.any():
        place: list[int] = targets.nonzero()[0].tolist()
        given = list(place)
        given[dim] += bool(source)
        origin = f" ({source}{given} of the batch, moved one token to the front)" if source else ""
        raise ValueError(
            f"{name}{place} is a target{origin}, but this token belongs to no document: it is padding, which attends "
            f"to nothing here, whatever the model's mask says. Set {source or name}{given} to {IGNORE_INDEX}, or give "
            "padding a document of its own"
        )
