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

Rules of `MOVES` are maps from an index of the result to an index of the input:

    y = x.transpose(0, 1)         y(i, j) = x(j, i)
    y = x[:, None]                y(i, 0, k) = x(i, k)
    y = x.view(-1, 4)             y(i, j) = x(4 i + j)         of a 1-d x
    y = cat([x, z])               y(i) = x(i) where i < n, else z(i - n)

bool tensors hold truths and others numbers, so `truth` and `numeric` stand where an op takes both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from .context import Rule, RuleContext
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

Shape = tuple[Expr, ...]
Sizes = Mapping[Expr, Expr]
"""Index symbol -> the size of the dim that it runs over."""


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


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
    "cumsum": lambda ctx, x, dim, dtype=None: _running(ctx, RunningSum, x, dim),
    "cummax": lambda ctx, x, dim: (_running(ctx, RunningMax, x, dim), None),
    "sum any all": _sum,
    "searchsorted bucketize": _searchsorted,
    "repeat_interleave": _repeat_interleave,
    "scatter index_put index_fill": _write_at,
}
"""Names of ops, apart by spaces -> their rule."""


def _xor(ctx: RuleContext, x: Any, y: Any) -> SymTensor:
    return _logic(ctx, lambda a, b: sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b)), x, y)


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


def cast(ctx: RuleContext, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return ctx.pointwise(truth if ctx.out.dtype is torch.bool else numeric, x)


def _div(ctx: RuleContext, x: Any, y: Any, rounding_mode: str | None = None) -> SymTensor:
    if rounding_mode == "floor" or ctx.op == "floor_divide":
        return ctx.pointwise(lambda a, b: sympy.floor(numeric(a) / numeric(b)), x, y)
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
    "eq ne lt le gt ge": lambda ctx, x, y: ctx.comparison(ctx.op, x, y),
    "logical_and bitwise_and __and__": lambda ctx, x, y: _logic(ctx, sympy.And, x, y),
    "logical_or bitwise_or __or__": lambda ctx, x, y: _logic(ctx, sympy.Or, x, y),
    "logical_xor bitwise_xor __xor__": _xor,
    "logical_not bitwise_not": lambda ctx, x: _logic(ctx, sympy.Not, x),
    "add sub rsub": _add,
    "mul": _mul,
    "neg": lambda ctx, x: ctx.pointwise(lambda a: -numeric(a), x),
    "abs": _abs,
    "sign": _sign,
    "minimum": _minimum,
    "maximum": _maximum,
    "clamp clamp_min": _clamp,
    "clamp_max": lambda ctx, x, max: _clamp(ctx, x, max=max),
    "where": _where,
    "masked_fill": lambda ctx, x, mask, value: _where(ctx, mask, value, x),
    "_to_copy to": cast,
    "remainder": lambda ctx, x, y: ctx.pointwise(lambda a, b: sympy.Mod(numeric(a), numeric(b)), x, y),
    "div floor_divide": _div,
    "log": _log,
}
"""Names of ops, apart by spaces -> their rule."""


def view_of(x: SymTensor, shape: Shape, index_map: Callable[[Index], Index]) -> SymTensor:
    """A tensor that reads `x` at `index_map(index)`."""
    return SymTensor(shape, x.dtype, lambda index: x.at(index_map(index)))


def reshape(x: SymTensor, shape: Shape, sizes: Sizes) -> SymTensor:
    """Match runs of dims with equal products, then flatten each run and split it again.

    (B, T, 8) -> (B·T, 2, 4)      runs: B T | 8  and  B·T | 2 4
    y(i, j, k) = x(i // T, i % T, 4 j + k)
    """
    groups = _groups(x.shape, shape)

    def index_map(index: Index) -> Index:
        place: list[Expr] = []
        for old, new in groups:
            flat = _flatten([index[d] for d in new], [shape[d] for d in new])
            place += _unflatten(flat, [x.shape[d] for d in old], sizes)
        return tuple(place)

    return view_of(x, shape, index_map)


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dims of equally many elements in both shapes: (2, 3, 4), (6, 4) -> ([0, 1], [0]), ([2], [1])."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(a), j + len(b)
        left, right = sympy.prod([old[d] for d in a]), sympy.prod([new[d] for d in b])
        while sympy.expand(left - right) != 0:
            grow_left = i < len(old) and (j >= len(new) or _divides(left, right))
            if grow_left:
                left, a, i = left * old[i], [*a, i], i + 1
            elif j < len(new):
                right, b, j = right * new[j], [*b, j], j + 1
            else:
                raise Undecidable(f"a reshape from {old} to {new} can't be followed")
        groups.append((a, b))
    return groups


