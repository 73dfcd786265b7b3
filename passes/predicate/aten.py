"""Symbolic evaluation of ATen: each call of a canonical slice becomes a function from index to expression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from cp_rewrite.documents import MAX_ID, MAX_TOKENS
from cp_rewrite.passes.graph.canonicalize import Call, Canonical, Ref

from .exact import Inexact, compared, held
from .rules_dims import DIMS
from .rules_moves import MOVES
from .rules_values import VALUES
from .values import TOKENS, ZERO, Expr, Index, SymTensor, Value, compare, number, numeric, truth
from .views import Undecidable

Output = SymTensor | tuple[SymTensor | None, ...]


@dataclass(frozen=True)
class Leaf:
    """A tensor that the slice reads but does not compute. Its elements are `function(*index)`."""

    name: str
    node: fx.Node | None
    shape: tuple[Expr, ...]
    function: Any
    dtype: torch.dtype = torch.int64
    trouble: str = ""  # for what has no meaning of its own: why
    inexact: Value = None  # the value that the dtype may not hold: a trouble for comparisons, what is added may vary


@dataclass
class Evaluator:
    """Gives every Ref of a canonical slice its meaning.

    Args:
        local_tokens: sizes (ints or symbols' expressions) that count this shard's tokens.
        name_of: what a leaf node is called; its elements are applications of a function of that name.
        given: leaf nodes whose elements are all one known value.
        document_ids: the argument that holds the batch's document ids.
    """

    local_tokens: frozenset[Expr]
    name_of: Callable[[fx.Node], str]
    given: dict[fx.Node, Expr] = field(default_factory=dict)
    document_ids: str | None = None
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
        out = self._arguments(canonical.output)
        assert isinstance(out, SymTensor)
        return out

    def _constant_tensor(self, ref: Ref, value: float) -> SymTensor:
        element = truth(number(value)) if ref.dtype is torch.bool else number(value)
        return SymTensor(tuple(self.size(s) for s in ref.shape), ref.dtype, lambda _: element)

    def leaf(self, name: str, node: fx.Node | None, ref: Ref, trouble: str = "", inexact: Value = None) -> SymTensor:
        taken = sum(1 for leaf in self.leaves.values() if leaf.name == name)
        # Floating-point leaves may well hold integers: nothing is known of them.
        known = {} if ref.dtype.is_floating_point else {"integer": True}
        function = sympy.Function(f"{name}#{taken}" if taken else name, **known)
        shape = tuple(self.size(s) for s in ref.shape)
        self.leaves[function] = Leaf(name, node, shape, function, ref.dtype, trouble, inexact)

        def read(index: Index) -> Value:
            value = function(*index) if index else function(ZERO)
            return compare("ne", value, ZERO) if ref.dtype is torch.bool else value

        return SymTensor(shape, ref.dtype, read)

    def leaf_of(self, term: Any) -> tuple[torch.dtype, float]:
        """The dtype of the leaf that a term reads, and its largest magnitude."""
        leaf = self.leaves[term.func]
        return leaf.dtype, MAX_ID if leaf.name == self.document_ids else MAX_TOKENS

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
        """Elements as `ref`'s dtype holds them. What a rule can't read becomes a read of a leaf that says why."""

        def at(index: Index) -> Value:
            try:
                return held(tensor.at(index), ref.dtype, self.leaf_of)
            except Undecidable as error:
                inexact = error.value if isinstance(error, Inexact) else None
                return self.leaf(str(call.func), call.node, ref, str(error), inexact).at(index)

        return SymTensor(tensor.shape, tensor.dtype, at)

    def _arguments(self, args: Any) -> Any:
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
        """The result of `function` on elements, in the result's dtype; Python numbers stand for themselves."""
        dtype = self.out.dtype

        def element(arg: Any, index: Index) -> Value:
            if not isinstance(arg, SymTensor):
                return self.scalar(arg)
            value = arg.broadcast_at(index)
            return value if dtype is torch.bool else held(value, dtype, self.leaf_of)

        return SymTensor(self.shape, dtype, lambda index: function(*(element(arg, index) for arg in args)))

    def converted(self, x: SymTensor, dtype: torch.dtype, index: Index) -> Expr:
        """An element as a number of another dtype."""
        return held(numeric(x.at(index)), dtype, self.leaf_of)

    def comparison(self, op: str, x: Any, y: Any) -> SymTensor:
        """`x op y` of elements, which are compared in the dtype that holds both."""
        common = torch.result_type(*map(_stand_in, (x, y)))
        dtypes = getattr(x, "dtype", None), getattr(y, "dtype", None)

        def both(a: Value, b: Value) -> Value:
            return compare(op, *compared((a, b), dtypes, common, self.leaf_of))

        return self.pointwise(both, x, y)

    def scalar(self, value: Any) -> Value:
        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        return self.size(value)


def _stand_in(arg: Any) -> Any:
    """What promotes dtypes as an operand does."""
    if isinstance(arg, SymTensor):
        return torch.empty([1] * len(arg.shape), dtype=arg.dtype, device="meta")
    return arg if isinstance(arg, bool | int | float) else 0 if arg.is_integer else 0.0


def _always(value: Expr, ref: Ref) -> SymTensor:
    return SymTensor((), ref.dtype, lambda _: value)


Rule = Callable[..., Any]
"""(evaluator, *the call's arguments) -> SymTensor, or a tuple of them for calls of several results."""

_RULES: dict[str, Rule] = {**MOVES, **VALUES, **DIMS}
