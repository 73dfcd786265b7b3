"""What a mask that comes in as an argument says, in terms of the row: `shard` compares it with every batch's documents.

mask(b, q, k)     Eq(document(b, q) - document(b, k), 0) & (k - q <= 0)
added to logits   Select(the same, 0, -oo or finfo.min or -1e9 …)
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
import torch.fx as fx

from cp_rewrite.batch.masks.argument import DROPPED, MaskArgument
from cp_rewrite.passes.graph.canonicalize import Ref

from .context import Leaf, RuleContext
from .symbolic import ONE, ZERO, Expr, Index, Select, SymTensor, Value, compare, number


def given_mask(context: RuleContext, argument: MaskArgument, node: fx.Node, ref: Ref) -> SymTensor:
    """The meaning of a mask of the batch: of shape (T, T), (B, T, T) or (B, H, T, T), where B and H may be 1."""
    shape: tuple[Expr, ...] = tuple(context.size(s) for s in ref.shape)
    mask, whose = argument.mask, f"{argument.name}'s documents"
    rows = shape[0] if len(shape) > 2 else ONE
    tokens = shape[len(shape) - 1]
    by_side = {
        side: Leaf(f"{whose}, of the {side}", node, (rows, tokens), sympy.Function(f"{whose}, {side}"), role=side)
        for side in ("query", "key")
    }
    context.leaves |= {leaf.function: leaf for leaf in by_side.values()}
    dropped = _dropped(context, argument, node, ref.dtype)

    def at(index: Index) -> Value:
        row, q, k = index[0] if len(shape) > 2 else ZERO, *index[-2:]
        keep: Any = sympy.true
        if mask.packed:
            keep = compare("eq", by_side["query"].function(row, q), by_side["key"].function(row, k))
        if mask.right is not None:
            keep = sympy.And(keep, compare("le", k - q, number(mask.right)))
        if mask.left is not None:
            keep = sympy.And(keep, compare("le", q - k, number(mask.left)))
        if argument.kind == "adds":
            return Select(keep, ZERO, dropped)
        flag = keep if argument.kind == "shows" else sympy.Not(keep)
        return flag if ref.dtype is torch.bool else Select(flag, ONE, ZERO)

    return SymTensor(shape, ref.dtype, at)


def _dropped(context: RuleContext, argument: MaskArgument, node: fx.Node, dtype: torch.dtype) -> Value:
    """What an additive mask holds where keys are not seen: any of `DROPPED`, so that no answer may hang on which."""
    trouble = f"the mask asks which number {argument.name!r} holds where a key is not seen"
    which = Leaf(trouble, node, (), sympy.Function(f"dropped by {argument.name}"), trouble=trouble)
    context.leaves[which.function] = which
    value: Value = -sympy.oo
    for place, held in enumerate(DROPPED):
        exact = number(torch.tensor(held, dtype=torch.float64).to(dtype).item()) if dtype.is_floating_point else ZERO
        value = Select(compare("eq", which.function(ZERO), number(place)), exact, value)
    return value