def _divides(left: Expr, right: Expr) -> bool:
    """True if `left`, the product of a run so far, must grow to become `right`."""
    if left.is_Integer and right.is_Integer:
        return bool(left < right)
    return not sympy.cancel(right / left).as_numer_denom()[1].free_symbols


def _flatten(index: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    flat: Expr = ZERO
    for e, size in zip(index, shape, strict=True):
        flat = flat * size + e
    return sympy.expand(flat)


def _unflatten(flat: Expr, shape: Sequence[Expr], sizes: Sizes) -> list[Expr]:
    if len(shape) == 1:
        return [flat]
    index: list[Expr] = []
    for size in reversed(shape[1:]):
        flat, rest = split_index(flat, size, sizes)
        index.insert(0, rest)
    return [flat, *index] if shape else []


def split_index(flat: Expr, size: Expr, sizes: Sizes) -> tuple[Expr, Expr]:
    """(flat // size, flat % size): exact where the terms of `flat` fall apart, else as floor and Mod.

    8 b + k, 8       ->  (b, k)        where k runs over 8 or fewer
    8 b + k + 1, 8   ->  (b + floor((k + 1) / 8), Mod(k + 1, 8))
    """
    if size == 1:
        return flat, ZERO
    high: Expr = ZERO
    low: Expr = ZERO
    for term in sympy.Add.make_args(flat):
        quotient = sympy.cancel(term / size)
        whole = not (quotient.as_numer_denom()[1] - 1)
        high, low = (high + quotient, low) if whole else (high, low + term)
    if low != 0 and not _fits(low, size, sizes):
        return high + sympy.floor(low / size), sympy.Mod(low, size)
    return high, low


def _fits(low: Expr, size: Expr, sizes: Sizes) -> bool:
    """0 <= low < size, from the sizes of the dims that its index symbols run over."""
    top: Expr = ZERO
    for term in sympy.Add.make_args(low):
        coefficient, symbols = term.as_coeff_mul()
        known = [s for s in symbols if s in sizes]
        if not coefficient.is_nonnegative or (symbols and len(known) != 1):
            return False
        rest = sympy.prod([s for s in symbols if s not in sizes])
        top += coefficient * rest * (sizes[known[0]] - 1) if known else coefficient
    slack = sympy.expand(size - 1 - top)
    return bool(slack.is_nonnegative)


def _expand(ctx: RuleContext, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return SymTensor(ctx.shape, x.dtype, x.broadcast_at)


def _permute(ctx: RuleContext, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    order = [wrap(d, len(x.shape)) for d in dims]
    back = [order.index(d) for d in range(len(order))]
    return view_of(x, tuple(x.shape[d] for d in order), lambda i: tuple(i[b] for b in back))


def _transpose(ctx: RuleContext, x: SymTensor, a: int, b: int) -> SymTensor:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return _permute(ctx, x, order)


def _unsqueeze(ctx: RuleContext, x: SymTensor, dim: int) -> SymTensor:
    d = wrap(dim, len(x.shape) + 1)
    return view_of(x, (*x.shape[:d], ONE, *x.shape[d:]), lambda i: (*i[:d], *i[d + 1 :]))


def _squeeze(ctx: RuleContext, x: SymTensor, dim: int | Sequence[int] | None = None) -> SymTensor:
    rank = len(x.shape)
    asked = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for d in (wrap(each, rank) for each in asked) if x.shape[d] == 1}

    def index_map(index: Index) -> Index:
        rest = iter(index)
        return tuple(ZERO if d in gone else next(rest) for d in range(rank))

    return view_of(x, tuple(s for d, s in enumerate(x.shape) if d not in gone), index_map)


def _select(ctx: RuleContext, x: SymTensor, dim: int, index: Any) -> SymTensor:
    d, place = wrap(dim, len(x.shape)), ctx.size(index)
    place = place + x.shape[d] if place.is_negative else place
    return view_of(x, (*x.shape[:d], *x.shape[d + 1 :]), lambda i: (*i[:d], place, *i[d:]))


def _slice(
    ctx: RuleContext, x: SymTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> SymTensor:
    return _sliced(x, ctx.shape, dim, ctx.size(start or 0), ctx.size(step))


def _sliced(x: SymTensor, shape: Shape, dim: int, start: Expr, step: Expr) -> SymTensor:
    """x[start::step] of a dim. `shape` is the result's, which knows where the slice ends."""
    d = wrap(dim, len(x.shape))
    if start.is_negative:
        start = start + x.shape[d]
    elif not start.is_number and start != 0:
        raise Undecidable(f"a slice starts at {start}, which is no constant")
    return view_of(x, shape, lambda i: (*i[:d], start + step * i[d], *i[d + 1 :]))


def _split(ctx: RuleContext, x: SymTensor, sizes: Any, dim: int = 0) -> tuple[SymTensor, ...]:
    parts: list[SymTensor] = []
    start: Expr = ZERO
    for ref in ctx.outputs:
        assert ref is not None
        shape = tuple(ctx.size(s) for s in ref.shape)
        parts.append(_sliced(x, shape, dim, start, ONE))
        start = start + shape[dim]
    return tuple(parts)


def _flip(ctx: RuleContext, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    flipped = {wrap(d, len(x.shape)) for d in dims}
    return view_of(x, x.shape, lambda i: tuple(x.shape[d] - 1 - e if d in flipped else e for d, e in enumerate(i)))


def _roll(ctx: RuleContext, x: SymTensor, shifts: Any, dims: Any = ()) -> SymTensor:
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    if not dims:
        if len(x.shape) != 1:
            raise Undecidable("roll over flattened dims")
        dims = [0]
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, ctx.size(shift), dim)
    return x


def _rolled(x: SymTensor, shift: Expr, dim: int) -> SymTensor:
    """y(i) = x(i - shift), wrapped around: for shift >= 0, x(i - shift + n) where i < shift."""
    d = wrap(dim, len(x.shape))

    def function(index: Index) -> Any:
        moved = sympy.expand(index[d] - shift)
        wrapped = moved + x.shape[d] if shift.is_nonnegative else moved - x.shape[d]
        outside = compare("lt", moved, ZERO) if shift.is_nonnegative else compare("ge", moved, x.shape[d])
        at = [x.at((*index[:d], place, *index[d + 1 :])) for place in (wrapped, moved)]
        return choose(outside, *at)

    return SymTensor(x.shape, x.dtype, function)


def _cat(ctx: RuleContext, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    """y(i) = the first part at i where i < its size, else the next one at i less that, and so on."""
    shape = ctx.shape
    d = wrap(dim, len(shape))
    parts = [p for p in parts if len(p.shape) == len(shape)]  # cat skips empty 1-d tensors

    def function(index: Index) -> Any:
        offset: Expr = ZERO
        pieces: list[tuple[Expr, Any]] = []
        for part in parts:
            pieces.append((offset + part.shape[d], part.at((*index[:d], index[d] - offset, *index[d + 1 :]))))
            offset = offset + part.shape[d]
        value = pieces[-1][1]
        for end, piece in reversed(pieces[:-1]):
            value = choose(compare("lt", index[d], end), piece, value)
        return value

    return SymTensor(shape, ctx.out.dtype, function)


def _pad(ctx: RuleContext, x: SymTensor, widths: Sequence[Any], value: Any = 0) -> SymTensor:
    """y(i) = x(i - before), `value` outside of x. `widths`: before and after the last dim, then the one before it, …"""
    fill = numeric(ctx.scalar(value)) if x.dtype is not torch.bool else (sympy.true if value else sympy.false)
    shape = ctx.shape
    before = {len(shape) - 1 - i // 2: ctx.size(widths[i]) for i in range(0, len(widths), 2)}

    def function(index: Index) -> Any:
        inner = tuple(e - before.get(d, ZERO) for d, e in enumerate(index))
        outside = [
            test
            for d, width in before.items()
            for test in (
                compare("lt", inner[d], ZERO) if width != 0 else sympy.false,
                compare("ge", inner[d], x.shape[d]) if shape[d] != x.shape[d] + width else sympy.false,
            )
        ]
        return choose(sympy.Or(*outside), fill, x.at(inner))

    return SymTensor(shape, x.dtype, function)


def _repeat(ctx: RuleContext, x: SymTensor, *_: Any) -> SymTensor:
    lead = len(ctx.shape) - len(x.shape)

    def index_map(index: Index) -> Index:
        pairs = zip(index[lead:], x.shape, shape[lead:], strict=True)
        return tuple(i if size == whole else split_index(i, size, ctx.sizes)[1] for i, size, whole in pairs)

    shape = ctx.shape
    return view_of(x, shape, index_map)


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

    return view_of(x, shape, index_map)


def _from_end(place: Expr, size: Expr) -> Expr:
    return place + size if place.is_number and place.is_negative else place


def _index_select(ctx: RuleContext, x: SymTensor, dim: int, index: SymTensor) -> SymTensor:
    d = wrap(dim, len(x.shape))
    return view_of(x, ctx.shape, lambda i: (*i[:d], numeric(index.at((i[d],))), *i[d + 1 :]))


def _gather(ctx: RuleContext, x: SymTensor, dim: int, index: SymTensor, **_: Any) -> SymTensor:
    d = wrap(dim, len(x.shape))
    return view_of(x, ctx.shape, lambda i: (*i[:d], numeric(index.at(i)), *i[d + 1 :]))


def _embedding(ctx: RuleContext, weight: SymTensor, index: SymTensor, *_: Any) -> SymTensor:
    return view_of(weight, ctx.shape, lambda i: (numeric(index.at(i[:-1])), i[-1]))


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


def _fill(ctx: RuleContext, x: SymTensor, value: Any) -> SymTensor:
    if isinstance(value, SymTensor):
        return SymTensor(x.shape, x.dtype, lambda _: value.at(()))
    return _constant(ctx, value)


def _eye(ctx: RuleContext, *_: Any, **__: Any) -> SymTensor:
    as_value = truth if ctx.out.dtype is torch.bool else numeric
    return SymTensor(ctx.shape, ctx.out.dtype, lambda i: as_value(compare("eq", i[0], i[1])))


def _select_scatter(ctx: RuleContext, x: SymTensor, source: SymTensor, dim: int, index: Any) -> SymTensor:
    d = wrap(dim, len(x.shape))
    place = ctx.size(index) + (x.shape[d] if ctx.size(index).is_negative else 0)

    def at(i: Index) -> Value:
        return choose(compare("eq", i[d], place), source.at((*i[:d], *i[d + 1 :])), x.at(i))

    return SymTensor(x.shape, x.dtype, at)


def _slice_scatter(
    ctx: RuleContext, x: SymTensor, source: SymTensor, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> SymTensor:
    d = wrap(dim, len(x.shape))
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
    "clone detach alias lift_fresh_copy lift_fresh contiguous positive": lambda ctx, x, **_: x,
    "view _unsafe_view reshape _reshape_alias view_copy": lambda ctx, x, *_: reshape(x, ctx.shape, ctx.sizes),
    "expand expand_copy": _expand,
    "permute permute_copy": _permute,
    "transpose transpose_copy": _transpose,
    "t t_copy": lambda ctx, x: _permute(ctx, x, range(len(x.shape))[::-1]),
    "unsqueeze unsqueeze_copy": _unsqueeze,
    "squeeze squeeze_copy": _squeeze,
    "select select_copy": _select,
    "slice slice_copy": _slice,
    "unbind": lambda ctx, x, dim=0: tuple(_select(ctx, x, dim, i) for i in range(len(ctx.outputs))),
    "split split_with_sizes chunk": _split,
    "flip": _flip,
    "roll": _roll,
    "cat concatenate": _cat,
    "stack": lambda ctx, parts, dim=0: _cat(ctx, [_unsqueeze(ctx, p, dim) for p in parts], dim),
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "embedding": _embedding,
    "tril triu": _triangle,
    "arange": _arange,
    "full full_like new_full": _full,
    "zeros zeros_like new_zeros": lambda ctx, *_, **__: _constant(ctx, 0),
    "ones ones_like new_ones": lambda ctx, *_, **__: _constant(ctx, 1),
    "scalar_tensor": lambda ctx, value, **_: _constant(ctx, value),
    "fill": _fill,
    "eye": _eye,
    "copy": lambda ctx, x, source, *_: cast(ctx, _expand(ctx, source)),
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "block_diag": _block_diag,
}
"""Names of ops, apart by spaces -> their rule."""
