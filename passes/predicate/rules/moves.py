"""Rules of ATen ops that move or make elements: views, gathers, writes to places, factories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from cp_rewrite.passes.predicate.context import Rule, RuleContext
from cp_rewrite.passes.predicate.symbolic import (
    ONE,
    ZERO,
    Expr,
    Index,
    SymTensor,
    Undecidable,
    Value,
    choose,
    compare,
    number,
    numeric,
    truth,
)

from . import index_maps
from .elements import cast


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
