"""Sums of token rows by segment: of documents, say. A rank adds up its own tokens; the sums are a part.

zeros(N).index_add(0, doc_ids, x)       zeros(B, N).scatter_add(1, doc_ids, x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.batch.active import PlanInput
from cp_rewrite.passes.locality.claims.dims import B, Dims, Mixes, T, has
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, WHOLE, Partial
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States
from cp_rewrite.passes.locality.rules.spread import can_spread, has_row, reads_of
from cp_rewrite.passes.values.resolution import Ranks, Whole


def added(call: Call) -> tuple[States, Whole]:
    """scatter_add, scatter_reduce with "sum", index_add: token rows added to a tensor that is the same on all ranks."""
    x, index, source = call.first, call.arg("index"), call.arg("src", "source")
    rows, dim = call.rows(source), call.arg("dim") % max(x.ndim, 1)
    if call.state(x) is not REPLICATED or rows is None or not can_spread(rows):
        raise Mixes(f"{call.name} of something else than token rows")
    if call.arg("reduce") not in (None, "sum") or call.arg("include_self") is False:
        raise Mixes(f"{call.name} of other kinds than a sum")
    if any(entry not in (None, (B,)) for i, entry in enumerate(rows.dims) if i != dim) or not has(rows.dims[dim], T):
        raise Mixes(f"{call.name} along another dim than that of the tokens")
    mine = call.entries(source)
    if call.entries(index) != ([mine[dim]] if call.name == "index_add" else mine):
        raise Mixes(f"{call.name} of rows that are not cut like their indices")
    call.use_positions(source, index)
    return Partial() if x.is_floating_point() else WHOLE, Added(rows.dims, "src" if "src" in call.bound else "source")


@dataclass(frozen=True)
class Added:
    """dims: of the rows. name: of the argument that holds them."""

    dims: Dims
    name: str

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return reads_of(self.dims)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        base, rows = args["self"], args[self.name]
        kept = torch.where(has_row(ranks, self.dims), rows, rows.new_zeros(()))
        written = func._schema.is_mutable
        if base.is_floating_point():
            base = base.div_(ranks.world_size) if written else base / ranks.world_size
            return func(**{**args, "self": base, self.name: kept})
        # Whole numbers can't be shared out.
        before = base.clone()
        part = func(**{**args, "self": base, self.name: kept}) - before
        return base.copy_(before + ranks.sum(part)) if written else before + ranks.sum(part)
