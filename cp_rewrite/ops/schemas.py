"""An op's arguments and gradients by the names in its schema.

bind, call, gradients       an op's inputs by name
keep, kept                  what its backward reads
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor


@cache
def argument_names(op: Any) -> tuple[str, ...]:
    """An op's arguments in order: `torch.ops.cp_rewrite.NAME.default`."""
    return tuple(argument.name for argument in op._schema.arguments)


def bind(op: Any, inputs: Sequence[Any]) -> SimpleNamespace:
    """All inputs of an op, by name."""
    missing = [argument.default_value for argument in op._schema.arguments[len(inputs) :]]
    return SimpleNamespace(**dict(zip(argument_names(op), (*inputs, *missing), strict=True)))


def call(op: Any, known: SimpleNamespace, **others: Any) -> Any:
    """Run an op on the values that it has an argument for: of `known` any, of `others` all."""
    assert others.keys() <= set(argument_names(op)), f"{op} has no {others.keys() - set(argument_names(op))}"
    values = vars(known) | others
    return op(*(values[name] for name in argument_names(op)))


def gradients(op: Any, inputs: SimpleNamespace, **named: Tensor | None) -> tuple[Any, ...]:
    """Gradients of an op's inputs in their order, None for all that are not named."""
    assert named.keys() <= set(argument_names(op)), f"{op} has no {named.keys() - set(argument_names(op))}"
    found = [named.get(name, _no_gradient(getattr(inputs, name))) for name in argument_names(op)]
    for argument in reversed(op._schema.arguments):  # the dispatcher leaves out what is as its default at the end
        if not argument.has_default_value() or getattr(inputs, argument.name) != argument.default_value:
            break
        found.pop()
    return tuple(found)


def _no_gradient(value: Any) -> Any:
    """None; of a list one for each, in the same kind of list: an eager graph passes fx's own kind."""
    return type(value)([None] * len(value)) if isinstance(value, list) else None


class _Saved(NamedTuple):
    """Places of tensors among all that autograd saves. kind: of the list that they are in; None: one by itself."""

    place: slice
    kind: Any


def keep(ctx: Any, **values: Any) -> None:
    """Keep values for the backward; tensors and lists of tensors in the way that autograd asks for."""
    tensors: list[Tensor] = []
    ctx.kept = {}
    for name, value in values.items():
        if isinstance(value, Tensor | list):
            new: list[Tensor] = [value] if isinstance(value, Tensor) else list(value)
            kind = None if isinstance(value, Tensor) else type(value)
            value = _Saved(slice(len(tensors), len(tensors) + len(new)), kind)
            tensors += new
        ctx.kept[name] = value
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> SimpleNamespace:
    """Values that `keep` kept, by name."""
    tensors = ctx.saved_tensors
    values: dict[str, Any] = dict(ctx.kept)
    for name, value in values.items():
        if isinstance(value, _Saved):
            found = tensors[value.place]
            values[name] = found[0] if value.kind is None else value.kind(found)
    return SimpleNamespace(**values)
