"""Locality rules of views, copies, concatenation, and tensors made from sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cp_rewrite.refusal import Reason

from .call import Call
from .state import (
    REPLICATED,
    SHIFT_HINT,
    B,
    Dim,
    Dims,
    Mixes,
    Partial,
    Rows,
    Size,
    T,
    TensorState,
    checked,
    has,
    merge,
    plain,
    regroup,
)


def same(call: Call) -> TensorState:
    """The result has the first argument's dims and values (clone, detach, a dtype that holds them)."""
    return call.state(call.tensors[0])


def view(call: Call) -> TensorState:
    (x, state) = _input(call)
    if not isinstance(state, Rows):
        return state
    return replace(state, dims=checked(regroup(state.dims, call.sizes(x), call.sizes(call.outs[0]), call.extents)))


def permute(call: Call) -> TensorState:
    (x, state) = _input(call)
    if not isinstance(state, Rows):
        return state
    order = list(range(x.ndim))
    if call.name == "permute":
        order = [dim % x.ndim for dim in call.arg("dims")]
    elif x.ndim > 1:
        a, b = (0, 1) if call.name == "t" else (call.arg("dim0"), call.arg("dim1"))
        order[a], order[b] = order[b], order[a]
    return replace(state, dims=tuple(state.dims[dim] for dim in order))


def unsqueeze(call: Call) -> TensorState:
    (x, state) = _input(call)
    if not isinstance(state, Rows):
        return state
    dim = call.arg("dim") % (x.ndim + 1)
    return replace(state, dims=(*state.dims[:dim], None, *state.dims[dim:]))


def squeeze(call: Call) -> TensorState:
    (x, state) = _input(call)
    if not isinstance(state, Rows):
        return state
    given = call.arg("dim")
    dims = range(x.ndim) if given is None else [d % x.ndim for d in ([given] if isinstance(given, int) else given)]
    gone = {dim for dim in dims if x.shape[dim] == 1}
    return replace(state, dims=tuple(dim for i, dim in enumerate(state.dims) if i not in gone))


def expand(call: Call) -> TensorState:
    """Repeats entries: over the token dim only where there was none, as rows that are all equal."""
    (x, state) = _input(call)
    sizes = call.sizes(call.outs[0])
    if isinstance(state, Partial):
        return state
    new = len(sizes) - x.ndim
    grown = [i for i, size in enumerate(sizes) if i < new or call.sizes(x)[i - new] != size]
    labels = call.extents.label([size if i in grown else 1 for i, size in enumerate(sizes)])
    if not isinstance(state, Rows):
        return REPLICATED if labels is None else Rows(labels)
    dims = list[Dim]([None] * new) + list(state.dims)
    for i in grown:
        if labels and labels[i]:
            raise Mixes("expands rows of tokens over the token dim (a T x T tensor outside an attention mask)")
        if (
            sizes[i] == call.extents.batch
            and i < state.token_dim + new
            and not any(d and d != dims[i] for d in dims[:i])
        ):
            dims[i] = _batch_label(dims)
    return replace(state, dims=tuple(dims))


def _batch_label(dims: Sequence[Dim]) -> Dim:
    return None if any(has(dim, B) for dim in dims) else (B,)


def slice_(call: Call) -> TensorState:
    (x, state) = _input(call)
    dim = call.arg("dim") % x.ndim
    before, after = call.sizes(x)[dim], call.sizes(call.outs[0])[dim]
    if not isinstance(state, Rows):
        labels = None if before == after else call.extents.label([1] * dim + [after])
        if labels is not None:
            return call.trace.table_rows(call, x, dim)
        if before != after:
            call.check_numbers()
        return state
    if before != after:
        refuse_axis(call, state, dim, "takes a slice of")
        call.check_numbers()
    return state


def select(call: Call) -> TensorState:
    (x, state) = _input(call)
    if not isinstance(state, Rows):
        return state
    dim = call.arg("dim") % x.ndim
    refuse_axis(call, state, dim, "takes one entry of")
    return replace(plain(state), dims=state.dims[:dim] + state.dims[dim + 1 :])


def split(call: Call) -> TensorState | list[TensorState]:
    (x, state) = _input(call)
    if isinstance(state, Rows):
        dim = call.arg("dim") % x.ndim
        refuse_axis(call, state, dim, "splits")
        if call.name == "unbind":
            state = replace(plain(state), dims=state.dims[:dim] + state.dims[dim + 1 :])
    return [state] * len(call.outs)


def cat(call: Call) -> TensorState:
    tensors: list[Tensor] = [x for x in call.arg("tensors") if x.shape != (0,)]
    dim = call.arg("dim") or 0
    states = {call.state(x) for x in tensors}
    if any(isinstance(state, Partial) for state in states):
        return only_partials(states, "joins")
    stacking = call.name == "stack"
    ndim = tensors[0].ndim
    dim %= ndim + stacking
    entries = [call.entries(x) for x in tensors]
    if not stacking:
        for entry in entries:
            if entry[dim][0] is not None:
                refuse_axis(call, Rows(tuple(d for d, _ in entry)), dim, "joins other entries to")
    dims = [None if i == dim and not stacking else merge([entry[i] for entry in entries]) for i in range(ndim)]
    if stacking:
        dims.insert(dim, None)
    pads = {state.pad if isinstance(state, Rows) else None for state in states}
    return Rows(checked(dims), pad=pads.pop() if len(pads) == 1 else None)


