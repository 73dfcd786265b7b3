"""Symbolic evaluation of ATen: each call of a canonical slice becomes a function from index to expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx

from . import predicate_views as views
from .canonicalize import Call, Canonical, Ref
from .predicate_values import (
    ONE,
    TOKENS,
    ZERO,
    Expr,
    Index,
    RepeatIndex,
    RunningMax,
    RunningSum,
    Select,
    SumOver,
    SymTensor,
    Value,
    compare,
    is_bool,
    number,
    numeric,
    outer_select,
    truth,
)
from .predicate_views import Undecidable, choose

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
        given: leaf nodes of one element whose value is known.
    """

    local_tokens: frozenset[Expr]
    name_of: Callable[[fx.Node], str]
    given: dict[fx.Node, Expr] = field(default_factory=dict)
    leaves: dict[Any, Leaf] = field(default_factory=dict)
    sizes: dict[Expr, Expr] = field(default_factory=dict)
    tensors: dict[int, Output | None] = field(default_factory=dict)
    _call: Call | None = None

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
        rule = RULES.get(call.func.overloadpacket.__name__)
        self._call = call
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
        assert self._call is not None
        ref = self._call.outputs[0]
        assert ref is not None
        return ref

    @property
    def shape(self) -> tuple[Expr, ...]:
        return tuple(self.size(s) for s in self.out.shape)

    def pointwise(self, function: Callable[..., Value], *args: Any) -> SymTensor:
        """The result of `function` on elements; Python numbers stand for themselves."""

        def at(index: Index) -> Value:
            return function(*(a.broadcast_at(index) if isinstance(a, SymTensor) else self._scalar(a) for a in args))

        return SymTensor(self.shape, self.out.dtype, at)

    def _scalar(self, value: Any) -> Value:
        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        return self.size(value)


def _always(value: Expr, ref: Ref) -> SymTensor:
    return SymTensor((), ref.dtype, lambda _: value)


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# -- views ---------------------------------------------------------------------------------------------------


