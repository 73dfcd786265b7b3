"""Parts that attention ops share: what is done to a kernel's results, and arguments and gradients by the names in
schemas.

    snapshot                    a copy of what memory holds now, for readers that run once it was written over
    merge_parts                 softmax results over parts of the keys, put together
    add_sinks, sinks_gradient   sinks, which are one more key without a value
    finished, fill_gaps         results for rows that saw no key at all
    bind, call, gradients       an op's inputs by name
    keep, kept                  what its backward reads
    register_attention          fakes and autograd of an attention op

Shapes: R local rows, H or Hq query and Hkv key heads, D and V head dims of qk and v. `lse` is (H, R); -inf (from some
kernels +inf): the row saw no key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.kernels.rows import merge_steps
from cp_rewrite.kernels.select import Tables
from cp_rewrite.planning.names import PieceRow


@custom_op("cp_rewrite::snapshot", mutates_args=())
def snapshot(x: Tensor) -> Tensor:
    """A copy of `x`, of any shape and dtype. Compilers see no more of it: they neither fold it into `x` nor compute it
    again in a backward."""
    return x.clone()


@snapshot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def merge_parts(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both: out (R, H, V) and lse, both in fp32 (fp64 for fp64).

    A row that saw no key in a part keeps what it has; one that saw none in both stays at 0 and -inf.
    """
    return merge_steps(torch.stack([out, part.to(out.dtype)]), torch.stack([lse, part_lse]))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one more logit per head, `sinks` (H,), that draws weight and adds no value.

        out' = out · exp(lse - lse'),   lse' = log(exp(lse) + exp(sink))

    Rows that saw no key stay at 0 and -inf. A kernel's backward given out' and lse' yields the gradients of q, k and v.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]).masked_fill(lse == -torch.inf, -torch.inf)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return (out * weight.t()[..., None]).to(out.dtype), total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,): minus the sum over rows of (the sink's weight) · (dout · out). Rows that saw no key are not read."""
    seen = lse != -torch.inf
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(~seen, 0.0))
    return -torch.where(seen, weight * delta, 0.0).sum(1).to(sinks.dtype)


def finished(out: Tensor, lse: Tensor, tables: Tables, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results of attention: a kernel's, with sinks added and rows of no document filled."""
    out, lse = (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    return (fill_gaps(out, lse) if has_gaps(tables, out.shape[0]) else out), lse


def fill_gaps(out: Tensor, lse: Tensor) -> Tensor:
    """out with copies in local rows of no document, padding and fill: of the last row before that saw a key, of the
    first where there is none. All other rows are the same bit for bit. The host does not wait for the device.

        row       0 1 2 3 4 5
        document  - A A - B -       -: lse -inf
        out of    1 1 2 2 4 4

    A model may divide by what attention gives, or take its logarithm. Such a row counts in no loss, but 0 times a
    gradient that is infinite is not 0: so it holds what is as valid as any token's.
    """
    if out.shape[0] == 0:
        return out
    gap = lse[0] == -torch.inf
    before = torch.where(gap, -1, torch.arange(gap.shape[0], device=gap.device)).cummax(0).values
    return out.index_select(0, torch.where(before < 0, gap.int().argmin(), before))


_known = WeakTensorKeyDictionary()


def has_gaps(tables: Tables, rows: int) -> bool:
    """True if some of the local rows may be of no document: of tables that are no ring's. Found once per batch."""
    known = _known.get(tables.pieces)
    if known is None:
        at = PieceRow(*tables.pieces.unbind(1))
        of_documents = int(((at.q1 - at.q0) * (at.k1 > at.k0)).sum())
        known = _known[tables.pieces] = -1 if tables.sizes_are_bounds else of_documents
    return known < rows


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


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (R, Hq, V) in q's dtype and lse (Hq, R) in fp32 (fp64 for fp64), of q (R, Hq, D) and v (R, Hkv, V)."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))


Backward = Callable[[SimpleNamespace, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(what was kept, by name, dout) -> dq, dk, dv."""


def register_attention(
    op: CustomOpDef, backward: Backward, more: Callable[[SimpleNamespace], tuple[Tensor, ...]] = lambda x: ()
) -> None:
    """Fakes and autograd of an attention op: gradients of out reach q, k, v and sinks.

    Kept are inputs and results by name. `kv`, expanded rows among either, is None without `keep_kv`.

    Args:
        more: fakes of what the op gives behind out and lse, by its arguments by name.
    """
    named = op._opoverload

    def fake(*inputs: Any) -> tuple[Tensor, ...]:
        x = bind(named, inputs)
        return *fake_results(x.q, x.v), *more(x)

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

    op.register_fake(fake)
    op.register_autograd(run, setup_context=setup_context)
