"""Ops that move tokens to other places: the map from entries of the whole row to those of their results.

    a = F.pad(x, (0, 0, 2, 0))         0 0, [0, T) of x
    b = a[:, :-2]                      [0, T) of a: 0 0, [0, T - 2) of x

T is the row's number of tokens: where the graph says S - 1 of a shard of S tokens, one process has T - 1. Each function
raises Mixes where the entries can't be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import REPLICATED, B, Mixes, Moved, Partial, Rows, T, Taps, fewer, with_fewer
from cp_rewrite.planning.row_map import ROW, ZERO, Piece, RowMap, TokenCount


def _move(gives: Callable[[Call], Moved]) -> Callable[[Call], Moved]:
    """The state of the one result of an op that moves tokens, where that is all it does."""

    @wraps(gives)
    def move(call: Call) -> Moved:
        if len(call.outs) != 1 or "out" in call.kwargs or call.written:
            raise Mixes(f"{call.name} of tokens in other places")
        new = gives(call)
        if call.name not in ("convolution", "_to_copy") and call.outs[0].dtype != call.first.dtype:
            raise Mixes(f"{call.name} of tokens in other places gives another dtype")
        length = _length(call, call.outs[0], new.rows.token_dim)
        if new.entries.length != length:
            raise Mixes(f"{call.name} moves tokens by a number that is not known")
        return new

    return move


def follow_source(call: Call) -> None:
    """Note that an op gives the very tensor that it was given."""
    sources = call.facts.sources
    same = call.name == "slice" and call.sizes(call.first) == call.sizes(call.outs[0])
    if call.tensors and id(call.first) in sources and (same or _casts_for_conv(call)):
        sources[id(call.outs[0])] = sources[id(call.first)]


def _of_entries(x: Moved, after: RowMap) -> Moved:
    """A tensor's entries, as a map reads them."""
    entries = x.entries.then(after)
    if entries is None:
        raise Mixes("takes more tokens than there are")
    return replace(x, entries=entries)


def _whole(call: Call, x: Tensor) -> Moved:
    """A tensor's entries as they are."""
    state = call.state(x)
    if isinstance(state, Moved):
        return state
    source = call.facts.sources.get(id(x))
    if not isinstance(state, Rows) or source is None or state.shard_rows is not None or state.key:
        raise Mixes("moves something else than rows of tokens")
    dims, by = with_fewer(state.dims, 0), fewer(state.dims)
    batch = sum(dim == (B,) for dim in dims)
    others = any(dim not in (None, (B,), (T,)) for dim in dims)
    if others or dims[state.token_dim] != (T,) or (batch != 1 and call.extents.batch != 1):
        raise Mixes("moves tokens that are not in a dim of their own")
    call.use_positions(x)
    return Moved(source, replace(state, dims=dims), RowMap.entries(ZERO, ROW - TokenCount(by)))


def _number(call: Call, value: Any) -> TokenCount:
    """A number of the graph as one of the whole row."""
    found = call.extents.token_count(value)
    if found is None or found.times not in (0, 1, 2):
        raise Mixes("moves tokens by a number that is not known")
    return found


def _length(call: Call, x: Tensor, dim: int) -> TokenCount:
    return _number(call, x.shape[dim])


def _dim(call: Call, x: Moved) -> int:
    """The token dim, which must be the op's."""
    if call.arg("dim") is None or call.arg("dim") % len(x.rows.dims) != x.rows.token_dim:
        raise Mixes(f"{call.name} along another dim than that of the tokens")
    return x.rows.token_dim


@_move
def sliced(call: Call) -> Moved:
    x = _whole(call, call.first)
    dim = call.arg("dim") % call.first.ndim
    if dim != x.rows.token_dim:
        if call.sizes(call.first)[dim] == call.sizes(call.outs[0])[dim]:
            return x
        raise Mixes("takes a part of another dim of tokens in other places")
    if call.arg("step") not in (None, 1):
        raise Mixes("takes every other token")
    start = _number(call, call.arg("start") or 0)
    if start.times == 0 and start.plus < 0:
        start = max(start + x.entries.length, ZERO, key=TokenCount.order)  # as many as there are, where there are fewer
    return _of_entries(x, RowMap.entries(start, _length(call, call.outs[0], dim)))


