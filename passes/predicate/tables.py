"""What a buffer that holds a number for each pair of places says, in terms of its indices.

self.bias[..., i, j] of tril(ones(N, N))      Select(0 <= i - j, 1, 0)
"""

from __future__ import annotations

import sympy
import torch

from cp_rewrite.passes.graph.canonicalize import Ref
from cp_rewrite.passes.values.table import Table

from .context import RuleContext
from .symbolic import Index, SymTensor, Value, choose, compare, number, truth


def table_tensor(context: RuleContext, table: Table, ref: Ref) -> SymTensor:
    """The meaning of a buffer."""
    inside, outside = (
        truth(number(n)) if ref.dtype is torch.bool else number(n) for n in (table.inside, table.outside)
    )

    def at(index: Index) -> Value:
        if table.inside == table.outside:
            return inside
        bounds = (("ge", table.low), ("le", table.high))
        distance = index[-2] - index[-1]
        kept = sympy.And(*(compare(op, distance, number(bound)) for op, bound in bounds if bound is not None))
        return choose(kept, inside, outside)

    return SymTensor(tuple(context.size(s) for s in ref.shape), ref.dtype, at)
