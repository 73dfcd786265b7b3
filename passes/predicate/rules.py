"""Rules of ATen ops by which masks are read symbolically, in three tables.

    DIMS        ops that run over a dim: sums, running sums, searches, writes at computed places
    ELEMENTS    ops that act on each element: logic, comparisons, arithmetic, casts
    MOVES       ops that move or make elements: views, gathers, writes to places, factories

Rules of `DIMS` make a generator of its bound variable: sum over a dim of n elements x(i) is SumOver(x(i), i, n). What
can be told as a count is one, as `recognise` reads counts:

    any(x)                        SumOver(x(i), i, n) > 0
    searchsorted(row, v, right)   SumOver(row(i) <= v, i, n)
    x[places] = c, read at k      c where SumOver(places(i) == k, i, n) > 0, else x(k)
    x[mask] = c, read at k        c where mask(k), else x(k)

bool tensors hold truths and others numbers, so `truth` and `numeric` stand where an op takes both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from . import index_maps
from .context import Rule, RuleContext
from .index_maps import wrap
from .symbolic import (
    ONE,
    ZERO,
    Expr,
    Index,
    RepeatIndex,
    RunningMax,
    RunningSum,
    SumOver,
    SymTensor,
    Undecidable,
    Value,
    choose,
    compare,
    difference_of,
    number,
    numeric,
    on_constants,
    truth,
)


def _cumsum(ctx: RuleContext, x: SymTensor, dim: int, dtype: torch.dtype | None = None) -> SymTensor:
    return _running(ctx, RunningSum, x, dim)


def _cummax(ctx: RuleContext, x: SymTensor, dim: int) -> tuple[SymTensor, None]:
    return _running(ctx, RunningMax, x, dim), None


def _running(ctx: RuleContext, kind: Any, x: SymTensor, dim: int) -> SymTensor:
    d, dtype = wrap(dim, len(x.shape)), ctx.out.dtype

    def at(index: Index) -> Value:
        j = ctx.bound_symbol(x.shape[d], index)
        return kind(ctx.converted(x, dtype, (*index[:d], j, *index[d + 1 :])), j, index[d])

    return SymTensor(x.shape, dtype, at)


def _sum(ctx: RuleContext, x: SymTensor, dims: Any = None, keepdim: bool = False, **_: Any) -> SymTensor:
    """sum, any and all over one dim; all(x) is not any(not x)."""
    name, dtype = ctx.op, ctx.out.dtype
    rank = len(x.shape)
    over = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(rank)))
    over = [wrap(d, rank) for d in over]
    if len(over) != 1:
        raise Undecidable(f"{name} over {len(over)} dims at once")
    (d,) = over

    def at(index: Index) -> Value:
        outer = (*index[:d], *index[d + 1 :]) if keepdim else index
        i = ctx.bound_symbol(x.shape[d], index)
        place = (*outer[:d], i, *outer[d:])
        if name == "sum":
            return SumOver(ctx.converted(x, dtype, place), i, x.shape[d])
        inner = x.at(place)
        size = x.shape[d]
        if size.is_Integer and not any(i in term.free_symbols for term in inner.atoms(AppliedUndef)):
            # Entries of several tensors, as `stack` puts them side by side.
            entries = [truth(x.at((*outer[:d], sympy.Integer(n), *outer[d:]))) for n in range(int(size))]
            return sympy.Or(*entries) if name == "any" else sympy.And(*entries)
        held = truth(inner) if name == "any" else sympy.Not(truth(inner))
        hits = compare("gt", SumOver(numeric(held), i, x.shape[d]), ZERO)
        return hits if name == "any" else sympy.Not(hits)

    return SymTensor(ctx.shape, dtype, at)


def _searchsorted(ctx: RuleContext, a: Any, b: Any, *, right: bool = False, side: Any = None, **kw: Any) -> SymTensor:
    """searchsorted(row, values) and bucketize(values, row): how many of the row's numbers are before a value."""
    if kw.get("sorter") is not None:
        raise Undecidable("searchsorted with a sorter")
    row, values = (a, b) if ctx.op == "searchsorted" else (b, a)
    op = "le" if right or side == "right" else "lt"

    def at(index: Index) -> Value:
        value = values.at(index) if isinstance(values, SymTensor) else ctx.size(values)
        i = ctx.bound_symbol(row.shape[-1], index)
        place = (i,) if len(row.shape) == 1 else (*index[:-1], i)
        return SumOver(numeric(compare(op, row.at(place), value)), i, row.shape[-1])

    return SymTensor(ctx.shape, ctx.out.dtype, at)