def pad(call: Call) -> TensorState:
    (x, state) = _input(call)
    amounts: list[int] = call.arg("pad", "padding")
    call.check_numbers(call.arg("value"))
    if isinstance(state, Partial) and call.arg("value"):
        raise Mixes("pads a sum over the shard's tokens, on every rank, by something else than 0")
    for i in range(len(amounts) // 2):
        if isinstance(state, Rows) and any(amounts[2 * i : 2 * i + 2]):
            refuse_axis(call, state, x.ndim - 1 - i, "pads")
    return plain(state) if isinstance(state, Rows) else state


def repeat(call: Call) -> TensorState:
    (_, state) = _input(call)
    repeats: list[int] = call.arg("repeats")
    if not isinstance(state, Rows):
        return state
    new = len(repeats) - len(state.dims)
    for i, dim in enumerate(state.dims):
        if dim is not None and repeats[new + i] != 1:
            refuse_axis(call, state, i, "repeats")
    return replace(plain(state), dims=(*[None] * new, *state.dims))


def as_strided(call: Call) -> TensorState:
    (x, state) = _input(call)
    out = call.outs[0]
    if out.shape == x.shape and out.stride() == x.stride() and out.storage_offset() == x.storage_offset():
        return state
    raise Mixes("as_strided on token rows can't be followed", Reason.NO_LOCALITY_RULE)


def complex_view(call: Call) -> TensorState:
    (_, state) = _input(call)
    if not isinstance(state, Rows):
        return state
    dims = (*state.dims, None) if call.name == "view_as_real" else state.dims[:-1]
    return Rows(checked(dims))


def filled(call: Call) -> TensorState:
    """A tensor of one number: by its sizes. `new_zeros` and the like take nothing of their input."""
    value = call.arg("fill_value", "s")
    call.check_numbers(value)
    call.check_literals(value)
    number: Any = {"zeros": 0, "ones": 1}.get(call.name.removeprefix("new_"), value)
    out = call.outs[0]
    dims = call.extents.label(call.sizes(out))
    call.trace.numbers[id(out)] = number
    return REPLICATED if dims is None else Rows(dims, pad=number if isinstance(number, int | float) else None)


def filled_like(call: Call) -> TensorState:
    """A tensor of one number in the first argument's shape (or in place, where other tensors are read)."""
    state = call.state(call.tensors[0])
    value = call.arg("fill_value", "value")
    call.check_numbers(value)
    call.check_literals(value)
    if isinstance(state, Partial) or (isinstance(value, Tensor) and call.state(value) is not REPLICATED):
        raise Mixes(f"{call.name} on a per-rank part of a sum")
    number: Any = {"zeros_like": 0, "ones_like": 1, "zero": 0}.get(call.name, value)
    if isinstance(state, Rows):
        return Rows(state.dims, pad=number if isinstance(number, int | float) else None)
    return state


def arange(call: Call) -> TensorState:
    """`arange` over all tokens stands for positions; its node is noted, to be made global if its values are used."""
    sizes = call.sizes(call.outs[0])
    call.check_literals(call.arg("step"))
    dims = _several_per_token(call, sizes[0]) or call.extents.label(sizes)
    if dims is None:
        call.check_numbers()
        return REPLICATED
    return Rows(dims, iota=call.trace.positions(call, dims))


def _several_per_token(call: Call, size: Size) -> Dims | None:
    """Dims of `arange` over k entries of each token; such indices are never positions."""
    extents = call.extents
    tokens: Any = extents.tokens * extents.batch  # type: ignore[operator]
    if extents.static:
        several = size // tokens if size % tokens == 0 else None  # type: ignore[operator]
    else:
        several = size / tokens  # type: ignore[operator]
    if several is None or several in (0, 1) or not getattr(several, "is_Integer", isinstance(several, int)):
        return None
    axis = (T,) if extents.batch == 1 else (B, T)
    return ((*axis, int(several)),)


def only_partials(states: set[TensorState], what: str) -> TensorState:
    if len(states) != 1:
        raise Mixes(f"{what} per-rank parts of a sum with something else")
    return states.pop()


def _input(call: Call) -> tuple[Tensor, TensorState]:
    return call.tensors[0], call.state(call.tensors[0])


def refuse_axis(call: Call, state: Rows, dim: int, what: str) -> None:
    axis = state.dims[dim]
    if axis is None:
        return
    if not has(axis, T):
        raise Mixes(f"{call.name} {what} the batch dim while rows of the batch are cut in different orders")
    raise Mixes(f"{call.name} {what} the token dim (dim {dim}); if this shifts labels, {SHIFT_HINT}")
