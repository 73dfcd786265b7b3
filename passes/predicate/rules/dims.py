"""Rules of ATen ops that run over a dim: sums, running sums, searches, writes at computed places.

Each makes a generator of its bound variable: sum over a dim of n elements x(i) is SumOver(x(i), i, n). What can be told
as a count is one, as `recognise` reads counts:

    any(x)                        SumOver(x(i), i, n) > 0
    searchsorted(row, v, right)   SumOver(row(i) <= v, i, n)
    x[places] = c, read at k      c where SumOver(places(i) == k, i, n) > 0, else x(k)
    x[mask] = c, read at k        c where mask(k), else x(k)
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from cp_rewrite.passes.predicate.context import Rule, RuleContext
from cp_rewrite.passes.predicate.symbolic import (
    ZERO,
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
    numeric,
    truth,
)

from .index_maps import wrap


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