def _repeat_interleave(ctx: RuleContext, repeats: SymTensor, *args: Any, **_: Any) -> SymTensor:
    if args and not isinstance(args[0], int | sympy.Basic):
        raise Undecidable("repeat_interleave by a tensor, not decomposed")

    def at(index: Index) -> Value:
        i = ctx.bound_symbol(repeats.shape[0], index)
        return RepeatIndex(numeric(repeats.at((i,))), i, repeats.shape[0], index[0])

    return SymTensor(ctx.shape, ctx.out.dtype, at)


def _write_at(ctx: RuleContext, x: SymTensor, *args: Any, **options: Any) -> SymTensor:
    """One constant written at computed places of a 1-d tensor, or where a mask is true; elsewhere is what was there."""
    index: Any = args[0] if ctx.op == "index_put" else [args[1]]
    value = args[1] if ctx.op == "index_put" else args[2]
    front, where, added = index[:-1], index[-1], options or (len(args) > 2 and args[2] is True)
    by_mask = isinstance(where, SymTensor) and where.dtype is torch.bool and all(i is None for i in front)
    one = all(size == 1 for size in getattr(value, "shape", ()))
    if added or not (one if by_mask else len(x.shape) == len(index) == len(getattr(where, "shape", ())) == 1):
        raise Undecidable(f"{ctx.func} other than of one constant, by a mask or into a 1-d tensor")

    def there(at: Index) -> Value:
        if by_mask:
            return truth(where.at(at[len(front) : len(front) + len(where.shape)]))
        i = ctx.bound_symbol(where.shape[0], at)
        return compare("gt", SumOver(numeric(compare("eq", where.at((i,)), at[0])), i, where.shape[0]), ZERO)

    def at(index: Index) -> Value:
        i = ZERO if by_mask else ctx.bound_symbol(where.shape[0], index)
        written = value.broadcast_at((i,)) if isinstance(value, SymTensor) else ctx.scalar(value)
        if written not in (sympy.true, sympy.false) and not written.is_number:
            raise Undecidable("writing a value that varies")
        as_value = truth if x.dtype is torch.bool else numeric
        return choose(there(index), as_value(written), as_value(x.at(index)))

    return SymTensor(x.shape, x.dtype, at)


DIMS: dict[str, Rule] = {
    "cumsum": _cumsum,
    "cummax": _cummax,
    "sum any all": _sum,
    "searchsorted bucketize": _searchsorted,
    "repeat_interleave": _repeat_interleave,
    "scatter index_put index_fill": _write_at,
}
"""Names of ops, apart by spaces -> their rule."""


def _comparison(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.comparison(ctx.op, x, y)


def _and(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, sympy.And, x, y)


def _or(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, sympy.Or, x, y)


def _xor(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, lambda a, b: sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b)), x, y)


def _not(ctx: RuleContext, x: Any) -> SymTensor:
    return _logic(ctx, sympy.Not, x)


def _logic(ctx: RuleContext, function: Callable[..., Any], *args: Any) -> SymTensor:
    if ctx.out.dtype is not torch.bool:
        raise Undecidable("bitwise arithmetic on integers")
    return ctx.pointwise(lambda *values: function(*map(truth, values)), *args)


def _add(ctx: RuleContext, x: Any, y: Any, alpha: Any = 1) -> SymTensor:
    if ctx.out.dtype is torch.bool:
        return _logic(ctx, sympy.Or, x, y)
    left, right = (y, x) if ctx.op == "rsub" else (x, y)
    factor = ctx.size(alpha)
    if ctx.op == "add":
        return ctx.pointwise(lambda a, b: numeric(a) + factor * numeric(b), left, right)
    return ctx.pointwise(lambda a, b: difference_of(numeric(a), factor * numeric(b)), left, right)


