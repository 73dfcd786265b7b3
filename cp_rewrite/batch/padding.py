"""Tokens of no document. Attention leaves them out, whatever the model's mask says of them: nothing may count them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.arguments import IGNORE_INDEX
from cp_rewrite.packing import PositionIds
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding

from .read_documents import text_positions


def padding_tokens(plan: BatchPlan) -> NDArray[np.bool_] | None:
    """(B, T) bool: the tokens of no document; None where there are none."""
    if not plan.padding:
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


@dataclass(frozen=True)
class PaddingReaders:
    """Lines of a model that are the same on ranks only for batches whose padding is none, or apart.

    Args:
        sums: what takes in the values that attention gave to tokens of no document.
        ahead: attention whose queries see keys after them.
    """

    sums: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()

    def check(self, sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any]) -> None:
        """Raise where a batch has padding that one of the lines reads, on every rank.

        Raises:
            ValueError: it names the first such line.
        """
        count = plan.padding
        if count and self.sums:
            raise ValueError(
                f"{self.sums[0]} takes in all tokens, but {count} of this batch are padding: they belong to no "
                "document and attend to nothing here, whatever the model's mask says. Leave them out of the sum (by "
                "each token's own labels != -100, or document ids >= 0; the next token's, labels[:, 1:], may be a "
                "document's: sharding.shard(batch, shift_labels=True) shifts them), or give padding a document of "
                "its own"
            )
        if count and self.ahead and (row := _joined_padding(sharding, plan, batch)) is not None:
            raise ValueError(
                f"{self.ahead[0]} sees tokens after its own, and in row {row} positions go on behind the lengths, so "
                "that a document sees padding there: let positions of padding start at 0"
            )


def _joined_padding(sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any]) -> int | None:
    """The first row in which positions make padding the end of a document; None: in none, or they are on a GPU."""
    packing = sharding.packing
    value: Any = batch.get(packing.arg) if isinstance(packing, PositionIds) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return None
    dim = sharding.tokens[packing.arg]
    positions = text_positions(value, dim).movedim(min(dim, 1), -1).reshape(len(plan.rows), -1)
    ends = [int(row.lengths.sum()) for row in plan.rows]  # padding is at the end of lengths
    return next((i for i, end in enumerate(ends) if end < positions.shape[1] and positions[i, end] != 0), None)
