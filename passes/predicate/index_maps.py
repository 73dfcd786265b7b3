"""ATen ops that only move elements: each is a map from an index of the result to an index of its input.

y = x.transpose(0, 1)      y(i, j) = x(j, i)
y = x[:, None]             y(i, 0, k) = x(i, k)
y = x.view(-1, 4)          y(i, j) = x(4 i + j)         of a 1-d x
y = cat([x, z])            y(i) = x(i) where i < n, else z(i - n)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from .symbolic import ONE, ZERO, Expr, Index, SymTensor, Undecidable, choose, compare

Shape = tuple[Expr, ...]
Sizes = Mapping[Expr, Expr]
"""Index symbol -> the size of the dim that it runs over."""


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def view_of(x: SymTensor, shape: Shape, index_map: Callable[[Index], Index]) -> SymTensor:
    """A tensor that reads `x` at `index_map(index)`."""
    return SymTensor(shape, x.dtype, lambda index: x.at(index_map(index)))


def expand(x: SymTensor, sizes: Sequence[Expr]) -> SymTensor:
    lead = len(sizes) - len(x.shape)
    shape = tuple(x.shape[i - lead] if size == -1 else size for i, size in enumerate(sizes))
    return SymTensor(shape, x.dtype, x.broadcast_at)


def permute(x: SymTensor, dims: Sequence[int]) -> SymTensor:
    order = [wrap(d, len(x.shape)) for d in dims]
    back = [order.index(d) for d in range(len(order))]
    return view_of(x, tuple(x.shape[d] for d in order), lambda i: tuple(i[b] for b in back))


def unsqueeze(x: SymTensor, dim: int) -> SymTensor:
    d = wrap(dim, len(x.shape) + 1)
    return view_of(x, (*x.shape[:d], ONE, *x.shape[d:]), lambda i: (*i[:d], *i[d + 1 :]))


def squeeze(x: SymTensor, dims: Sequence[int] | None) -> SymTensor:
    rank = len(x.shape)
    asked = range(rank) if dims is None else [wrap(d, rank) for d in dims]
    gone = {d for d in asked if x.shape[d] == 1}

    def index_map(index: Index) -> Index:
        rest = iter(index)
        return tuple(ZERO if d in gone else next(rest) for d in range(rank))

    return view_of(x, tuple(s for d, s in enumerate(x.shape) if d not in gone), index_map)


def select(x: SymTensor, dim: int, at: Expr) -> SymTensor:
    d = wrap(dim, len(x.shape))
    place = at + x.shape[d] if at.is_negative else at
    return view_of(x, (*x.shape[:d], *x.shape[d + 1 :]), lambda i: (*i[:d], place, *i[d:]))


def slice_(x: SymTensor, shape: Shape, dim: int, start: Expr, step: Expr) -> SymTensor:
    """x[start::step] of a dim. `shape` is the result's, which knows where the slice ends."""
    d = wrap(dim, len(x.shape))
    if start.is_negative:
        start = start + x.shape[d]
    elif not start.is_number and start != 0:
        raise Undecidable(f"a slice starts at {start}, which is no constant")
    return view_of(x, shape, lambda i: (*i[:d], start + step * i[d], *i[d + 1 :]))


def flip(x: SymTensor, dims: Sequence[int]) -> SymTensor:
    flipped = {wrap(d, len(x.shape)) for d in dims}
    return view_of(x, x.shape, lambda i: tuple(x.shape[d] - 1 - e if d in flipped else e for d, e in enumerate(i)))


def roll(x: SymTensor, shift: Expr, dim: int) -> SymTensor:
    """y(i) = x(i - shift), wrapped around: for shift >= 0, x(i - shift + n) where i < shift."""
    d = wrap(dim, len(x.shape))

    def function(index: Index) -> Any:
        moved = sympy.expand(index[d] - shift)
        wrapped = moved + x.shape[d] if shift.is_nonnegative else moved - x.shape[d]
        outside = compare("lt", moved, ZERO) if shift.is_nonnegative else compare("ge", moved, x.shape[d])
        at = [x.at((*index[:d], place, *index[d + 1 :])) for place in (wrapped, moved)]
        return choose(outside, *at)

    return SymTensor(x.shape, x.dtype, function)


def cat(parts: Sequence[SymTensor], shape: Shape, dim: int) -> SymTensor:
    """y(i) = the first part at i where i < its size, else the next one at i less that, and so on."""
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

    return SymTensor(shape, parts[0].dtype, function)


def pad(x: SymTensor, shape: Shape, widths: Sequence[Expr], fill: Expr) -> SymTensor:
    """y(i) = x(i - before), `fill` outside of x. `widths`: before and after the last dim, then the one before it, …"""
    before = {len(shape) - 1 - i // 2: widths[i] for i in range(0, len(widths), 2)}

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
    """Whether `left`, the product of a run so far, must grow to become `right`."""
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