def _mul(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    if ctx.out.dtype is torch.bool:
        return _logic(ctx, sympy.And, x, y)
    return ctx.pointwise(lambda a, b: numeric(a) * numeric(b), x, y)


def _neg(ctx: RuleContext, x: SymTensor) -> SymTensor:
    return ctx.pointwise(lambda a: -numeric(a), x)


def _abs(ctx: RuleContext, x: SymTensor) -> SymTensor:
    def absolute(a: Value) -> Value:
        return choose(compare("ge", a, ZERO), numeric(a), -numeric(a))

    return ctx.pointwise(absolute, x)


def _sign(ctx: RuleContext, x: SymTensor) -> SymTensor:
    if ctx.out.dtype is torch.bool:
        return x

    def sign(a: Value) -> Value:
        return choose(compare("gt", a, ZERO), ONE, choose(compare("lt", a, ZERO), -ONE, ZERO))

    return ctx.pointwise(sign, x)


def _minimum(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: choose(compare("le", a, b), a, b), x, y)


def _maximum(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: choose(compare("ge", a, b), a, b), x, y)


def _clamp(ctx: RuleContext, x: SymTensor, min: Any = None, max: Any = None) -> SymTensor:
    x = x if min is None else _maximum(ctx, x, min)
    return x if max is None else _minimum(ctx, x, max)


def _where(ctx: RuleContext, condition: SymTensor, *branches: Any) -> SymTensor:
    if len(branches) != 2:
        raise Undecidable("where with a condition alone makes a tensor of data-dependent size")
    as_value = truth if ctx.out.dtype is torch.bool else numeric
    return ctx.pointwise(lambda c, a, b: choose(truth(c), as_value(a), as_value(b)), condition, *branches)


def _masked_fill(ctx: RuleContext, x: SymTensor, mask: SymTensor, value: Any) -> SymTensor:
    return _where(ctx, mask, value, x)


def cast(ctx: RuleContext, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return ctx.pointwise(truth if ctx.out.dtype is torch.bool else numeric, x)


def _floor_divide(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: sympy.floor(numeric(a) / numeric(b)), x, y)


def _remainder(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return ctx.pointwise(lambda a, b: sympy.Mod(numeric(a), numeric(b)), x, y)


def _div(ctx: RuleContext, x: Any, y: Any, rounding_mode: str | None = None) -> SymTensor:
    if rounding_mode == "floor":
        return _floor_divide(ctx, x, y)
    if rounding_mode is not None or not isinstance(y, int | float) or y == 0:
        raise Undecidable("a division that rounds")
    if math.frexp(y)[0] in (0.5, -0.5):
        return ctx.pointwise(lambda a: numeric(a) / number(y), x)
    return ctx.pointwise(lambda a: on_constants(numeric(a), lambda value: value / number(y)), x)


def _log(ctx: RuleContext, x: SymTensor) -> SymTensor:
    def log(value: Value) -> Value:
        return number(math.log(value) if value > 0 else -math.inf)

    return ctx.pointwise(lambda a: on_constants(numeric(a), log), x)


ELEMENTS: dict[str, Rule] = {
    "eq ne lt le gt ge": _comparison,
    "logical_and bitwise_and __and__": _and,
    "logical_or bitwise_or __or__": _or,
    "logical_xor bitwise_xor __xor__": _xor,
    "logical_not bitwise_not": _not,
    "add sub rsub": _add,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "minimum": _minimum,
    "maximum": _maximum,
    "clamp clamp_min": _clamp,
    "clamp_max": lambda ctx, x, max: _clamp(ctx, x, max=max),
    "where": _where,
    "masked_fill": _masked_fill,
    "_to_copy to": cast,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "div": _div,
    "log": _log,
}
"""Names of ops, apart by spaces -> their rule."""


def _same(ctx: RuleContext, x: SymTensor, **_: Any) -> SymTensor:
    return x


def _view(ctx: RuleContext, x: SymTensor, *_: Any) -> SymTensor:
    return index_maps.reshape(x, ctx.shape, ctx.sizes)


def _expand(ctx: RuleContext, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return index_maps.expand(x, ctx.shape)


def _permute(ctx: RuleContext, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    return index_maps.permute(x, dims)


def _transpose(ctx: RuleContext, x: SymTensor, a: int, b: int) -> SymTensor:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return index_maps.permute(x, order)


def _t(ctx: RuleContext, x: SymTensor) -> SymTensor:
    return index_maps.permute(x, list(range(len(x.shape)))[::-1])


def _unsqueeze(ctx: RuleContext, x: SymTensor, dim: int) -> SymTensor:
    return index_maps.unsqueeze(x, dim)


def _squeeze(ctx: RuleContext, x: SymTensor, dim: int | Sequence[int] | None = None) -> SymTensor:
    return index_maps.squeeze(x, [dim] if isinstance(dim, int) else dim)


def _select(ctx: RuleContext, x: SymTensor, dim: int, index: Any) -> SymTensor:
    return index_maps.select(x, dim, ctx.size(index))


def _slice(
    ctx: RuleContext, x: SymTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> SymTensor:
    return index_maps.slice_(x, ctx.shape, dim, ctx.size(start or 0), ctx.size(step))


def _unbind(ctx: RuleContext, x: SymTensor, dim: int = 0) -> tuple[SymTensor, ...]:
    return tuple(index_maps.select(x, dim, number(i)) for i in range(len(ctx.outputs)))


def _split(ctx: RuleContext, x: SymTensor, sizes: Any, dim: int = 0) -> tuple[SymTensor, ...]:
    parts: list[SymTensor] = []
    start: Expr = ZERO
    for ref in ctx.outputs:
        assert ref is not None
        shape = tuple(ctx.size(s) for s in ref.shape)
        parts.append(index_maps.slice_(x, shape, dim, start, ONE))
        start = start + shape[dim]
    return tuple(parts)


def _flip(ctx: RuleContext, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    return index_maps.flip(x, dims)


def _roll(ctx: RuleContext, x: SymTensor, shifts: Any, dims: Any = ()) -> SymTensor:
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    if not dims:
        if len(x.shape) != 1:
            raise Undecidable("roll over flattened dims")
        dims = [0]
    for shift, dim in zip(shifts, dims, strict=True):
        x = index_maps.roll(x, ctx.size(shift), dim)
    return x


def _cat(ctx: RuleContext, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    return replace(index_maps.cat(parts, ctx.shape, dim), dtype=ctx.out.dtype)


def _stack(ctx: RuleContext, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    return _cat(ctx, [index_maps.unsqueeze(p, dim) for p in parts], dim)


def _pad(ctx: RuleContext, x: SymTensor, widths: Sequence[Any], value: Any = 0) -> SymTensor:
    fill = numeric(ctx.scalar(value)) if x.dtype is not torch.bool else (sympy.true if value else sympy.false)
    return index_maps.pad(x, ctx.shape, [ctx.size(w) for w in widths], fill)


def _repeat(ctx: RuleContext, x: SymTensor, *_: Any) -> SymTensor:
    lead = len(ctx.shape) - len(x.shape)

    def index_map(index: Index) -> Index:
        pairs = zip(index[lead:], x.shape, shape[lead:], strict=True)
        return tuple(i if size == whole else index_maps.split_index(i, size, ctx.sizes)[1] for i, size, whole in pairs)

    shape = ctx.shape
    return index_maps.view_of(x, shape, index_map)


def _index(ctx: RuleContext, x: SymTensor, indices: Sequence[SymTensor | None]) -> SymTensor:
    used = [t for t in indices if t is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for t in used):
        raise Undecidable("indexing by a boolean tensor")
    slots = [n for n, t in enumerate(indices) if t is not None]
    shape, rank = ctx.shape, max(len(t.shape) for t in used)
    first = slots[0] if slots == list(range(slots[0], slots[-1] + 1)) else 0

    def index_map(index: Index) -> Index:
        common, rest = index[first : first + rank], iter((*index[:first], *index[first + rank :]))
        picked = [numeric(t.broadcast_at(common)) if t is not None else None for t in indices]
        picked += [None] * (len(x.shape) - len(picked))
        return tuple(_from_end(p, x.shape[d]) if p is not None else next(rest) for d, p in enumerate(picked))

    return index_maps.view_of(x, shape, index_map)


def _from_end(place: Expr, size: Expr) -> Expr:
    return place + size if place.is_number and place.is_negative else place


def _index_select(ctx: RuleContext, x: SymTensor, dim: int, index: SymTensor) -> SymTensor:
    d = index_maps.wrap(dim, len(x.shape))
    return index_maps.view_of(x, ctx.shape, lambda i: (*i[:d], numeric(index.at((i[d],))), *i[d + 1 :]))


def _gather(ctx: RuleContext, x: SymTensor, dim: int, index: SymTensor, **_: Any) -> SymTensor:
    d = index_maps.wrap(dim, len(x.shape))
    return index_maps.view_of(x, ctx.shape, lambda i: (*i[:d], numeric(index.at(i)), *i[d + 1 :]))


def _embedding(ctx: RuleContext, weight: SymTensor, index: SymTensor, *_: Any) -> SymTensor:
    return index_maps.view_of(weight, ctx.shape, lambda i: (numeric(index.at(i[:-1])), i[-1]))


def _triangle(ctx: RuleContext, x: SymTensor, diagonal: Any = 0) -> SymTensor:
    op = "le" if ctx.op == "tril" else "ge"
    zero = sympy.false if x.dtype is torch.bool else ZERO

    def at(index: Index) -> Value:
        inside = compare(op, index[-1] - index[-2], ctx.size(diagonal))
        return choose(inside, x.at(index), zero)

    return SymTensor(x.shape, x.dtype, at)


def _arange(ctx: RuleContext, *args: Any, **_: Any) -> SymTensor:
    bounds = [ctx.size(a) for a in args[:3] if isinstance(a, int | float | sympy.Basic)]
    start = bounds[0] if len(bounds) > 1 else ZERO
    step = bounds[2] if len(bounds) > 2 else ONE
    return SymTensor(ctx.shape, ctx.out.dtype, lambda i: start + step * i[0])


def _constant(ctx: RuleContext, value: Any) -> SymTensor:
    element = ctx.scalar(value)
    element = truth(element) if ctx.out.dtype is torch.bool else numeric(element)
    return SymTensor(ctx.shape, ctx.out.dtype, lambda _: element)


def _full(ctx: RuleContext, *args: Any, fill_value: Any = None, **_: Any) -> SymTensor:
    return _constant(ctx, args[-1] if fill_value is None else fill_value)


def _zeros(ctx: RuleContext, *_: Any, **__: Any) -> SymTensor:
    return _constant(ctx, 0)


def _ones(ctx: RuleContext, *_: Any, **__: Any) -> SymTensor:
    return _constant(ctx, 1)


def _scalar_tensor(ctx: RuleContext, value: Any, **_: Any) -> SymTensor:
    return _constant(ctx, value)


def _fill(ctx: RuleContext, x: SymTensor, value: Any) -> SymTensor:
    if isinstance(value, SymTensor):
        return SymTensor(x.shape, x.dtype, lambda _: value.at(()))
    return _constant(ctx, value)


def _eye(ctx: RuleContext, *_: Any, **__: Any) -> SymTensor:
    as_value = truth if ctx.out.dtype is torch.bool else numeric
    return SymTensor(ctx.shape, ctx.out.dtype, lambda i: as_value(compare("eq", i[0], i[1])))


def _copy(ctx: RuleContext, x: SymTensor, source: SymTensor, *_: Any) -> SymTensor:
    return cast(ctx, index_maps.expand(source, ctx.shape))


def _select_scatter(ctx: RuleContext, x: SymTensor, source: SymTensor, dim: int, index: Any) -> SymTensor:
    d = index_maps.wrap(dim, len(x.shape))
    place = ctx.size(index) + (x.shape[d] if ctx.size(index).is_negative else 0)

    def at(i: Index) -> Value:
        return choose(compare("eq", i[d], place), source.at((*i[:d], *i[d + 1 :])), x.at(i))

    return SymTensor(x.shape, x.dtype, at)


def _slice_scatter(
    ctx: RuleContext, x: SymTensor, source: SymTensor, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> SymTensor:
    d = index_maps.wrap(dim, len(x.shape))
    first = ctx.size(start or 0)
    first = first + x.shape[d] if first.is_negative else first
    if step != 1:
        raise Undecidable("writing to a strided slice")

    def at(i: Index) -> Value:
        inside = sympy.true if first == 0 else compare("ge", i[d], first)
        if sympy.expand(first + source.shape[d] - x.shape[d]) != 0:
            inside = sympy.And(inside, compare("lt", i[d] - first, source.shape[d]))
        return choose(inside, source.at((*i[:d], i[d] - first, *i[d + 1 :])), x.at(i))

    return SymTensor(x.shape, x.dtype, at)


def _block_diag(ctx: RuleContext, parts: Sequence[SymTensor]) -> SymTensor:
    lengths = ", ".join(str(p.shape[0]) if p.shape else "1" for p in parts)
    raise Undecidable(f"block_diag bakes the lengths {lengths} of this batch's documents into the graph as constants")


MOVES: dict[str, Rule] = {
    "clone detach alias lift_fresh_copy lift_fresh contiguous positive": _same,
    "view _unsafe_view reshape _reshape_alias view_copy": _view,
    "expand expand_copy": _expand,
    "permute permute_copy": _permute,
    "transpose transpose_copy": _transpose,
    "t t_copy": _t,
    "unsqueeze unsqueeze_copy": _unsqueeze,
    "squeeze squeeze_copy": _squeeze,
    "select select_copy": _select,
    "slice slice_copy": _slice,
    "unbind": _unbind,
    "split split_with_sizes chunk": _split,
    "flip": _flip,
    "roll": _roll,
    "cat concatenate": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "embedding": _embedding,
    "tril triu": _triangle,
    "arange": _arange,
    "full full_like new_full": _full,
    "zeros zeros_like new_zeros": _zeros,
    "ones ones_like new_ones": _ones,
    "scalar_tensor": _scalar_tensor,
    "fill": _fill,
    "eye": _eye,
    "copy": _copy,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "block_diag": _block_diag,
}
"""Names of ops, apart by spaces -> their rule."""
