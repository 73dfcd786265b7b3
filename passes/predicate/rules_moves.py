"""Rules of ATen ops that move or make elements: views, gathers, writes to places, factories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch

from . import views
from .rules_values import cast
from .values import ONE, ZERO, Expr, Index, SymTensor, Value, compare, number, numeric, truth
from .views import Undecidable, choose

if TYPE_CHECKING:
    from .aten import Evaluator, Rule


def _same(ev: Evaluator, x: SymTensor, **_: Any) -> SymTensor:
    return x


def _view(ev: Evaluator, x: SymTensor, *_: Any) -> SymTensor:
    return views.reshape(x, ev.shape, ev.sizes)


def _expand(ev: Evaluator, x: SymTensor, *_: Any, **__: Any) -> SymTensor:
    return views.expand(x, ev.shape)


def _permute(ev: Evaluator, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    return views.permute(x, dims)


def _transpose(ev: Evaluator, x: SymTensor, a: int, b: int) -> SymTensor:
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return views.permute(x, order)


def _t(ev: Evaluator, x: SymTensor) -> SymTensor:
    return views.permute(x, list(range(len(x.shape)))[::-1])


def _unsqueeze(ev: Evaluator, x: SymTensor, dim: int) -> SymTensor:
    return views.unsqueeze(x, dim)


def _squeeze(ev: Evaluator, x: SymTensor, dim: int | Sequence[int] | None = None) -> SymTensor:
    return views.squeeze(x, [dim] if isinstance(dim, int) else dim)


def _select(ev: Evaluator, x: SymTensor, dim: int, index: Any) -> SymTensor:
    return views.select(x, dim, ev.size(index))


def _slice(ev: Evaluator, x: SymTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> SymTensor:
    return views.slice_(x, ev.shape, dim, ev.size(start or 0), ev.size(step))


def _unbind(ev: Evaluator, x: SymTensor, dim: int = 0) -> tuple[SymTensor, ...]:
    assert ev.call is not None
    return tuple(views.select(x, dim, number(i)) for i in range(len(ev.call.outputs)))


def _split(ev: Evaluator, x: SymTensor, sizes: Any, dim: int = 0) -> tuple[SymTensor, ...]:
    assert ev.call is not None
    parts: list[SymTensor] = []
    start: Expr = ZERO
    for ref in ev.call.outputs:
        assert ref is not None
        shape = tuple(ev.size(s) for s in ref.shape)
        parts.append(views.slice_(x, shape, dim, start, ONE))
        start = start + shape[dim]
    return tuple(parts)


def _flip(ev: Evaluator, x: SymTensor, dims: Sequence[int]) -> SymTensor:
    return views.flip(x, dims)


def _roll(ev: Evaluator, x: SymTensor, shifts: Any, dims: Any = ()) -> SymTensor:
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    if not dims:
        if len(x.shape) != 1:
            raise Undecidable("roll over flattened dims")
        dims = [0]
    for shift, dim in zip(shifts, dims, strict=True):
        x = views.roll(x, ev.size(shift), dim)
    return x


def _cat(ev: Evaluator, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    return replace(views.cat(parts, ev.shape, dim), dtype=ev.out.dtype)


def _stack(ev: Evaluator, parts: Sequence[SymTensor], dim: int = 0) -> SymTensor:
    return _cat(ev, [views.unsqueeze(p, dim) for p in parts], dim)


def _pad(ev: Evaluator, x: SymTensor, widths: Sequence[Any], value: Any = 0) -> SymTensor:
    fill = numeric(ev.scalar(value)) if x.dtype is not torch.bool else (sympy.true if value else sympy.false)
    return views.pad(x, ev.shape, [ev.size(w) for w in widths], fill)


def _repeat(ev: Evaluator, x: SymTensor, *_: Any) -> SymTensor:
    lead = len(ev.shape) - len(x.shape)

    def index_map(index: Index) -> Index:
        pairs = zip(index[lead:], x.shape, ev_shape[lead:], strict=True)
        return tuple(i if size == whole else views.split_index(i, size, ev.sizes)[1] for i, size, whole in pairs)

    ev_shape = ev.shape
    return views.view_of(x, ev_shape, index_map)


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


def _index_select(ev: Evaluator, x: SymTensor, dim: int, index: SymTensor) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    return views.view_of(x, ev.shape, lambda i: (*i[:d], numeric(index.at((i[d],))), *i[d + 1 :]))


def _gather(ev: Evaluator, x: SymTensor, dim: int, index: SymTensor, **_: Any) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    return views.view_of(x, ev.shape, lambda i: (*i[:d], numeric(index.at(i)), *i[d + 1 :]))


def _embedding(ev: Evaluator, weight: SymTensor, index: SymTensor, *_: Any) -> SymTensor:
    return views.view_of(weight, ev.shape, lambda i: (numeric(index.at(i[:-1])), i[-1]))


def _triangle(ev: Evaluator, x: SymTensor, diagonal: Any = 0) -> SymTensor:
    assert ev.call is not None
    op = "le" if ev.call.func.overloadpacket.__name__ == "tril" else "ge"
    zero = sympy.false if x.dtype is torch.bool else ZERO

    def at(index: Index) -> Value:
        inside = compare(op, index[-1] - index[-2], ev.size(diagonal))
        return choose(inside, x.at(index), zero)

    return SymTensor(x.shape, x.dtype, at)


def _arange(ev: Evaluator, *args: Any, **_: Any) -> SymTensor:
    bounds = [ev.size(a) for a in args[:3] if isinstance(a, int | float | sympy.Basic)]
    start = bounds[0] if len(bounds) > 1 else ZERO
    step = bounds[2] if len(bounds) > 2 else ONE
    return SymTensor(ev.shape, ev.out.dtype, lambda i: start + step * i[0])


def _constant(ev: Evaluator, value: Any) -> SymTensor:
    element = ev.scalar(value)
    element = truth(element) if ev.out.dtype is torch.bool else numeric(element)
    return SymTensor(ev.shape, ev.out.dtype, lambda _: element)


def _full(ev: Evaluator, *args: Any, fill_value: Any = None, **_: Any) -> SymTensor:
    return _constant(ev, args[-1] if fill_value is None else fill_value)


def _zeros(ev: Evaluator, *_: Any, **__: Any) -> SymTensor:
    return _constant(ev, 0)


def _ones(ev: Evaluator, *_: Any, **__: Any) -> SymTensor:
    return _constant(ev, 1)


def _scalar_tensor(ev: Evaluator, value: Any, **_: Any) -> SymTensor:
    return _constant(ev, value)


def _fill(ev: Evaluator, x: SymTensor, value: Any) -> SymTensor:
    if isinstance(value, SymTensor):
        return SymTensor(x.shape, x.dtype, lambda _: value.at(()))
    return _constant(ev, value)


def _eye(ev: Evaluator, *_: Any, **__: Any) -> SymTensor:
    as_value = truth if ev.out.dtype is torch.bool else numeric
    return SymTensor(ev.shape, ev.out.dtype, lambda i: as_value(compare("eq", i[0], i[1])))


def _copy(ev: Evaluator, x: SymTensor, source: SymTensor, *_: Any) -> SymTensor:
    return cast(ev, views.expand(source, ev.shape))


def _select_scatter(ev: Evaluator, x: SymTensor, source: SymTensor, dim: int, index: Any) -> SymTensor:
    d = views.wrap(dim, len(x.shape))
    place = ev.size(index) + (x.shape[d] if ev.size(index).is_negative else 0)

    def at(i: Index) -> Value:
        return choose(compare("eq", i[d], place), source.at((*i[:d], *i[d + 1 :])), x.at(i))

    return SymTensor(x.shape, x.dtype, at)


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


def _block_diag(ev: Evaluator, parts: Sequence[SymTensor]) -> SymTensor:
    lengths = ", ".join(str(p.shape[0]) if p.shape else "1" for p in parts)
    raise Undecidable(f"block_diag bakes the lengths {lengths} of this batch's documents into the graph as constants")


MOVES: dict[str, Rule] = {
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "contiguous", "positive"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"), _view),
    **dict.fromkeys(("expand", "expand_copy"), _expand),
    **dict.fromkeys(("permute", "permute_copy"), _permute),
    **dict.fromkeys(("transpose", "transpose_copy"), _transpose),
    **dict.fromkeys(("t", "t_copy"), _t),
    **dict.fromkeys(("unsqueeze", "unsqueeze_copy"), _unsqueeze),
    **dict.fromkeys(("squeeze", "squeeze_copy"), _squeeze),
    **dict.fromkeys(("select", "select_copy"), _select),
    **dict.fromkeys(("slice", "slice_copy"), _slice),
    "unbind": _unbind,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    "flip": _flip,
    "roll": _roll,
    **dict.fromkeys(("cat", "concatenate"), _cat),
    "stack": _stack,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "embedding": _embedding,
    **dict.fromkeys(("tril", "triu"), _triangle),
    "arange": _arange,
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _zeros),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _ones),
    "scalar_tensor": _scalar_tensor,
    "fill": _fill,
    "eye": _eye,
    "copy": _copy,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "block_diag": _block_diag,
}
