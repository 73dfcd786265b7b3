"""The first T rows of a table, looked up by numbers that tokens have, as positions are.

cos = self.cos[:T]; cos[position_ids]       a shard takes fewer rows than the numbers of its tokens ask for: all of
                                            the table stays there. -1 is row T - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Dims, Mixes, T, checked, has
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.values.resolution import Ranks, RunOverRanks


def embedding(call: Call) -> tuple[States, RunOverRanks]:
    table, index = call.arg("weight"), call.arg("indices")
    rows = call.rows(index)
    if rows is None or call.arg("scale_grad_by_freq") or call.arg("padding_idx") not in (None, -1):
        raise Mixes("embedding of something else than tokens")
    _look_up(call, table, [index], 0)
    return Rows((*rows.dims, None)), LookedUp("indices")


def index_select(call: Call) -> tuple[States, RunOverRanks]:
    table, index = call.first, call.arg("index")
    dim = call.arg("dim") % table.ndim
    rows = call.rows(index)
    if not _is_table(call, table) or rows is None:
        raise Mixes("looks up something else than the first rows of a table")
    _look_up(call, table, [index], dim)
    dims: Dims = tuple(rows.dims[0] if i == dim else None for i in range(table.ndim))
    return Rows(checked(dims)), LookedUp("index")


def index(call: Call) -> tuple[States, RunOverRanks]:
    """table[numbers]: of the first dim alone."""
    table: Tensor = call.first
    given: list[Tensor | None] = list(call.arg("indices"))
    numbers = given[0]
    rows = (
        None if numbers is None or len(given) > 1 or numbers.dtype in (torch.bool, torch.uint8) else call.rows(numbers)
    )
    if not _is_table(call, table) or numbers is None or rows is None:
        raise Mixes("looks up something else than the first rows of a table")
    _look_up(call, table, [numbers], 0)
    return Rows((*rows.dims, *[None] * (table.ndim - 1))), LookedUp("indices")


def _is_table(call: Call, table: Tensor) -> bool:
    rows = call.rows(table)
    return rows is not None and rows.table is not None


def _look_up(call: Call, table: Tensor, indices: Sequence[Tensor], dim: int) -> None:
    rows = call.rows(table)
    if rows is None or rows.table is None or not has(rows.dims[dim], T):
        raise Mixes("looks up something else than the first rows of a table")
    if any(call.rows(i) is None and call.state(i) is not REPLICATED for i in indices):
        raise Mixes("looks up a table by sums")
    call.use_positions(*indices)
    call.events.looked_up.append(rows.table)


@dataclass(frozen=True)
class LookedUp:
    """The op itself; numbers below 0 count from the row's end. index: the argument that has them."""

    index: str
    why: ClassVar[str] = "of a table that stays whole"

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        given = args[self.index]
        numbers: Tensor = given[0] if isinstance(given, list | tuple) else given
        numbers = torch.where(numbers < 0, numbers + ranks.row_tokens, numbers) if self.index != "index" else numbers
        return func(**{**args, self.index: [numbers] if isinstance(given, list | tuple) else numbers})
