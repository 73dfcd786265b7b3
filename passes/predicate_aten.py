"""Symbolic evaluation of ATen: each call of a canonical slice becomes a function from index to expression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from .canonicalize import Call, Canonical, Ref
from .predicate_rules_dims import DIMS
from .predicate_rules_moves import MOVES
from .predicate_rules_values import VALUES
from .predicate_values import (
    TOKENS,
    ZERO,
    Expr,
    Index,
    SymTensor,
    Value,
    compare,
    number,
    truth,
)
from .predicate_views import Undecidable

Output = SymTensor | tuple[SymTensor | None, ...]


@dataclass(frozen=True)
class Leaf:
    """A tensor that the slice reads but does not compute. Its elements are `function(*index)`."""

    name: str
    node: fx.Node | None
    shape: tuple[Expr, ...]
    function: Any
    trouble: str = ""  # for what has no meaning of its own: why


@dataclass
class Evaluator:
    """Gives every Ref of a canonical slice its meaning.

    Args:
        local_tokens: sizes (ints or symbols' expressions) that count this shard's tokens.
        name_of: what a leaf node is called; its elements are applications of a function of that name.
        given: leaf nodes whose elements are all one known value.
    """

    local_tokens: frozenset[Expr]
    name_of: Callable[[fx.Node], str]
    given: dict[fx.Node, Expr] = field(default_factory=dict)
    leaves: dict[Any, Leaf] = field(default_factory=dict)
    sizes: dict[Expr, Expr] = field(default_factory=dict)
    tensors: dict[int, Output | None] = field(default_factory=dict)
    call: Call | None = None

    def run(self, canonical: Canonical) -> SymTensor:
        for node, ref in canonical.leaves.items():
            known = self.given.get(node)
            self.tensors[ref.index] = self.leaf(self.name_of(node), node, ref) if known is None else _always(known, ref)
        for ref, value in canonical.constants.items():
            self.tensors[ref.index] = self._constant_tensor(ref, value)
        for call in canonical.calls:
            self._evaluate(call)
        out = self.tensors[canonical.output.index]
        assert isinstance(out, SymTensor)
        return out

    def _constant_tensor(self, ref: Ref, value: float) -> SymTensor:
        element = truth(number(value)) if ref.dtype is torch.bool else number(value)
        return SymTensor(tuple(self.size(s) for s in ref.shape), ref.dtype, lambda _: element)

    def leaf(self, name: str, node: fx.Node | None, ref: Ref, trouble: str = "") -> SymTensor:
        taken = sum(1 for leaf in self.leaves.values() if leaf.name == name)
        function = sympy.Function(f"{name}#{taken}" if taken else name, integer=not ref.dtype.is_floating_point)
        shape = tuple(self.size(s) for s in ref.shape)
        self.leaves[function] = Leaf(name, node, shape, function, trouble)

        def read(index: Index) -> Value:
            value = function(*index) if index else function(ZERO)
            return compare("ne", value, ZERO) if ref.dtype is torch.bool else value

        return SymTensor(shape, ref.dtype, read)

    def size(self, value: Any) -> Expr:
        """An int, SymInt or number as an expression; a symbol that counts local tokens becomes T."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            expression = value.node.expr
            if expression in self.local_tokens and expression.free_symbols:
                return TOKENS
            swaps = {s: TOKENS for s in self.local_tokens if s.is_Symbol}
            renamed = {s: sympy.Symbol(s.name, integer=True, positive=True) for s in expression.free_symbols}
            return sympy.expand(expression.xreplace({**renamed, **swaps}))
        return number(value)

    def symbol(self, name: str, size: Expr) -> sympy.Symbol:
        """The index symbol of a dim, remembered with the dim's size."""
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.sizes[symbol] = size
        return symbol

    def dummy(self, size: Expr, index: Index) -> sympy.Symbol:
        """A bound variable that the index expressions don't use; equal sums get equal ones."""
        used = {s.name for e in index for s in e.free_symbols}
        depth = next(n for n in range(len(used) + 1) if f"j{n}" not in used)
        return self.symbol(f"j{depth}", size)

    def _evaluate(self, call: Call) -> None:
        rule = _RULES.get(call.func.overloadpacket.__name__)
        self.call = call
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
        """Elements that a rule can't read become reads of a leaf that says why."""

        def at(index: Index) -> Value:
            try:
                return tensor.at(index)
            except Undecidable as error:
                return self.leaf(str(call.func), call.node, ref, str(error)).at(index)

        return SymTensor(tensor.shape, tensor.dtype, at)

    def _arguments(self, args: Any) -> Any:
        if isinstance(args, Ref):
            return self.tensors[args.index]
        if isinstance(args, dict):
            return {k: self._arguments(v) for k, v in args.items()}
        if isinstance(args, tuple | list):
            return [self._arguments(a) for a in args]
        if isinstance(args, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.size(args)
        return args

    @property
    def out(self) -> Ref:
        """The first output of the call under evaluation: its fake shape and dtype are known."""
        assert self.call is not None
        ref = self.call.outputs[0]
        assert ref is not None
        return ref

    @property
    def shape(self) -> tuple[Expr, ...]:
        return tuple(self.size(s) for s in self.out.shape)

    def pointwise(self, function: Callable[..., Value], *args: Any) -> SymTensor:
        """The result of `function` on elements; Python numbers stand for themselves."""

        def at(index: Index) -> Value:
            return function(*(a.broadcast_at(index) if isinstance(a, SymTensor) else self.scalar(a) for a in args))

        return SymTensor(self.shape, self.out.dtype, at)

    def scalar(self, value: Any) -> Value:
        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        return self.size(value)


def _always(value: Expr, ref: Ref) -> SymTensor:
    return SymTensor((), ref.dtype, lambda _: value)


Rule = Callable[..., Any]
"""(evaluator, *the call's arguments) -> SymTensor, or a tuple of them for calls of several results."""

_RULES: dict[str, Rule] = {**MOVES, **VALUES, **DIMS}
