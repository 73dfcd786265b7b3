"""Views, copies, concatenation, and tensors made from sizes: where the axes of their results are.

The drawings show `Rows.dims`, with · for an ordinary dim, as `(B,) (T,) ·` of hidden states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sympy import Function
from torch import Tensor

from cp_rewrite.passes.locality.call import TABLE_HINT, Call
from cp_rewrite.passes.locality.claims import (
    REPLICATED,
    B,
    Dim,
    Dims,
    Mixes,
    Order,
    Partial,
    Rows,
    T,
    TensorState,
    checked,
    has,
    merge,
    plain,
    regroup,
    with_fewer,
)
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import expression, has_one

REMAINDERS = frozenset({"Mod", "PythonMod", "ModularIndexing"})
"""Names of torch's remainders: what is missing to whole chunks is one."""


def regrouped(call: Call, x: Rows) -> Rows:
    """view: (B,) (T,) · -> (B, T) · and back, see `regroup`."""
    sizes = call.sizes(call.first), call.sizes(call.outs[0])
    return replace(x, dims=checked(regroup(x.dims, *sizes, call.extents)), table=None)


def permuted(call: Call, x: Rows) -> Rows:
    ndim = len(x.dims)
    order = list(range(ndim))
    if call.name == "permute":
        order = [dim % ndim for dim in call.arg("dims")]
    elif ndim > 1:
        a, b = (0, 1) if call.name == "t" else (call.arg("dim0"), call.arg("dim1"))
        order[a], order[b] = order[b], order[a]
    return replace(x, dims=tuple(x.dims[dim] for dim in order))


def unsqueezed(call: Call, x: Rows) -> Rows:
    dim = call.arg("dim") % (len(x.dims) + 1)
    return replace(x, dims=(*x.dims[:dim], None, *x.dims[dim:]))


def squeezed(call: Call, x: Rows) -> Rows:
    given = call.arg("dim")
    ndim = len(x.dims)
    dims = range(ndim) if given is None else [d % ndim for d in ([given] if isinstance(given, int) else given)]
    if call.first.ndim == ndim:
        if any(has_one(call.first.shape[dim]) for dim in dims):
            raise Mixes("squeezes a dim that has one token in this row, and more in others", Reason.TOKEN_COUNT)
        gone = {dim for dim in dims if call.first.shape[dim] == 1}
    elif len(dims) == ndim - call.first.ndim:  # in place: its shape is that of the result
        gone = {*dims}
    else:
        raise Mixes("squeeze_ takes away dims that are not followed: name them")
    return replace(x, dims=tuple(dim for i, dim in enumerate(x.dims) if i not in gone))


def without_dim(call: Call, x: Rows) -> Rows:
    """select, unbind: one entry of a dim."""
    dim = call.arg("dim") % len(x.dims)
    return Rows(x.dims[:dim] + x.dims[dim + 1 :], fill=x.fill)


def as_complex(call: Call, x: Rows) -> Rows:
    """view_as_complex: two entries of the last dim become one number. view_as_real: the other way."""
    return Rows(checked((*x.dims, None) if call.name == "view_as_real" else x.dims[:-1]))


def repeated(call: Call, x: Rows) -> Rows:
    """repeat: all tokens n times over, one copy behind the other.

    (T,) ·  -> repeat(n, 1) ->  (n, T) ·
    """
    repeats: list[Any] = call.arg("repeats")
    new = len(repeats) - len(x.dims)
    dims = list(x.dims)
    for i, dim in enumerate(x.dims):
        times = repeats[new + i]
        if dim is None or times == 1:
            continue
        if not isinstance(times, int) or times < 1 or not has(dim, T) or any(isinstance(f, Order) for f in dim):
            call.refuse_axis(x, i, "repeats")
        dims[i] = (times, *dim)
    return Rows((*[None] * new, *dims))


def expand(call: Call) -> TensorState:
    """Repeats entries: over the token dim only where there was none, as rows that are all equal.

    · ·  of sizes 1, 8      -> expand(b, t, 8) ->    (B,) (T,) ·
    (T,) ·                  -> expand(b, t, 8) ->    (B,) (T,) ·
    """
    x, state, sizes = call.first, call.state(call.first), call.sizes(call.outs[0])
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
        before_tokens = i < state.token_dim + new and not any(d and d != dims[i] for d in dims[:i])
        if sizes[i] == call.extents.batch and before_tokens:
            dims[i] = None if any(has(dim, B) for dim in dims) else (B,)
    return replace(state, dims=tuple(dims))


def slice_(call: Call) -> TensorState:
    """A slice of features, or the first T rows of a table."""
    x, state = call.first, call.state(call.first)
    dim = call.arg("dim") % x.ndim
    before, after = call.sizes(x)[dim], call.sizes(call.outs[0])[dim]
    if before == after:
        return state
    if not isinstance(state, Rows):
        if call.extents.label([1] * dim + [after]) is not None:
            return _table_rows(call, x, dim)
    else:
        step = call.arg("step") or 1
        call.refuse_axis(state, dim, "takes a slice of" if step == 1 else f"takes one entry in {step} of")
    call.check_numbers()
    return state


def _table_rows(call: Call, table: Tensor, dim: int) -> Rows:
    """The first T rows of a table are the rows of positions 0, 1, 2, …"""
    facts = call.facts
    start, step = call.arg("start"), call.arg("step")
    if start not in (None, 0) or step not in (None, 1) or id(table) not in facts.operands or facts.in_function:
        raise Mixes(TABLE_HINT, Reason.POSITION_GENERATOR)
    call.events.table = dim
    facts.operands[id(call.outs[0])] = call.outs[0]
    return Rows(tuple((T,) if i == dim else None for i in range(table.ndim)), table=facts.node)


