"""Places in the whole row, as numbers of the model say them on a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.extents import Extents


@dataclass(frozen=True)
class Place:
    """Token `number` of the row, or with `from_end`, token T + `number`."""

    number: int
    from_end: bool

    @property
    def next(self) -> Place:
        """The one behind it."""
        return Place(self.number + 1, self.from_end)

    @staticmethod
    def count(first: Place, end: Place, step: int, tokens: Tensor) -> Tensor:
        """(N,) int64: the places from `first` to before `end`. tokens: (1,), T."""
        counted = torch.arange(first.number, end.number, step, device=tokens.device)
        return counted + tokens if first.from_end else counted


def place_of(extents: Extents, number: Any) -> Place:
    """The place that a number of the graph says: 3, -1, or the shard's tokens minus 1."""
    size = extents.size(number)
    if isinstance(size, int):
        return Place(size, size < 0)
    rest = sympy.simplify(size - extents.tokens)
    if not rest.is_Integer:
        raise Mixes("a place that is made from the number of tokens in another way")
    return Place(int(rest), True)


def end_of(extents: Extents, end: Any) -> Place:
    """Where a slice ends. One to the end of the row ends nowhere, or at the largest number there is."""
    last = end is None or (isinstance(end, int) and end >= torch.iinfo(torch.int64).max)
    return Place(0, True) if last else place_of(extents, end)
