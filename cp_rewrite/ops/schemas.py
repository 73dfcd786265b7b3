"""Arguments and gradients of ops by the names in their schemas, and what all attention ops share.

Shapes: R local rows, Hq query and Hkv key heads, D and V head dims of qk and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from .merge import sinks_gradient


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
    """Where tensors stand among all that autograd saves. kind: of the list that they are in; None: one by itself."""

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


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (R, Hq, V) in q's dtype and lse (Hq, R) in fp32 (fp64 for fp64), of q (R, Hq, D) and v (R, Hkv, V)."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))


Backward = Callable[[SimpleNamespace, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(what was kept, by name, dout) -> dq, dk, dv."""


def register_attention(op: CustomOpDef, backward: Backward) -> None:
    """Autograd of an attention op: gradients of out reach q, k, v and sinks.

    Kept are inputs and results by name. `kv`, expanded rows among either, is None without `keep_kv`.
    """
    named = op._opoverload

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = bind(named, inputs)
        x.out, x.lse, *rows = output
        if hasattr(x, "keep_kv"):
            x.kv = (*rows, getattr(x, "kv", None))[0] if x.keep_kv else None
        ctx.mark_non_differentiable(*output[1:])
        keep(ctx, **vars(x))

    def run(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
        x = kept(ctx)
        dsinks = None if x.sinks is None else sinks_gradient(dout, x.out, x.lse, x.sinks)
        dq, dk, dv = backward(x, dout)
        return gradients(named, x, q=dq, k=dk.to(x.k.dtype), v=dv.to(x.v.dtype), sinks=dsinks)

    op.register_autograd(run, setup_context=setup_context)