@_rule("clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "contiguous", "positive")
def _same(ev: Evaluator, x: SymTensor, **_: Any) -> SymTensor:
    return x


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
def _view(ev: Evaluator, x: SymTensor, *_: Any) -> SymTensor:
    return views.reshape(x, ev.shape, ev.sizes)


@_rule("expand", "expand_copy")
def _expand(ev: Evaluator, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return views.expand(x, ev.shape)


@_rule("permute", "permute_copy")
def _permute(ev: Evaluator, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    return views.permute(x, dims)


@_rule("transpose", "transpose_copy")
def _transpose(ev: Evaluator, x: SymTensor, a: int, b: int) -> SymTensor:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return views.permute(x, order)


@_rule("t", "t_copy")
def _t(ev: Evaluator, x: SymTensor) -> SymTensor:
    return views.permute(x, list(range(len(x.shape)))[::-1])


@_rule("unsqueeze", "unsqueeze_copy")
def _unsqueeze(ev: Evaluator, x: SymTensor, dim: int) -> SymTensor:
    return views.unsqueeze(x, dim)


@_rule("squeeze", "squeeze_copy")
def _squeeze(ev: Evaluator, x: SymTensor, dim: int | Sequence[int] | None = None) -> SymTensor:
    return views.squeeze(x, [dim] if isinstance(dim, int) else dim)


@_rule("select", "select_copy")
def _select(ev: Evaluator, x: SymTensor, dim: int, index: Any) -> SymTensor:
    return views.select(x, dim, ev.size(index))


@_rule("slice", "slice_copy")
def _slice(ev: Evaluator, x: SymTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> SymTensor:
    return views.slice_(x, ev.shape, dim, ev.size(start or 0), ev.size(step))


@_rule("unbind")
def _unbind(ev: Evaluator, x: SymTensor, dim: int = 0) -> tuple[SymTensor, ...]:
    assert ev._call is not None
    return tuple(views.select(x, dim, number(i)) for i in range(len(ev._call.outputs)))


@_rule("split", "split_with_sizes", "chunk")
def _split(ev: Evaluator, x: SymTensor, sizes: Any, dim: int = 0) -> tuple[SymTensor, ...]:
    assert ev._call is not None
    parts: list[SymTensor] = []
    start: Expr = ZERO
    for ref in ev._call.outputs:
        assert ref is not None
        shape = tuple(ev.size(s) for s in ref.shape)
        parts.append(views.slice_(x, shape, dim, start, ONE))
        start = start + shape[dim]
    return tuple(parts)


@_rule("flip")
def _flip(ev: Evaluator, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    return views.flip(x, dims)


@_rule("roll")
def _roll(ev: Evaluator, x: SymTensor, shifts: Any, dims: Any = ()) -> SymTensor:
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    if not dims:
        if len(x.shape) != 1:
            raise Undecidable("roll over flattened dims")
        dims = [0]
    for shift, dim in zip(shifts, dims, strict=True):
        x = views.roll(x, ev.size(shift), dim)
    return x


@_rule("cat", "concatenate")
def _cat(ev: Evaluator, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    return views.cat(parts, ev.shape, dim)


@_rule("stack")
def _stack(ev: Evaluator, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    return views.cat([views.unsqueeze(p, dim) for p in parts], ev.shape, dim)


@_rule("constant_pad_nd")
def _pad(ev: Evaluator, x: SymTensor, widths: Sequence[Any], value: Any = 0) -> SymTensor:
    fill = numeric(ev._scalar(value)) if x.dtype is not torch.bool else (sympy.true if value else sympy.false)
    return views.pad(x, ev.shape, [ev.size(w) for w in widths], fill)


@_rule("repeat")
def _repeat(ev: Evaluator, x: SymTensor, *_: Any) -> SymTensor:
    lead = len(ev.shape) - len(x.shape)

    def index_map(index: Index) -> Index:
        pairs = zip(index[lead:], x.shape, ev_shape[lead:], strict=True)
        return tuple(i if size == whole else views.split_index(i, size, ev.sizes)[1] for i, size, whole in pairs)

    ev_shape = ev.shape
    return views.view_of(x, ev_shape, index_map)


@_rule("index")
def _index(ev: Evaluator, x: SymTensor, indices: Sequence[SymTensor | None]) -> SymTensor:
    used = [t for t in indices if t is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for t in used):
        raise Undecidable("indexing by a boolean tensor")
    slots = [n for n, t in enumerate(indices) if t is not None]
    shape, rank = ev.shape, max(len(t.shape) for t in used)
    first = slots[0] if slots == list(range(slots[0], slots[-1] + 1)) else 0

    def index_map(index: Index) -> Index:
        common, rest = index[first : first + rank], iter((*index[:first], *index[first + rank :]))
        picked = [numeric(t.broadcast_at(common)) if t is not None else None for t in indices]
        picked += [None] * (len(x.shape) - len(picked))
        return tuple(_from_end(p, x.shape[d]) if p is not None else next(rest) for d, p in enumerate(picked))

    return views.view_of(x, shape, index_map)


def _from_end(place: Expr, size: Expr) -> Expr:
    return place + size if place.is_number and place.is_negative else place


@_rule("index_select")
def _index_select(ev: Evaluator, x: SymTensor, dim: int, index: SymTensor) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    return views.view_of(x, ev.shape, lambda i: (*i[:d], numeric(index.at((i[d],))), *i[d + 1 :]))


@_rule("gather")
def _gather(ev: Evaluator, x: SymTensor, dim: int, index: SymTensor, **_: Any) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    return views.view_of(x, ev.shape, lambda i: (*i[:d], numeric(index.at(i)), *i[d + 1 :]))


@_rule("embedding")
def _embedding(ev: Evaluator, weight: SymTensor, index: SymTensor, *_: Any) -> SymTensor:
    return views.view_of(weight, ev.shape, lambda i: (numeric(index.at(i[:-1])), i[-1]))


@_rule("tril", "triu")
def _triangle(ev: Evaluator, x: SymTensor, diagonal: Any = 0) -> SymTensor:
    assert ev._call is not None
    op = "le" if ev._call.func.overloadpacket.__name__ == "tril" else "ge"
    zero = sympy.false if x.dtype is torch.bool else ZERO

    def at(index: Index) -> Value:
        inside = compare(op, index[-1] - index[-2], ev.size(diagonal))
        return choose(inside, x.at(index), zero)

    return SymTensor(x.shape, x.dtype, at)


# -- factories -----------------------------------------------------------------------------------------------


@_rule("arange")
def _arange(ev: Evaluator, *args: Any, **_: Any) -> SymTensor:
    bounds = [ev.size(a) for a in args[:3] if isinstance(a, int | float | sympy.Basic)]
    if ev.out.dtype in NARROW:
        raise Undecidable(f"token indices in {ev.out.dtype} merge in long rows")
    start = bounds[0] if len(bounds) > 1 else ZERO
    step = bounds[2] if len(bounds) > 2 else ONE
    return SymTensor(ev.shape, ev.out.dtype, lambda i: start + step * i[0])


def _constant(ev: Evaluator, value: Any) -> SymTensor:
    element = ev._scalar(value)
    element = truth(element) if ev.out.dtype is torch.bool else numeric(element)
    return SymTensor(ev.shape, ev.out.dtype, lambda _: element)


@_rule("full", "full_like", "new_full")
def _full(ev: Evaluator, *args: Any, fill_value: Any = None, **_: Any) -> SymTensor:
    return _constant(ev, args[-1] if fill_value is None else fill_value)


@_rule("zeros", "zeros_like", "new_zeros")
def _zeros(ev: Evaluator, *_: Any, **__: Any) -> SymTensor:
    return _constant(ev, 0)


@_rule("ones", "ones_like", "new_ones")
def _ones(ev: Evaluator, *_: Any, **__: Any) -> SymTensor:
    return _constant(ev, 1)


@_rule("scalar_tensor")
def _scalar_tensor(ev: Evaluator, value: Any, **_: Any) -> SymTensor:
    return _constant(ev, value)


@_rule("fill")
def _fill(ev: Evaluator, x: SymTensor, value: Any) -> SymTensor:
    if isinstance(value, SymTensor):
        return SymTensor(x.shape, x.dtype, lambda _: value.at(()))
    return _constant(ev, value)


@_rule("eye")
def _eye(ev: Evaluator, *_: Any, **__: Any) -> SymTensor:
    as_value = truth if ev.out.dtype is torch.bool else numeric
    return SymTensor(ev.shape, ev.out.dtype, lambda i: as_value(compare("eq", i[0], i[1])))


# -- pointwise -----------------------------------------------------------------------------------------------


def _add_comparison(op: str) -> None:
    RULES[op] = lambda ev, x, y: ev.pointwise(lambda a, b: compare(op, a, b), x, y)


for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    _add_comparison(_op)


@_rule("logical_and", "bitwise_and", "__and__")
def _and(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return _logic(ev, sympy.And, x, y)


@_rule("logical_or", "bitwise_or", "__or__")
def _or(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return _logic(ev, sympy.Or, x, y)


@_rule("logical_xor", "bitwise_xor", "__xor__")
def _xor(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return _logic(ev, lambda a, b: sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b)), x, y)


@_rule("logical_not", "bitwise_not")
def _not(ev: Evaluator, x: Any) -> SymTensor:
    return _logic(ev, sympy.Not, x)


def _logic(ev: Evaluator, function: Callable[..., Any], *args: Any) -> SymTensor:
    if ev.out.dtype is not torch.bool:
        raise Undecidable("bitwise arithmetic on integers")
    return ev.pointwise(lambda *values: function(*map(truth, values)), *args)


@_rule("add", "sub", "rsub")
def _add(ev: Evaluator, x: Any, y: Any, alpha: Any = 1) -> SymTensor:
    assert ev._call is not None
    if ev.out.dtype is torch.bool:
        return _logic(ev, sympy.Or, x, y)
    name = ev._call.func.overloadpacket.__name__
    left, right = (y, x) if name == "rsub" else (x, y)
    sign = ev.size(alpha) * (1 if name == "add" else -1)
    return ev.pointwise(lambda a, b: numeric(a) + sign * numeric(b), left, right)


@_rule("mul")
def _mul(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    if ev.out.dtype is torch.bool:
        return _logic(ev, sympy.And, x, y)
    return ev.pointwise(lambda a, b: numeric(a) * numeric(b), x, y)


@_rule("neg")
def _neg(ev: Evaluator, x: SymTensor) -> SymTensor:
    return ev.pointwise(lambda a: -numeric(a), x)


@_rule("abs")
def _abs(ev: Evaluator, x: SymTensor) -> SymTensor:
    def absolute(a: Value) -> Value:
        return choose(compare("ge", a, ZERO), numeric(a), -numeric(a))

    return ev.pointwise(absolute, x)


@_rule("minimum")
def _minimum(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: choose(compare("le", a, b), a, b), x, y)


@_rule("maximum")
def _maximum(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: choose(compare("ge", a, b), a, b), x, y)


@_rule("clamp", "clamp_min", "clamp_max")
def _clamp(ev: Evaluator, x: SymTensor, *args: Any, **kwargs: Any) -> SymTensor:
    assert ev._call is not None
    only_max = ev._call.func.overloadpacket.__name__ == "clamp_max"
    low = kwargs.get("min", None if only_max or not args else args[0])
    high = kwargs.get("max", args[0] if only_max else args[1] if len(args) > 1 else None)
    if low is not None:
        x = _maximum(ev, x, low)
    return _minimum(ev, x, high) if high is not None else x


@_rule("where")
def _where(ev: Evaluator, condition: SymTensor, *branches: Any) -> SymTensor:
    if len(branches) != 2:
        raise Undecidable("where with a condition alone makes a tensor of data-dependent size")
    as_value = truth if ev.out.dtype is torch.bool else numeric
    return ev.pointwise(lambda c, a, b: choose(truth(c), as_value(a), as_value(b)), condition, *branches)


@_rule("masked_fill")
def _masked_fill(ev: Evaluator, x: SymTensor, mask: SymTensor, value: Any) -> SymTensor:
    return _where(ev, mask, value, x)


NARROW = {torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float16}


@_rule("_to_copy", "to")
def _cast(ev: Evaluator, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    dtype = ev.out.dtype
    if dtype is torch.bool:
        return ev.pointwise(truth, x)
    if dtype in NARROW and not dtype == x.dtype:
        return ev.pointwise(lambda a: _small(numeric(a), dtype), x)
    return ev.pointwise(numeric, x)


def _small(value: Expr, dtype: torch.dtype) -> Expr:
    """The value as `dtype` holds it: only choices between constants are known to survive a narrow type."""
    try:
        return _on_constants(value, lambda v: torch.tensor(v).to(dtype).item())
    except Undecidable:
        raise Undecidable(f"a cast to {dtype} merges large values of `{value}`") from None


# -- over a dim ----------------------------------------------------------------------------------------------


@_rule("cumsum")
def _cumsum(ev: Evaluator, x: SymTensor, dim: int, dtype: torch.dtype | None = None) -> SymTensor:
    if ev.out.dtype in NARROW:
        raise Undecidable(f"a running sum in {ev.out.dtype} overflows")
    return _running(ev, RunningSum, x, dim)


@_rule("cummax")
def _cummax(ev: Evaluator, x: SymTensor, dim: int) -> tuple[SymTensor, None]:
    return _running(ev, RunningMax, x, dim), None


def _running(ev: Evaluator, kind: Any, x: SymTensor, dim: int) -> SymTensor:
    d = views.wrap(dim, len(x.shape))

    def at(index: Index) -> Value:
        j = ev.dummy(x.shape[d], index)
        return kind(numeric(x.at((*index[:d], j, *index[d + 1 :]))), j, index[d])

    return SymTensor(x.shape, ev.out.dtype, at)


@_rule("sum", "any", "all")
def _sum(ev: Evaluator, x: SymTensor, dims: Any = None, keepdim: bool = False, **_: Any) -> SymTensor:
    assert ev._call is not None
    name = ev._call.func.overloadpacket.__name__
    rank = len(x.shape)
    over = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(rank)))
    over = [views.wrap(d, rank) for d in over]
    if len(over) != 1:
        raise Undecidable(f"{name} over {len(over)} dims at once")
    (d,) = over

    def at(index: Index) -> Value:
        outer = (*index[:d], *index[d + 1 :]) if keepdim else index
        i = ev.dummy(x.shape[d], index)
        inner = x.at((*outer[:d], i, *outer[d:]))
        if name == "sum":
            return SumOver(numeric(inner), i, x.shape[d])
        held = truth(inner) if name == "any" else sympy.Not(truth(inner))
        hits = compare("gt", SumOver(numeric(held), i, x.shape[d]), ZERO)
        return hits if name == "any" else sympy.Not(hits)

    return SymTensor(ev.shape, ev.out.dtype, at)


@_rule("searchsorted", "bucketize")
def _searchsorted(ev: Evaluator, a: Any, b: Any, *, right: bool = False, side: Any = None, **kw: Any) -> SymTensor:
    assert ev._call is not None
    if kw.get("sorter") is not None:
        raise Undecidable("searchsorted with a sorter")
    name = ev._call.func.overloadpacket.__name__
    row, values = (a, b) if name == "searchsorted" else (b, a)
    op = "le" if right or side == "right" else "lt"

    def at(index: Index) -> Value:
        value = values.at(index) if isinstance(values, SymTensor) else ev.size(values)
        i = ev.dummy(row.shape[-1], index)
        place = (i,) if len(row.shape) == 1 else (*index[:-1], i)
        return SumOver(numeric(compare(op, row.at(place), value)), i, row.shape[-1])

    return SymTensor(ev.shape, ev.out.dtype, at)


@_rule("repeat_interleave")
def _repeat_interleave(ev: Evaluator, repeats: SymTensor, *args: Any, **_: Any) -> SymTensor:
    if args and not isinstance(args[0], int | sympy.Basic):
        raise Undecidable("repeat_interleave by a tensor, not decomposed")

    def at(index: Index) -> Value:
        i = ev.dummy(repeats.shape[0], index)
        return RepeatIndex(numeric(repeats.at((i,))), i, repeats.shape[0], index[0])

    return SymTensor(ev.shape, ev.out.dtype, at)


@_rule("scatter", "index_put", "index_fill")
def _write_at(ev: Evaluator, x: SymTensor, *args: Any, **_: Any) -> SymTensor:
    """`value` where some index says so; elsewhere what was there. For one constant written into a 1-d tensor."""
    assert ev._call is not None
    name = ev._call.func.overloadpacket.__name__
    where, value = (args[0][0], args[1]) if name == "index_put" else (args[1], args[2])
    if len(x.shape) != 1 or (len(args) > 2 and args[2] is True) or where.dtype is torch.bool or len(where.shape) != 1:
        raise Undecidable(f"{ev._call.func} other than of one constant into a 1-d tensor")
    places = where.shape[0]

    def at(index: Index) -> Value:
        written = value.broadcast_at((ZERO,)) if isinstance(value, SymTensor) else ev._scalar(value)
        if not (is_bool(written) or written.is_number):
            raise Undecidable("writing a value that varies")
        i = ev.dummy(places, index)
        hits = SumOver(numeric(compare("eq", where.at((i,)), index[0])), i, places)
        as_value = truth if x.dtype is torch.bool else numeric
        return choose(compare("gt", hits, ZERO), as_value(written), x.at(index))

    return SymTensor(x.shape, x.dtype, at)


@_rule("copy")
def _copy(ev: Evaluator, x: SymTensor, source: SymTensor, *_: Any) -> SymTensor:
    return _cast(ev, views.expand(source, ev.shape))


@_rule("select_scatter")
def _select_scatter(ev: Evaluator, x: SymTensor, source: SymTensor, dim: int, index: Any) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    place = ev.size(index) + (x.shape[d] if ev.size(index).is_negative else 0)

    def at(i: Index) -> Value:
        return choose(compare("eq", i[d], place), source.at((*i[:d], *i[d + 1 :])), x.at(i))

    return SymTensor(x.shape, x.dtype, at)


@_rule("slice_scatter")
def _slice_scatter(
    ev: Evaluator, x: SymTensor, source: SymTensor, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    first = ev.size(start or 0)
    first = first + x.shape[d] if first.is_negative else first
    if step != 1:
        raise Undecidable("writing to a strided slice")

    def at(i: Index) -> Value:
        inside = sympy.And(compare("ge", i[d], first), compare("lt", i[d] - first, source.shape[d]))
        if source.shape[d] == x.shape[d]:
            inside = sympy.true
        return choose(inside, source.at((*i[:d], i[d] - first, *i[d + 1 :])), x.at(i))

    return SymTensor(x.shape, x.dtype, at)


@_rule("block_diag")
def _block_diag(ev: Evaluator, parts: Sequence[SymTensor]) -> SymTensor:
    lengths = ", ".join(str(p.shape[0]) if p.shape else "1" for p in parts)
    raise Undecidable(f"block_diag bakes the lengths {lengths} of this batch's documents into the graph as constants")


@_rule("floor_divide")
def _floor_divide(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: sympy.floor(numeric(a) / numeric(b)), x, y)


@_rule("remainder")
def _remainder(ev: Evaluator, x: Any, y: Any) -> SymTensor:
    return ev.pointwise(lambda a, b: sympy.Mod(numeric(a), numeric(b)), x, y)


@_rule("div")
def _div(ev: Evaluator, x: Any, y: Any, rounding_mode: str | None = None) -> SymTensor:
    if rounding_mode == "floor":
        return _floor_divide(ev, x, y)
    if rounding_mode is not None or not isinstance(y, int | float) or y == 0 or math.frexp(y)[0] not in (0.5, -0.5):
        raise Undecidable("a division that rounds")
    return ev.pointwise(lambda a: numeric(a) / number(y), x)


@_rule("log")
def _log(ev: Evaluator, x: SymTensor) -> SymTensor:
    return ev.pointwise(lambda a: _on_constants(numeric(a), lambda v: math.log(v) if v > 0 else -math.inf), x)


def _on_constants(value: Expr, function: Callable[[float], float]) -> Expr:
    choice = outer_select(value)
    if choice is not None:
        branches = (value.xreplace({choice: branch}) for branch in choice.args[1:])
        return Select(choice.args[0], *(_on_constants(branch, function) for branch in branches))
    if not value.is_number:
        raise Undecidable(f"a nonlinear function of `{value}`")
    return number(function(float(value)))


def is_boolean(x: SymTensor) -> bool:
    """Whether a mask is boolean (True keeps) rather than additive."""
    return x.dtype is torch.bool


__all__ = ["Evaluator", "Leaf", "is_bool", "is_boolean"]
