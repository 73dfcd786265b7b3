"""The context of a rule: the ATen call whose meaning it says, the sizes and leaves around it, and common steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from cp_rewrite.documents import MAX_ID, MAX_TOKENS
from cp_rewrite.passes.graph.canonicalize import Call, Ref
from cp_rewrite.torch_internals import OpOverload, expression

from .symbolic import (
    ONE,
    TOKENS,
    ZERO,
    Expr,
    Index,
    Select,
    SymTensor,
    Value,
    as_element,
    compare,
    compared,
    from_zero,
    number,
    numeric,
)

Rule = Callable[..., Any]
"""(context, *the call's arguments) -> SymTensor, or a tuple of them for calls of several results."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that the mask's computation reads but does not compute. Its element at i is `function(*i)`.

    Args:
        name: the argument's name; that of its node, behind a %, for a tensor of the model.
        node: where it comes from.
        function: a sympy function of the leaf's own.
        trouble: for the result of a call that has no meaning: why it has none. Empty for others.
        inexact: for a result that its dtype may not hold: the exact value. Comparisons of it are refused; added to
            logits it does no harm.
        role: "query" or "key", of what numbers documents in a mask of the batch: the side that it was compared on.
    """

    name: str
    node: fx.Node | None
    shape: tuple[Expr, ...]
    function: Any
    dtype: torch.dtype = torch.int64
    trouble: str = ""
    inexact: Value = None
    role: str = ""


@dataclass
class RuleContext:
    """The call under evaluation, and what is known of all tensors of the mask's computation.

    Args:
        local_tokens: sizes (ints or symbols' expressions) that count this shard's tokens.
        name_of: the name of a leaf's node.
        given: leaf nodes whose elements are all one known value.
        document_ids: the argument that holds the batch's document ids. padding_mask: that which marks tokens by 1.
        leaves: the leaves so far, by the sympy function that stands for each.
        sizes: index symbols, each with the size of the dim that it runs over.
        call: the call under evaluation.
    """

    local_tokens: frozenset[Expr]
    name_of: Callable[[fx.Node], str]
    given: dict[fx.Node, Expr] = field(default_factory=dict)
    document_ids: str | None = None
    padding_mask: str | None = None
    leaves: dict[Any, Leaf] = field(default_factory=dict)
    sizes: dict[Expr, Expr] = field(default_factory=dict)
    call: Call | None = None

    # -- the call --------------------------------------------------------------------------------------------

    @property
    def func(self) -> OpOverload:
        """The called op."""
        assert self.call is not None
        return self.call.func

    @property
    def op(self) -> str:
        """The called op's name: `sum` of aten::sum.dim_IntList."""
        return self.func.overloadpacket.__name__

    @property
    def outputs(self) -> tuple[Ref | None, ...]:
        """Results of the call: fake shapes and dtypes are known."""
        assert self.call is not None
        return self.call.outputs

    @property
    def out(self) -> Ref:
        """The first of the outputs."""
        ref = self.outputs[0]
        assert ref is not None
        return ref

    @property
    def shape(self) -> tuple[Expr, ...]:
        """The shape of the first output."""
        return tuple(self.size(s) for s in self.out.shape)

    # -- sizes and indices -----------------------------------------------------------------------------------

    def size(self, value: Any) -> Expr:
        """An int, SymInt or number as an expression; a symbol that counts local tokens becomes T."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            size: Any = expression(value)
            if size in self.local_tokens and size.free_symbols:
                return TOKENS
            swaps = {s: TOKENS for s in self.local_tokens if s.is_Symbol}
            renamed = {s: sympy.Symbol(s.name, integer=True, positive=True) for s in size.free_symbols}
            size = size.xreplace({**renamed, **swaps})
            return from_zero(sympy.expand(size) if isinstance(size, sympy.Expr) else size)
        return number(value)

    def symbol(self, name: str, size: Expr) -> sympy.Symbol:
        """The index symbol of a dim, remembered with the dim's size."""
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.sizes[symbol] = size
        return symbol

    def bound_symbol(self, size: Expr, index: Index) -> sympy.Symbol:
        """The variable of a sum over a dim: the first of j0, j1, … that `index` does not use.

        So equal sums get equal variables, and a sum inside of a sum gets another one.
        """
        used = {s.name for e in index for s in e.free_symbols}
        depth = next(n for n in range(len(used) + 1) if f"j{n}" not in used)
        return self.symbol(f"j{depth}", size)

    # -- leaves ----------------------------------------------------------------------------------------------

    def leaf(self, name: str, node: fx.Node | None, ref: Ref, trouble: str = "", inexact: Value = None) -> SymTensor:
        """A tensor whose elements are reads of a new Leaf; arguments as there."""
        taken = sum(1 for leaf in self.leaves.values() if leaf.name == name)
        # Floating-point leaves may well hold integers: nothing is known of them.
        known = {} if ref.dtype.is_floating_point else {"integer": True}
        function = sympy.Function(f"{name}#{taken}" if taken else name, **known)
        is_mark = name == self.padding_mask and not trouble
        shape = tuple(self.size(s) for s in ref.shape)
        self.leaves[function] = Leaf(name, node, shape, function, ref.dtype, trouble, inexact)

        def read(index: Index) -> Value:
            value = function(*index) if index else function(ZERO)
            mark = compare("ne", value, ZERO)
            return mark if ref.dtype is torch.bool else Select(mark, ONE, ZERO) if is_mark else value

        return SymTensor(shape, ref.dtype, read)

    def leaf_of(self, term: Any) -> tuple[torch.dtype, float]:
        """The dtype of the leaf that a term reads, and its largest magnitude."""
        leaf = self.leaves[term.func]
        return leaf.dtype, MAX_ID if leaf.name == self.document_ids else MAX_TOKENS

    # -- elements --------------------------------------------------------------------------------------------

    def scalar(self, value: Any) -> Value:
        """A Python number or a size as an element."""
        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        return self.size(value)

    def pointwise(self, function: Callable[..., Value], *args: Any) -> SymTensor:
        """The result of `function` on elements, in the result's dtype; Python numbers stand for themselves."""
        dtype = self.out.dtype

        def element(arg: Any, index: Index) -> Value:
            if not isinstance(arg, SymTensor):
                return self.scalar(arg)
            value = arg.broadcast_at(index)
            return value if dtype is torch.bool else as_element(value, dtype, self.leaf_of)

        return SymTensor(self.shape, dtype, lambda index: function(*(element(arg, index) for arg in args)))

    def converted(self, x: SymTensor, dtype: torch.dtype, index: Index) -> Expr:
        """An element as a number of another dtype."""
        return as_element(numeric(x.at(index)), dtype, self.leaf_of)

    def comparison(self, op: str, x: Any, y: Any) -> SymTensor:
        """`x op y` of elements, which are compared in the dtype that holds both."""
        common = torch.result_type(*map(_stand_in, (x, y)))
        dtypes = getattr(x, "dtype", None), getattr(y, "dtype", None)

        def both(a: Value, b: Value) -> Value:
            return compare(op, *compared((a, b), dtypes, common, self.leaf_of))

        return self.pointwise(both, x, y)


def _stand_in(arg: Any) -> Any:
    """A tensor or number that promotes dtypes as the operand does."""
    if isinstance(arg, SymTensor):
        return torch.empty([1] * len(arg.shape), dtype=arg.dtype, device="meta")
    return arg if isinstance(arg, bool | int | float) else 0 if arg.is_integer else 0.0