@_move
def padded(call: Call) -> Moved:
    x, amounts = _whole(call, call.first), call.arg("pad")
    ndim, value = call.first.ndim, call.arg("value")
    if not all(isinstance(n, int) for n in amounts) or not isinstance(value, int | float):
        raise Mixes("pads by a number that is not known")
    for i in range(len(amounts) // 2):  # from the last dim on: (before, after)
        before, after = amounts[2 * i : 2 * i + 2]
        if ndim - 1 - i != x.rows.token_dim and (before or after):
            raise Mixes("pads another dim too")
        if ndim - 1 - i == x.rows.token_dim:
            start, cut = max(-before, 0), max(-before, 0) + max(-after, 0)
            own = RowMap.entries(TokenCount(start), x.entries.length - TokenCount(cut))
            ends = [RowMap.same(TokenCount(max(n, 0)), value) for n in (before, after)]
            x = _of_entries(x, ends[0] + own + ends[1])
    return x


@_move
def joined(call: Call) -> Moved:
    tensors: list[Tensor] = [x for x in call.arg("tensors") if x.shape != (0,)]
    first = next((_whole(call, x) for x in tensors if not _without_tokens(call, x)), None)
    if first is None:
        raise Mixes("joins no tokens")
    dim = _dim(call, first)
    entries = RowMap(())
    for x in tensors:
        if _without_tokens(call, x):
            source = call.facts.sources.get(id(x))
            length = _length(call, x, dim)
            if source is None or length.times:
                raise Mixes("joins something that is made at once to tokens")
            entries += RowMap((Piece(length, of=source),))
            continue
        part = _whole(call, x)
        plain = all(piece.of is not None for piece in part.entries.pieces)
        if not plain and (part.source, part.taps) != (first.source, first.taps):
            if any(piece.of is None for piece in first.entries.pieces):
                raise Mixes("joins tokens of several tensors")
            first = part
        if part.rows.dims != first.rows.dims:
            raise Mixes("joins tokens that are in other dims")
        entries += part.entries
    return replace(first, entries=entries)


def _without_tokens(call: Call, x: Tensor) -> bool:
    """True if all ranks have a tensor, or parts of it, which a sum over ranks makes whole where entries are read."""
    state = call.state(x)
    return state is REPLICATED or isinstance(state, Partial)


@_move
def rolled(call: Call) -> Moved:
    x, shifts, dims = _whole(call, call.first), call.arg("shifts"), call.arg("dims")
    if len(shifts) != 1 or len(dims) != 1 or not isinstance(shifts[0], int):
        raise Mixes("rolls several dims, or by a number that is not known")
    if dims[0] % call.first.ndim != x.rows.token_dim:
        raise Mixes("rolls another dim than that of the tokens")
    length = x.entries.length
    moved_last = TokenCount(shifts[0]) if shifts[0] >= 0 else length + TokenCount(shifts[0])
    kept = length - moved_last
    return _of_entries(x, RowMap.entries(kept, moved_last) + RowMap.entries(ZERO, kept))


@_move
def flipped(call: Call) -> Moved:
    x = _whole(call, call.first)
    if [dim % call.first.ndim for dim in call.arg("dims")] != [x.rows.token_dim]:
        raise Mixes("turns other dims than that of the tokens round")
    return _of_entries(x, RowMap((Piece(x.entries.length).turned(),)))


@_move
def filled(call: Call) -> Moved:
    """x[:, :1] * 0, zeros_like(x[:, :1]): one number."""
    x = _whole(call, call.first)
    number: Any = {"zeros_like": 0, "ones_like": 1, "mul": 0}.get(call.name, call.arg("fill_value"))
    factor = call.arg("other") if call.name == "mul" else 0
    if isinstance(factor, Tensor) or factor != 0 or not isinstance(number, int | float):
        raise Mixes(f"{call.name} of tokens in other places")
    return replace(x, entries=RowMap.same(x.entries.length, number))


@_move
def unchanged(call: Call) -> Moved:
    state = call.state(call.first)
    if not isinstance(state, Moved) or (call.name == "_to_copy" and not _casts_for_conv(call)):
        raise Mixes(f"{call.name} of tokens in other places")
    return state


@_move
def detached(call: Call) -> Moved:
    """`detach` of entries that have no gradient anyway."""
    state = call.state(call.first)
    numbers = isinstance(state, Moved) and all(isinstance(piece.of, int | float) for piece in state.entries.pieces)
    if call.facts.has_gradient(call.first) and not numbers:
        raise Mixes("cuts tokens in other places off from their gradient")
    return unchanged(call)


def _casts_for_conv(call: Call) -> bool:
    """Autocast gives a convolution other dtypes; it does so again when the convolution runs on other rows."""
    return call.name == "_to_copy" and call.facts.node is not None and call.facts.node.target is torch.conv1d


@_move
def convolution(call: Call) -> Moved:
    """conv1d with a stride of 1, over tokens in its last dim; whatever its padding: that is told by its length."""
    x, node = _whole(call, call.first), call.facts.node
    weight, padding, dilation = call.arg("weight"), call.arg("padding"), call.arg("dilation")
    fits = call.first.ndim == weight.ndim == 3 and x.rows.token_dim == 2 and x.rows.dims[1] is None
    one = x.rows.dims[0] == (B,) or call.sizes(call.first)[0] == 1
    if not fits or not one or x.taps is not None or call.arg("transposed") or list(call.arg("stride")) != [1]:
        raise Mixes("a convolution of another kind")
    numbers = (*padding, *dilation, weight.shape[2])
    if node is None or node.target is not torch.conv1d or not all(isinstance(n, int) for n in numbers):
        raise Mixes("a convolution that is not called by itself")
    if any(call.state(t) is not REPLICATED for t in call.tensors[1:]):
        raise Mixes("a convolution with a kernel made from tokens")
    zeros = RowMap.same(TokenCount(padding[0]), 0)
    taps = Taps(node, zeros + x.entries + zeros, dilation[0] * (weight.shape[2] - 1) + 1)
    return replace(x, entries=RowMap.entries(ZERO, taps.entries.length - TokenCount(taps.span - 1)), taps=taps)
