"""Locality rules of arithmetic: pointwise ops, reductions, ops along one dim, products, norms."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.refusal import Reason

from .call import Call
from .experts import follow_order, sort_rows
from .state import (
    MEAN_HINT,
    REPLICATED,
    B,
    Deferred,
    Dim,
    GroupSizes,
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
)
from .views import refuse_axis

Number = float | int | bool


def pointwise(call: Call) -> TensorState:
    """Each entry from the entries at its place, by broadcasting."""
    call.check_literals(*(value for value in call.args if not isinstance(value, Tensor)))
    states = [call.state(x) for x in call.tensors]
    followed = follow_order(call, states)
    if followed is not None:
        return followed
    if any(isinstance(state, Partial) for state in states):
        return partial_pointwise(call, states)
    if not any(isinstance(state, Rows) for state in states):
        return REPLICATED
    ndim = max(x.ndim for x in call.tensors)
    return Rows(checked(broadcast([call.entries(x) for x in call.tensors], ndim)), pad=padding(call))


def broadcast(entries: Sequence[Sequence[tuple[Dim, Size]]], ndim: int) -> list[Dim]:
    """Dims of tensors aligned at their last dims."""
    return [merge([entry[i - ndim] for entry in entries if len(entry) >= ndim - i]) for i in range(ndim)]


def partial_pointwise(call: Call, states: Sequence[TensorState]) -> TensorState:
    """Linear ops keep a sum over ranks a sum over ranks; a reduced one may go through any function."""
    parts = [state for state in states if isinstance(state, Partial)]
    if any(isinstance(state, Rows) for state in states):
        raise Mixes(f"{call.name} puts a sum over the shard's tokens back on tokens; {MEAN_HINT}")
    if all(part.reduced for part in parts):
        whole = [x for state, x in zip(states, call.tensors, strict=True) if state is REPLICATED]
        if any(call.trace.has_gradient(x) for x in whole):
            raise Mixes(
                f"{call.name} adds a term that every rank computes in full: its gradient would count once per rank"
            )
        return Partial(reduced=True)
    first = isinstance(call.state(call.tensors[0]), Partial)
    linear = (
        call.name in ("neg", "clone", "detach")
        or (call.name == "_to_copy" and (call.outs[0].is_floating_point() or not call.tensors[0].is_floating_point()))
        or (call.name == "mul" and len(parts) == 1)
        or (call.name == "div" and len(parts) == 1 and first and call.arg("rounding_mode") is None)
        or (call.name in ("add", "sub") and len(parts) == 2 and len(set(parts)) == 1)
        or (call.name in ("add", "sub") and first and len(states) == 1 and call.arg("other") == 0)
    )
    if not linear:
        raise Mixes(f"{call.name} on a sum over the shard's tokens is not the same on the whole; {MEAN_HINT}")
    return parts[0]


def padding(call: Call) -> Number | None:
    """The value that padding rows have in the result, when it follows from what the operands have there."""
    values = [_pad(call, x) for x in call.tensors]
    if call.name == "where" and len(values) == 3:
        return None if values[0] is None else values[1] if values[0] else values[2]
    if call.name == "masked_fill":
        value = call.arg("value")
        filled = _pad(call, value) if isinstance(value, Tensor) else value
        return None if values[1] is None else filled if values[1] else values[0]
    if call.name == "mul" and 0 in values:
        return 0
    if call.name == "div" and values[0] == 0 and not any(call.rows(x) for x in call.tensors[1:]):
        return 0
    if None in values:
        return None
    return _on_numbers(call, values)


def _pad(call: Call, x: Tensor) -> Number | None:
    rows = call.rows(x)
    return rows.pad if rows else call.trace.numbers.get(id(x))


def _on_numbers(call: Call, values: Sequence[Any]) -> Number | None:
    """The op itself on one padding entry; None for ops not worth following."""
    function = _ON_NUMBERS.get(call.name)
    given = iter(values)
    operands = [next(given) if isinstance(a, Tensor) else a for a in call.args]
    if function is None or call.kwargs.keys() - {"dtype", "device", "layout", "non_blocking", "memory_format"}:
        return None
    if not all(isinstance(operand, int | float) for operand in operands):
        return None
    result = function(*operands)
    return _as_dtype(result, call.outs[0].dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Number | None:
    """The value as an entry of this dtype; None where that is another one."""
    if dtype == torch.bool:
        return bool(value)
    exact = value == int(value) and abs(value) <= 256  # in every floating-point dtype
    if not dtype.is_floating_point:
        exact = value == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    return value if exact else None


_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "ne": operator.ne,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_not": lambda x: not x if isinstance(x, bool) else ~x,
    "logical_and": lambda x, y: bool(x and y),
    "logical_or": lambda x, y: bool(x or y),
    "logical_not": operator.not_,
    "_to_copy": lambda x: x,
    "clone": lambda x: x,
}
"""Ops by which masks are made from labels, on the value that padding rows have."""


def reduce(call: Call) -> TensorState | Sequence[TensorState]:
    """Over features: per token. A plain sum over all tokens: a per-rank part. Anything else over tokens is refused."""
    x = call.tensors[0]
    state = call.state(x)
    dims = _dims(call, x)
    if isinstance(state, Partial):
        if call.name != "sum":
            raise Mixes(f"{call.name} on a sum over the shard's tokens is not the same on the whole; {MEAN_HINT}")
        return state
    assert isinstance(state, Rows)
    if state.token_dim in dims:
        detail = f"{call.name} reduces over tokens; {MEAN_HINT}"
        if call.name in ("all", "any"):
            return Deferred(detail)
        if call.name not in ("sum", "nansum", "count_nonzero"):
            raise Mixes(detail)
        return sum_over_tokens(call, state.pad == 0)
    keep = bool(call.arg("keepdim"))
    for dim in dims:
        refuse_axis(call, state, dim, "reduces over")
    rest = tuple(None if i in dims else dim for i, dim in enumerate(state.dims) if keep or i not in dims)
    unchanged = state.pad if call.name in ("amax", "amin", "max", "min", "mean", "any", "all") else None
    pad = 0 if call.name == "sum" and state.pad == 0 else unchanged
    return [Rows(checked(rest), pad=pad if len(call.outs) == 1 else None)] * len(call.outs)


def sum_over_tokens(call: Call, zero_padding: bool) -> TensorState:
    call.trace.events.unmasked |= not zero_padding
    return Partial()


def _dims(call: Call, x: Tensor) -> list[int]:
    given = call.arg("dim", "dims", "axis")
    if x.ndim == 0:
        return []
    dims = [given] if isinstance(given, int) else list(given or ())
    return [dim % x.ndim for dim in dims] if dims else list(range(x.ndim))


def along_dim(call: Call) -> TensorState | Sequence[TensorState]:
    """Ops that mix entries of one dim (or some) and keep the shape: softmax, cumsum, sort, topk, flip, roll."""
    x = call.tensors[0]
    state = call.state(x)
    if isinstance(state, GroupSizes) and call.name == "cumsum":
        return GroupSizes(state.order, ends=True)
    assert isinstance(state, Rows)
    if call.name == "sort" and x.ndim == 1:
        return sort_rows(call, x, state)
    for dim in _dims(call, x):
        refuse_axis(call, state, dim, f"runs {call.name} over" if call.name != "roll" else "rolls")
    return [Rows(state.dims)] * len(call.outs)


def triangle(call: Call) -> TensorState:
    x = call.tensors[0]
    state = call.rows(x)
    if state is None or any(dim is not None for dim in state.dims[-2:]):
        raise Mixes(f"{call.name} compares positions in the token dim")
    return plain(state)


def product(call: Call) -> TensorState:
    """mm, bmm, mv, dot and their forms that add a bias: over features per token, over tokens a per-rank part."""
    *bias, a, b = call.tensors if not call.name.startswith(("add", "badd")) else call.tensors[:3]
    left, right = call.entries(a), call.entries(b)
    contracted = (left[-1][0], right[0 if len(right) == 1 else -2][0])
    if any(has(dim, T) for dim in contracted):
        return _product_over_tokens(call, a, b, contracted)
    if any(has(dim, B) for dim in contracted):
        raise Mixes(f"{call.name} sums over the batch dim while rows of the batch are cut in different orders")
    batch = broadcast([left[:-2], right[:-2]], max(len(left), len(right)) - 2) if max(len(left), len(right)) > 2 else []
    outer = [left[-2]] if len(left) > 1 else []
    inner = [right[-1]] if len(right) > 1 else []
    entries = list(zip(batch, call.sizes(call.outs[0]), strict=False)) + outer + inner
    dims = broadcast([entries, *(call.entries(x) for x in bias)], len(entries))
    return Rows(checked(dims))


def _product_over_tokens(call: Call, a: Tensor, b: Tensor, contracted: tuple[Dim, Dim]) -> TensorState:
    others = [dim for x in (a, b) for dim, _ in call.entries(x) if dim not in contracted]
    if contracted[0] != contracted[1] or any(has(dim, T) for dim in others) or len(call.tensors) > 2:
        raise Mixes(f"{call.name} sums over the token dim")
    if a.ndim == b.ndim == 2 and has(call.entries(a)[0][0], B) and has(call.entries(b)[1][0], B):
        raise Mixes("pairs rows of the batch with rows of the batch")
    pads = [rows.pad for rows in map(call.rows, (a, b)) if rows]
    return sum_over_tokens(call, 0 in pads)


def linear(call: Call) -> TensorState:
    x, weight = call.tensors[:2]
    if any(call.state(w) is not REPLICATED for w in call.tensors[1:]):
        raise Mixes("linear with a weight made from tokens", Reason.NO_LOCALITY_RULE)
    state = call.state(x)
    assert isinstance(state, Rows), weight
    refuse_axis(call, state, x.ndim - 1, "sums over")
    return Rows(state.dims)


def trailing_norm(call: Call) -> TensorState | Sequence[TensorState]:
    """layer_norm, rms_norm: over the last dims."""
    x = call.tensors[0]
    state = call.state(x)
    if not isinstance(state, Rows) or any(call.state(w) is not REPLICATED for w in call.tensors[1:]):
        raise Mixes(f"{call.name} of something else than token rows", Reason.NO_LOCALITY_RULE)
    for dim in range(x.ndim - len(call.arg("normalized_shape")), x.ndim):
        refuse_axis(call, state, dim, "normalises over")
    return [Rows(state.dims)] * len(call.outs)


def leading_norm(call: Call) -> TensorState | Sequence[TensorState]:
    """group_norm, instance_norm: over all dims but the first."""
    x = call.tensors[0]
    state = call.state(x)
    if not isinstance(state, Rows) or state.token_dim != 0:
        raise Mixes(f"{call.name} normalises over tokens")
    return [Rows(state.dims if i == 0 else (state.dims[0], None)) for i in range(len(call.outs))]


def batch_norm(call: Call) -> TensorState | Sequence[TensorState]:
    x = call.tensors[0]
    state = call.state(x)
    if (
        not isinstance(state, Rows)
        or call.arg("training", "train")
        or ("no_training" not in call.name and call.arg("training") is None)
    ):
        raise Mixes(f"{call.name} takes statistics over tokens of the shard")
    refuse_axis(call, state, 1, "has channels in")
    return [Rows(state.dims) if i == 0 else REPLICATED for i in range(len(call.outs))]


def convolution(call: Call) -> TensorState:
    x, weight = call.tensors[:2]
    state = call.state(x)
    if not isinstance(state, Rows) or any(call.state(w) is not REPLICATED for w in call.tensors[1:]):
        raise Mixes("convolution with a kernel made from tokens", Reason.NO_LOCALITY_RULE)
    refuse_axis(call, state, 1, "sums over")
    for dim in range(2, x.ndim):
        alone = weight.shape[dim] == 1 and call.arg("stride")[(dim - 2) % len(call.arg("stride"))] == 1
        if not alone or any(call.arg("padding")) or call.arg("transposed"):
            refuse_axis(call, state, dim, "slides over")
    return Rows(state.dims)


def pool(call: Call) -> TensorState | Sequence[TensorState]:
    x = call.tensors[0]
    state = call.state(x)
    spatial = next(int(c) for c in call.name if c.isdigit())
    if not isinstance(state, Rows):
        raise Mixes(f"{call.name} of something else than token rows", Reason.NO_LOCALITY_RULE)
    for dim in range(x.ndim - spatial, x.ndim):
        refuse_axis(call, state, dim, "pools over")
    return [Rows(state.dims)] * len(call.outs)


def refuse(why: str) -> Any:
    """A rule that refuses whatever it gets."""

    def rule(call: Call) -> TensorState:
        raise Mixes(f"{call.name} {why}")

    return rule
