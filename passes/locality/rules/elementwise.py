"""Pointwise ops: where the tokens of their results are, what becomes of sums, and what fill holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import MEAN_HINT, Call, check_gradients, mixes_parts
from cp_rewrite.passes.locality.claims import (
    REPLICATED,
    WHOLE,
    AtMost,
    Mixes,
    Number,
    Partial,
    Rows,
    TensorState,
    broadcast,
    checked,
)

from .sorted_rows import follow_order


def pointwise(call: Call) -> TensorState:
    """Each entry from the entries at its place, by broadcasting."""
    states = [call.state(x) for x in call.tensors]
    followed = follow_order(call, states)
    if followed is not None:
        return followed
    if any(isinstance(state, Partial) for state in states):
        return partial_pointwise(call, states)
    if not any(isinstance(state, Rows) for state in states):
        return REPLICATED
    return Rows(checked(broadcast([call.entries(x) for x in call.tensors])), fill=fill_value(call))


def cast(call: Call) -> TensorState:
    """The same rows in another dtype."""
    rows, new = call.rows(call.first), pointwise(call)
    return replace(new, table=rows.table) if rows and isinstance(new, Rows) else new


def partial_pointwise(call: Call, states: Sequence[TensorState]) -> TensorState:
    """A sum over ranks stays one under linear ops; one whose value is global already goes through any function.

    Partial + Partial, -Partial, Partial * w, Partial / w   ->  Partial
    Partial + 1, Partial * Partial, exp(Partial)            ->  refused
    exp(WHOLE), WHOLE + 1                                   ->  WHOLE
    """
    parts = [state for state in states if isinstance(state, Partial)]
    if any(isinstance(state, Rows) for state in states):
        raise Mixes(f"{call.name} puts a sum over the shard's tokens back on tokens; {MEAN_HINT}")
    if all(part == WHOLE for part in parts):
        check_gradients(call)
        return WHOLE
    if not _is_linear(call, parts):
        raise mixes_parts(call)
    return parts[0]


def _is_linear(call: Call, parts: Sequence[Partial]) -> bool:
    """True if the result's sum over ranks is the op on its operands' sums. parts: the operands with such sums."""
    first = isinstance(call.state(call.first), Partial)
    if call.name == "_to_copy":
        return call.outs[0].is_floating_point() or not call.first.is_floating_point()
    if call.name == "div":
        return len(parts) == 1 and first and call.arg("rounding_mode") is None
    if call.name in ("add", "sub"):
        zero = first and len(call.tensors) == 1 and call.arg("other") == 0
        return zero or (len(parts) == 2 and len(set(parts)) == 1)
    return call.name in ("neg", "clone", "detach") or (call.name == "mul" and len(parts) == 1)


def log_sigmoid(call: Call) -> Sequence[TensorState]:
    """The result, and what its backward reads: as large on a CPU, of no entries on a GPU."""
    state = pointwise(call)
    result, buffer = map(call.sizes, call.outs)
    return state, state if buffer == result else REPLICATED


def fill_value(call: Call) -> Number | None:
    """The value that fill has in the result, where it follows from what the operands have there.

    labels               2 5 -100         fill: -100
    labels != -100       1 1 0                  0
    loss * that          x y 0                  0, so a sum over it needs no mask
    """
    values = [fill_of(call, x) for x in call.tensors]
    if call.name == "where" and len(values) == 3:
        same = values[1] if values[1] == values[2] else None
        return same if values[0] is None else values[1] if values[0] else values[2]
    if call.name == "masked_fill":
        value = call.arg("value")
        filled = fill_of(call, value) if isinstance(value, Tensor) else value
        return None if values[1] is None else filled if values[1] else values[0]
    if call.name in ("mul", "bitwise_and", "logical_and") and 0 in values:
        return 0
    if call.name in _ZERO_OF_ZERO and values[0] == 0:
        return 0
    if call.name == "div" and values[0] == 0 and not any(call.rows(x) for x in call.tensors[1:]):
        return 0
    if None in values:
        return None
    return _on_numbers(call, values)


def fill_of(call: Call, x: Tensor) -> Number | None:
    """The number in all fill of an operand, where it is known."""
    rows = call.rows(x)
    return rows.fill if rows else call.facts.numbers.get(id(x))


def _on_numbers(call: Call, values: Sequence[Any]) -> Number | None:
    """The op itself on one entry of fill; None for ops that are not followed."""
    function = _ON_NUMBERS.get(call.name)
    given = iter(values)
    operands = [next(given) if isinstance(a, Tensor) else a for a in call.args]
    if function is None or call.kwargs.keys() - {"dtype", "device", "layout", "non_blocking", "memory_format"}:
        return None
    if operands and isinstance(operands[0], AtMost):
        return _on_at_most(call.name, operands[0], operands[1:], call.outs[0].dtype)
    if not all(isinstance(operand, int | float) for operand in operands):
        return None
    result = function(*operands)
    return _as_dtype(result, call.outs[0].dtype)


def _on_at_most(name: str, x: AtMost, others: Sequence[Any], dtype: torch.dtype) -> Number | None:
    """`ids >= 0` and the like, where all numbers up to a bound give the same answer."""
    if name in ("_to_copy", "clone"):
        return x if dtype.is_floating_point or dtype in (torch.int32, torch.int64) else None
    if name not in _OF_AT_MOST or not others or not isinstance(others[0], int | float):
        return None
    above, answer = _OF_AT_MOST[name]
    return answer if others[0] > x.bound or (not above and others[0] == x.bound) else None


_OF_AT_MOST: dict[str, tuple[bool, bool]] = {
    "ge": (True, False),
    "eq": (True, False),
    "ne": (True, True),
    "lt": (True, True),
    "gt": (False, False),
    "le": (False, True),
}
"""A number up to a bound, compared with n -> (must n be above the bound, or may it be the bound; the answer then)."""


def _as_dtype(value: Any, dtype: torch.dtype) -> Number | None:
    """The value as an entry of this dtype; None where the dtype may not hold it."""
    if dtype == torch.bool:
        return bool(value)
    exact = value == int(value) and abs(value) <= 256  # in every floating-point and complex dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        exact = value == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    return value if exact else None


_ZERO_OF_ZERO = frozenset(
    "xlogy relu tanh sin square sqrt sign round silu gelu threshold_backward silu_backward gelu_backward "
    "tanh_backward sigmoid_backward leaky_relu_backward".split()
)
"""Ops that give 0 where their first operand is 0."""
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "ne": operator.ne,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
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
"""Ops that make masks of labels, on numbers."""
