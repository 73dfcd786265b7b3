"""Evaluate a mask's ATen calls symbolically: each becomes a function from an index to the element there.

    ids[:, :, None]        (b, q, k) -> ids(b, q)
    arange(T)[None, None]  (b, q, k) -> k
    tril of ones(T, T)     (q, k)    -> k - q <= 0

A call without a rule becomes a leaf that says why (`Leaf.trouble`): it is refused only where the mask hangs on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from cp_rewrite.batch.masks import DROPPED, MaskArgument
from cp_rewrite.passes.graph.canonicalize import Call, Canonical, Ref
from cp_rewrite.passes.values.state import Table

from .context import Leaf, Rule, RuleContext
from .rules import DIMS, ELEMENTS, MOVES
from .symbolic import (
    ONE,
    ZERO,
    Expr,
    Index,
    Inexact,
    Select,
    SymTensor,
    Undecidable,
    Value,
    as_element,
    choose,
    compare,
    number,
    truth,
)

RULES: dict[str, Rule] = {op: rule for ops, rule in {**MOVES, **ELEMENTS, **DIMS}.items() for op in ops.split()}


@dataclass
class Evaluator(RuleContext):
    """Gives every tensor (`Ref`) of a canonical slice its meaning.

    Args:
        masks: leaf nodes that stand in for masks of the batch. tables: those that are buffers of known numbers.
        tensors: the meanings so far, by `Ref.index`.
    """

    masks: Mapping[fx.Node, MaskArgument] = field(default_factory=dict[fx.Node, MaskArgument])
    tables: Mapping[fx.Node, Table] = field(default_factory=dict[fx.Node, Table])
    tensors: dict[int, SymTensor | None] = field(default_factory=dict)

    def run(self, canonical: Canonical) -> SymTensor:
        """The meaning of the slice's output."""
        for node, ref in canonical.leaves.items():
            known = self.given.get(node)
            if node in self.masks:
                self.tensors[ref.index] = given_mask(self, self.masks[node], node, ref)
            elif node in self.tables:
                self.tensors[ref.index] = table_tensor(self, self.tables[node], ref)
            else:
                leaf = self.leaf(self.name_of(node), node, ref) if known is None else self._always(known, ref)
                self.tensors[ref.index] = leaf
        for ref, value in canonical.constants.items():
            self.tensors[ref.index] = self._constant_tensor(ref, value)
        for call in canonical.calls:
            self._evaluate(call)
        out = self._arguments(canonical.output)
        assert isinstance(out, SymTensor)
        return out

    def copied(self, canonical: Canonical) -> Leaf | None:
        """The leaf whose elements the slice's output, of one dim, holds in turn, in another dtype perhaps."""
        values = self.run(canonical)
        index = tuple(self.symbol("i", size) for size in values.shape)
        value = values.at(index)
        alike = (leaf for leaf in self.leaves.values() if not leaf.trouble and leaf.shape == values.shape)
        return next((leaf for leaf in alike if leaf.function(*index) == value), None)

    def _always(self, value: Any, ref: Ref) -> SymTensor:
        return SymTensor(tuple(self.size(s) for s in ref.shape), ref.dtype, lambda _: value)

    def _constant_tensor(self, ref: Ref, value: float) -> SymTensor:
        element = truth(number(value)) if ref.dtype is torch.bool else number(value)
        return SymTensor(tuple(self.size(s) for s in ref.shape), ref.dtype, lambda _: element)

    def _evaluate(self, call: Call) -> None:
        self.call = call
        rule = RULES.get(self.op)
        try:
            if rule is None:
                raise Undecidable(f"{call.func} has no rule")
            out = rule(self, *self._arguments(call.args), **self._arguments(call.kwargs))
        except Undecidable as error:
            trouble = str(error)
            out = tuple(None if r is None else self.leaf(str(call.func), call.node, r, trouble) for r in call.outputs)
        outs = out if isinstance(out, tuple | list) else (out,)
        for ref, value in zip(call.outputs, outs, strict=False):
            if ref is not None:
                self.tensors[ref.index] = value if value is None else self._guarded(value, call, ref)

    def _guarded(self, tensor: SymTensor, call: Call, ref: Ref) -> SymTensor:
        """Elements as `ref`'s dtype holds them. What a rule can't read becomes a read of a leaf that says why."""

        def at(index: Index) -> Value:
            try:
                return as_element(tensor.at(index), ref.dtype, self.leaf_of)
            except Undecidable as error:
                inexact = error.value if isinstance(error, Inexact) else None
                return self.leaf(str(call.func), call.node, ref, str(error), inexact).at(index)

        return SymTensor(tensor.shape, tensor.dtype, at)

    def _arguments(self, args: Any) -> Any:
        """Arguments of a call as rules take them: tensors' meanings for Refs, expressions for symbolic sizes."""
        if isinstance(args, Ref):
            if args.index not in self.tensors:  # made while tracing, by `torch.tensor([1, 2])`
                self.tensors[args.index] = self.leaf("tensor", None, args, "a constant tensor of several numbers")
            return self.tensors[args.index]
        if isinstance(args, dict):
            return {k: self._arguments(v) for k, v in args.items()}
        if isinstance(args, tuple | list):
            return [self._arguments(a) for a in args]
        if isinstance(args, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.size(args)
        return args


def table_tensor(context: RuleContext, table: Table, ref: Ref) -> SymTensor:
    """The meaning of a buffer that holds a number for each pair of places.

    self.bias[..., i, j] of tril(ones(N, N))      Select(0 <= i - j, 1, 0)
    """
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


def given_mask(context: RuleContext, argument: MaskArgument, node: fx.Node, ref: Ref) -> SymTensor:
    """The meaning of a mask of the batch: of shape (T, T), (B, T, T) or (B, H, T, T), where B and H may be 1. `shard`
    compares it with every batch's documents.

    mask(b, q, k)     Eq(document(b, q) - document(b, k), 0) & (k - q <= 0)
    added to logits   Select(the same, 0, -oo or finfo.min or -1e9 …)
    """
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
    """The value of an additive mask where keys are not seen: any of `DROPPED`, so that no answer may hang on which."""
    trouble = f"the mask asks which number {argument.name!r} holds where a key is not seen"
    which = Leaf(trouble, node, (), sympy.Function(f"dropped by {argument.name}"), trouble=trouble)
    context.leaves[which.function] = which
    value: Value = -sympy.oo
    for place, low in enumerate(DROPPED):
        exact = number(torch.tensor(low, dtype=torch.float64).to(dtype).item()) if dtype.is_floating_point else ZERO
        value = Select(compare("eq", which.function(ZERO), number(place)), exact, value)
    return value
