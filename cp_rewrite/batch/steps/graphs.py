"""Which graphs the calls of a batch run: the same on all ranks. A difference that no collective meets, as of a flag
that changes numbers alone, shows one batch later; one that ranks wait in, by their heartbeats."""

from __future__ import annotations

import torch

from cp_rewrite.batch import progress
from cp_rewrite.sharding import Sharding

from . import later


def enter_graph(sharding: Sharding, number: int) -> None:
    """Note that this rank runs the graph of this number, by which all ranks know it."""
    progress.enter_graph(sharding.group_name, number)
    if later.watched(sharding):
        later.add(sharding, _check_graphs, "", torch.tensor([number], dtype=torch.float64))


def _check_graphs(_: str, ranks: list[list[float]]) -> None:
    different = [rank for rank, values in enumerate(ranks) if values != ranks[0]]
    if different:
        raise RuntimeError(
            f"cp_rewrite: ranks {different} of the group ran another graph than rank 0 in a call of a batch before "
            f"this one: {progress.OTHER_CALL}"
        )