def cat(call: Call) -> TensorState:
    """cat and stack: all tensors have their tokens in one dim, and are joined along another. One that is joined to
    empty ones alone, as in a cache that holds nothing, stays what it is."""
    given: list[Tensor] = call.arg("tensors")
    tensors = [x for x in given if x.shape != (0,)] or given
    states = {call.state(x) for x in tensors}
    if any(isinstance(state, Partial) for state in states):
        if len(states) != 1:
            raise Mixes("joins per-rank parts of a sum with something else")
        return states.pop()
    stacking = call.name == "stack"
    if len(tensors) == 1 and not stacking and isinstance(state := call.state(tensors[0]), Rows):
        return Rows(state.dims, fill=state.fill)
    ndim = tensors[0].ndim
    dim = (call.arg("dim") or 0) % (ndim + stacking)
    entries = [call.entries(x) for x in tensors]
    if not stacking:
        for entry in entries:
            if entry[dim][0] is not None:
                call.refuse_axis(Rows(tuple(d for d, _ in entry)), dim, "joins other entries to")
    dims = [None if i == dim and not stacking else merge([entry[i] for entry in entries]) for i in range(ndim)]
    if stacking:
        dims.insert(dim, None)
    fills = {state.fill if isinstance(state, Rows) else None for state in states}
    return Rows(checked(dims), fill=fills.pop() if len(fills) == 1 else None)


def pad(call: Call) -> TensorState:
    state, amounts = call.state(call.first), call.arg("pad", "padding")
    call.check_numbers(call.arg("value"))
    if not isinstance(state, Rows):
        if isinstance(state, Partial) and call.arg("value"):
            raise Mixes("pads a sum over the shard's tokens, on every rank, by something else than 0")
        return state
    for i in range(len(amounts) // 2):  # from the last dim on: (before, after)
        pair = [call.extents.size(amount) for amount in amounts[2 * i : 2 * i + 2]]
        if pair != [0, 0]:
            whole = any(part.func.__name__ in REMAINDERS for x in pair for part in expression(x).atoms(Function))
            made = "pads" if all(isinstance(x, int) for x in pair) else "pads, by a number made from the token count,"
            verb = "fills whole chunks along" if whole else made
            call.refuse_axis(state, call.first.ndim - 1 - i, verb)
    return plain(state)


def as_strided(call: Call) -> TensorState:
    if _geometry(call.outs[0]) == _geometry(call.first):
        return call.state(call.first)
    raise Mixes("as_strided on token rows can't be followed", Reason.NO_LOCALITY_RULE)


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


def filled(call: Call) -> TensorState:
    """A tensor of one number, which may not be the token count, or what looks like it in a graph of fixed shapes."""
    call.check_numbers(call.arg("fill_value", "value", "s"))
    return of_one_number(call)


def of_one_number(call: Call) -> TensorState:
    """A tensor of one number: its sizes tell, of which `new_zeros` and the like take nothing of their input; or those
    of the first argument, of `zeros_like` and the like, and in place, where other tensors are read."""
    value, out, name = call.arg("fill_value", "value", "s"), call.outs[0], call.name.removeprefix("new_")
    number: Any = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "zero": 0}.get(name, value)
    number = number if isinstance(number, int | float) else None
    if name.endswith("_like") or name in ("fill", "zero"):
        state = call.state(call.first)
        if isinstance(state, Partial) or (isinstance(value, Tensor) and call.state(value) is not REPLICATED):
            raise Mixes(f"{call.name} on a per-rank part of a sum")
        return Rows(state.dims, fill=number) if isinstance(state, Rows) else state
    sizes, counts = call.sizes(out), [call.extents.token_count(size) for size in call.sizes(out)]
    known = not call.facts.in_function
    fewer = [-count.plus if known and count and count.times == 1 and count.plus < 0 else 0 for count in counts]
    dims = call.extents.label([size + by for size, by in zip(sizes, fewer, strict=True)], several=True)
    call.facts.numbers[id(out)] = number
    return REPLICATED if dims is None else Rows(with_fewer(dims, max(fewer)), fill=number)


def arange(call: Call) -> TensorState:
    """`arange` over all tokens stands for positions; its node is noted, to be made global if its values are used."""
    sizes = call.sizes(call.outs[0])
    several = call.extents.several_per_token(sizes[0])  # such indices are never positions
    dims = (several,) if several else call.extents.label(sizes)
    if dims is None:
        call.check_numbers()
        return REPLICATED
    return Rows(dims, iota=_note_positions(call, dims))


def _note_positions(call: Call, dims: Dims) -> Any:
    """The node whose `arange` over tokens runs; with the reason, where it can't be replaced by the plan's positions."""
    facts, why = call.facts, None
    assert facts.node is not None
    if call.arg("start") not in (None, 0) or call.arg("step") not in (None, 1):
        why = "arange over tokens does not count 0, 1, 2, …: write arange(T) and add or multiply after it"
        facts.shifted.add(facts.node)
    elif dims != ((T,),):
        why = "arange runs over the flattened rows of the batch"
    elif facts.node.target is not torch.arange:
        why = f"{facts.node.name} makes positions inside: pass position_ids to the model"
    elif facts.in_function:
        why = "positions are made inside a torch.autograd.Function: make them outside and pass them in"
    if why is not None:
        facts.fixed_positions[facts.node] = why
    return facts.node
