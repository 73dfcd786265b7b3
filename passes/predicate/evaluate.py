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

import torch
import torch.fx as fx

from cp_rewrite.batch.masks.argument import MaskArgument
from cp_rewrite.passes.graph.canonicalize import Call, Canonical, Ref
from cp_rewrite.passes.values.table import Table

from .context import Rule, RuleContext
from .exact import Inexact, held
from .given_masks import given_mask
from .rules.dims import DIMS
from .rules.elements import ELEMENTS
from .rules.moves import MOVES
from .symbolic import Index, SymTensor, Undecidable, Value, number, truth
from .tables import table_tensor

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
                return held(tensor.at(index), ref.dtype, self.leaf_of)
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
