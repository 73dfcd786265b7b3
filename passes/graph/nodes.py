"""What passes ask of a node: its op, its value, its arguments, numbers that the graph fixes, what it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.torch_internals import OpOverloadPacket, expression, fixed_number, hint, is_transform, is_wrapped

from .regions import attribute_of

_INPLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div"}
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Other names that torch's own functions take for an argument, as numpy has them."""
_REQUIRED = object()
"""The default of an argument that has none."""


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The fake shape of a node's tensor."""
    value: Any = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def value_of(node: fx.Node) -> Any:
    """A node's fake value; a constant's real one."""
    if "example_value" in node.meta:
        return node.meta["example_value"]
    return attribute_of(node)


def needs_gradient(node: fx.Node) -> bool:
    """Whether gradients reach a node's tensor."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.requires_grad


def is_transformed(node: fx.Node) -> bool:
    """Whether a node takes gradients, or stands in, enters or leaves a `torch.func` transform (vmap, jvp)."""
    if is_transform(node.target):
        return True
    values = [value_of(n) for n in (node, *node.all_input_nodes)]
    return any(is_wrapped(value) for value in tree_leaves(values) if isinstance(value, Tensor))


def guard_number(value: Any) -> Any:
    """A symbolic number as the plain one it is in the example; a guard has another number compiled anew."""
    return float(value) if isinstance(value, torch.SymFloat) else int(value)


def guard_equal(size: Any, other: Any) -> bool:
    """Whether two sizes are equal in the example; a guard has others compiled anew."""
    return bool(size == other)


def same_size(size: Any, other: Any) -> bool:
    """Equal sizes; where two symbols happen to be equal, a guard makes sure that they stay so."""
    if expression(size) == expression(other):
        return True
    hints = [hint(size), hint(other)]
    return None not in hints and hints[0] == hints[1] and guard_equal(size, other)


def constant(value: Any) -> float | None:
    """A number that the graph fixes; None for anything else, sizes of the batch among it."""
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value")
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return fixed_number(value)
    return float(value) if isinstance(value, int | float) else None


def bind(node: fx.Node, names: Iterable[str] | None = None, **defaults: Any) -> dict[str, Any]:
    """A node's arguments by name.

    Args:
        names: of the positional ones, in order. None: those that its op's schema or its function's signature has, with
            their defaults; no positional ones, where it has neither.
        defaults: of those that may be left out.
    """
    known = _signature(node.target) if names is None else dict.fromkeys(names, _REQUIRED)
    missing = {name: value for name, value in known.items() if value is not _REQUIRED}
    given = {name if name in known else _NUMPY.get(name, name): value for name, value in node.kwargs.items()}
    return {**missing, **defaults, **dict(zip(known, node.args, strict=False)), **given}


def bind_op(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an op by name: those that are left out are as their default, or None."""
    values: dict[str, Any] = {}
    for i, (name, default) in enumerate(_signature(op).items()):
        missing = None if default is _REQUIRED else default
        values[name] = args[i] if i < len(args) else kwargs.get(name, missing)
    return values


def schema_of(target: Any) -> Any:
    """The schema of an op, or of a packet's default overload; None: the target of a node is no op."""
    return getattr(target, "_schema", None) or getattr(getattr(target, "default", None), "_schema", None)


@lru_cache(maxsize=4096)
def _signature(target: Callable[..., Any]) -> dict[str, Any]:
    """Argument -> its default, in order; {} of what tells none, as torch's functions in C++."""
    schema = schema_of(target)
    if schema is not None:
        return {a.name: a.default_value if a.has_default_value() else _REQUIRED for a in schema.arguments}
    try:
        parameters = inspect.signature(target).parameters.values() if callable(target) else ()
    except (TypeError, ValueError):
        return {}
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: _REQUIRED if p.default is p.empty else p.default for p in named}


def op_name(node: Any) -> str:
    """A node's function or method by one name for its spellings: `add` for `+`, `+=`, `torch.add`, `x.add_`."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).strip("_")
    return _INPLACE.get(name, name)


def times_constant(node: Any) -> tuple[float | None, fx.Node | None]:
    """(c, x) when a node is c * x or x / (1 / c)."""
    name = op_name(node)
    if name not in ("mul", "div", "multiply", "divide") or len(node.args) != 2 or node.kwargs:
        return None, None
    left, right = node.args
    product = name in ("mul", "multiply")
    if product and constant(left) is not None:
        left, right = right, left
    c = constant(right) or filled(right)
    if not c or not isinstance(left, fx.Node):
        return None, None
    return (c if product else 1 / c), left


def filled(node: Any) -> float | None:
    """The number that a 0-d tensor is made of, as its dtype holds it: `torch.full([], 8 ** 0.5)`."""
    if op_name(node) not in ("full", "tensor", "scalar_tensor") or shape_of(node) != ():
        return None
    c = constant(node.args[-1]) if len(node.args) else None
    return None if c is None else float(torch.tensor(c, dtype=value_of(node).dtype))


_OF_SHAPE = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty size dim".split()
)
_AS_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


def read_by(node: fx.Node) -> list[fx.Node]:
    """The operands that a node reads numbers of, not their shape or dtype alone."""
    name = op_name(node)
    if name in _OF_SHAPE or (name == "getattr" and node.args[1] in ("shape", "dtype", "device")):
        return []
    return [*node.args[:1]] if name in _AS_ANOTHER else node.all_input_nodes  # type: ignore[list-item]


_DRAWING = frozenset(
    {f"dropout{dims}d" for dims in (1, 2, 3)}
    | {f"fractional_max_pool{dims}d{also}" for dims in (2, 3) for also in ("", "_with_indices")}
    | {"gumbel_softmax", "multi_head_attention_forward"}
)
"""Functions of torch that draw random numbers and are no op themselves."""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node takes numbers from torch's generator, by its name: inside of transforms no op is seen."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    if name in _DRAWING:
        return True
    packet: Any = getattr(torch.ops.aten, name, None)  # `__get__` is no op
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)


def collective_group(node: fx.Node) -> str | None:
    """The name of the group that a collective runs over; None for any other node."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if not str(getattr(packet, "_qualified_op_name", "")).startswith(("_c10d_functional", "c10d_functional")):
        return None
    return next((arg for arg in reversed(node.args) if isinstance(arg, str)), None)
