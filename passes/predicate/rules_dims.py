"""Rules of ATen ops that run over a dim: sums, running sums, searches, writes at computed places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch

from . import views
from .values import ZERO, Index, RepeatIndex, RunningMax, RunningSum, SumOver, SymTensor, Value, compare, numeric, truth
from .views import Undecidable, choose

if TYPE_CHECKING:
    from .aten import Evaluator, Rule


def _cumsum(ev: Evaluator, x: SymTensor, dim: int, dtype: torch.dtype | None = None) -> SymTensor:
    return _running(ev, RunningSum, x, dim)


def _cummax(ev: Evaluator, x: SymTensor, dim: int) -> tuple[SymTensor, None]:
    return _running(ev, RunningMax, x, dim), None


def _running(ev: Evaluator, kind: Any, x: SymTensor, dim: int) -> SymTensor:
    d, dtype = views.wrap(dim, len(x.shape)), ev.out.dtype

    def at(index: Index) -> Value:
        j = ev.dummy(x.shape[d], index)
        return kind(ev.converted(x, dtype, (*index[:d], j, *index[d + 1 :])), j, index[d])

    return SymTensor(x.shape, dtype, at)


def _sum(ev: Evaluator, x: SymTensor, dims: Any = None, keepdim: bool = False, **_: Any) -> SymTensor:
    assert ev.call is not None
    name, dtype = ev.call.func.overloadpacket.__name__, ev.out.dtype
    rank = len(x.shape)
    over = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(rank)))
    over = [views.wrap(d, rank) for d in over]
    if len(over) != 1:
        raise Undecidable(f"{name} over {len(over)} dims at once")
    (d,) = over

    def at(index: Index) -> Value:
        outer = (*index[:d], *index[d + 1 :]) if keepdim else index
        i = ev.dummy(x.shape[d], index)
        place = (*outer[:d], i, *outer[d:])
        if name == "sum":
            return SumOver(ev.converted(x, dtype, place), i, x.shape[d])
        inner = x.at(place)
        held = truth(inner) if name == "any" else sympy.Not(truth(inner))
        hits = compare("gt", SumOver(numeric(held), i, x.shape[d]), ZERO)
        return hits if name == "any" else sympy.Not(hits)

    return SymTensor(ev.shape, dtype, at)


def _searchsorted(ev: Evaluator, a: Any, b: Any, *, right: bool = False, side: Any = None, **kw: Any) -> SymTensor:
    assert ev.call is not None
    if kw.get("sorter") is not None:
        raise Undecidable("searchsorted with a sorter")
    name = ev.call.func.overloadpacket.__name__
    row, values = (a, b) if name == "searchsorted" else (b, a)
    op = "le" if right or side == "right" else "lt"

    def at(index: Index) -> Value:
        value = values.at(index) if isinstance(values, SymTensor) else ev.size(values)
        i = ev.dummy(row.shape[-1], index)
        place = (i,) if len(row.shape) == 1 else (*index[:-1], i)
        return SumOver(numeric(compare(op, row.at(place), value)), i, row.shape[-1])

    return SymTensor(ev.shape, ev.out.dtype, at)


def _repeat_interleave(ev: Evaluator, repeats: SymTensor, *args: Any, **_: Any) -> SymTensor:
    if args and not isinstance(args[0], int | sympy.Basic):
        raise Undecidable("repeat_interleave by a tensor, not decomposed")

    def at(index: Index) -> Value:
        i = ev.dummy(repeats.shape[0], index)
        return RepeatIndex(numeric(repeats.at((i,))), i, repeats.shape[0], index[0])

    return SymTensor(ev.shape, ev.out.dtype, at)


def _write_at(ev: Evaluator, x: SymTensor, *args: Any, **options: Any) -> SymTensor:
    """`value` where some index says so; elsewhere what was there. For one constant written into a 1-d tensor."""
    assert ev.call is not None
    name = ev.call.func.overloadpacket.__name__
    where, value = (args[0][0], args[1]) if name == "index_put" else (args[1], args[2])
    added = options or (len(args) > 2 and args[2] is True)
    if len(x.shape) != 1 or added or where.dtype is torch.bool or len(where.shape) != 1:
        raise Undecidable(f"{ev.call.func} other than of one constant into a 1-d tensor")
    places = where.shape[0]

    def at(index: Index) -> Value:
        i = ev.dummy(places, index)
        written = value.broadcast_at((i,)) if isinstance(value, SymTensor) else ev.scalar(value)
        if written not in (sympy.true, sympy.false) and not written.is_number:
            raise Undecidable("writing a value that varies")
        hits = SumOver(numeric(compare("eq", where.at((i,)), index[0])), i, places)
        as_value = truth if x.dtype is torch.bool else numeric
        return choose(compare("gt", hits, ZERO), as_value(written), x.at(index))

    return SymTensor(x.shape, x.dtype, at)


DIMS: dict[str, Rule] = {
    "cumsum": _cumsum,
    "cummax": _cummax,
    **dict.fromkeys(("sum", "any", "all"), _sum),
    **dict.fromkeys(("searchsorted", "bucketize"), _searchsorted),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("scatter", "index_put", "index_fill"), _write_at),
}
