"""What a backward is watched for once `sum_gradients` was called: it must not add to gradients that are summed already,
and between its end and the sum they may only be scaled, by the same factor on all ranks.

    forward ─ backward begins: are there summed gradients? ─ ends: sample them ─ sum: compare with the sample, mark
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cp_rewrite.batch.buffers import OVERWRITTEN, buffers_of
from cp_rewrite.batch.ranks import history
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import at_end_of_backward

from . import later
from .later import sample, watched

_AT_ONCE, _VALUES = 8, 256
"""Gradients that are sampled, and values of each."""
_LOOKS = 3
_LIMIT = 2e-3
"""Relative difference of factors, beyond the rounding of bfloat16."""


@dataclass
class Backwards:
    """The last backward of one group, as far as it is known."""

    count: int = 0
    sampled: list[tuple[weakref.ref[nn.Parameter], int, int]] = field(default_factory=list[Any])
    """Parameter, `id` and version of its gradient."""
    values: Tensor | None = None
    looked: int = 0
    """Backwards that found gradients of a step before, to which they add."""


_groups: dict[str, Backwards] = {}
"""By group, from its first `sum_gradients` on."""


def is_summing(sharding: Sharding) -> bool:
    """True if `sum_gradients` was called for the group."""
    return sharding.group_name in _groups


def watch_backward(sharding: Sharding, call: str, weights: Sequence[nn.Parameter], out: Sequence[Any]) -> None:
    """Watch the backward of a call of the compiled model, of this name, weights and results."""
    if not watched(sharding):
        return
    for value in out:
        if isinstance(value, Tensor) and value.ndim == 0 and value.grad_fn is not None:
            value.grad_fn.register_prehook(partial(_note_factor, sharding, value.output_nr))
    backwards = _groups.get(sharding.group_name)
    running: list[bool] = []

    def begin(*_: Any) -> None:
        if not running:
            running.append(True)
            history.note_backward(sharding.group_name, call)
            if backwards is not None:
                _check_unsummed(backwards, weights)
                backwards.count += 1
            at_end_of_backward(end)

    def end() -> None:
        running.clear()
        if backwards is not None:
            _sample(backwards, weights)

    _begin_with(out, begin)


def end_with_batch(sharding: Sharding, batch: int, out: Sequence[Any]) -> None:
    """With a capacity: raise where the backward of a call runs once the next batch is in the buffers that it reads."""
    if sharding.capacity is None:
        return
    buffers = buffers_of(sharding)

    def begin(*_: Any) -> None:
        if buffers.batch != batch:
            raise RuntimeError(f"cp_rewrite: {OVERWRITTEN}")

    _begin_with(out, begin)


def _begin_with(out: Sequence[Any], begin: Callable[..., None]) -> None:
    """Have `begin` called where the backward of a call comes to its results."""
    # An op in place on a view of a result passes the view's own node by.
    values = [value for value in out if isinstance(value, Tensor)]
    bases = [value._base if value._is_view() else value for value in values]
    for node in {base.grad_fn for base in bases if base is not None and base.grad_fn is not None}:
        node.register_prehook(begin)
    for value in values:
        value._cp_rewrite_begin = [*getattr(value, "_cp_rewrite_begin", ()), begin]  # type: ignore[attr-defined]


def begun_from(output: Tensor, result: Tensor) -> Tensor:
    """The output that a model returns for a result of its graph. The backward begins with the output: FSDP gathers
    weights there, and would wait for a rank that skips it before anything was noted."""
    if output.requires_grad:
        for begin in getattr(result, "_cp_rewrite_begin", ()):
            output.register_hook(begin)
    return output


@torch.no_grad()
def _note_factor(sharding: Sharding, place: int, grads: Sequence[Tensor | None]) -> None:
    """Have the gradient of a loss compared: ranks that scale theirs by other factors sum parts of different losses."""
    grad = grads[place]
    if grad is not None and grad.layout == torch.strided:
        later.add(sharding, _same_factor, "", grad.detach().reshape(1).double())


def _same_factor(_: str, ranks: list[list[float]]) -> None:
    factors = [factor for (factor,) in ranks]
    if max(factors) - min(factors) > _LIMIT * max(map(abs, factors)):
        raise RuntimeError(
            "cp_rewrite: the loss that the model returned got another gradient on each rank of the group "
            f"({', '.join(f'{factor:.4g}' for factor in factors)}): scale it by what is equal on all ranks, such as "
            "the targets of the whole batch"
        )


def _check_unsummed(backwards: Backwards, weights: Sequence[nn.Parameter]) -> None:
    """Raise where gradients that a backward adds to are summed over the ranks already. Behind a step they are zeros
    most often: the host waits for a GPU to see it in the first of such steps only."""
    marked = [(p, p.grad) for p in weights if p.grad is not None and _mark_of(p.grad) is not None]
    unstepped = [grad for p, grad in marked if _mark_of(grad)[1] == p._version]
    if marked and not unstepped:
        backwards.looked += 1
    looked_at = unstepped or [grad for _, grad in marked if backwards.looked <= _LOOKS]
    if any(bool(grad.any()) for grad in looked_at[:_AT_ONCE]):
        raise RuntimeError(
            "cp_rewrite: this backward adds to gradients that cp.sum_gradients has summed over the ranks, so they "
            "would be summed again: call it once per optimizer step, after the last backward of its micro-batches, and "
            "zero gradients after the step, on all ranks"
        )


@torch.no_grad()
def _sample(backwards: Backwards, weights: Sequence[nn.Parameter]) -> None:
    """Note some gradients as a backward left them."""
    found = [(p, p.grad) for p in weights if p.grad is not None and p.grad.layout == torch.strided]
    found = found[:: math.ceil(len(found) / _AT_ONCE) or 1]
    backwards.sampled = [(weakref.ref(p), id(grad), grad._version) for p, grad in found]
    backwards.values = sample([grad for _, grad in found], _VALUES) if found else None


@torch.no_grad()
def before_sum(sharding: Sharding) -> None:
    """Have the factors compared by which ranks changed their gradients since the backward, if they did."""
    backwards = _groups.setdefault(sharding.group_name, Backwards())
    sampled, values = backwards.sampled, backwards.values
    backwards.sampled, backwards.values = [], None
    parameters = [(parameter(), *rest) for parameter, *rest in sampled]
    now = [(p.grad, number, version) for p, number, version in parameters if p is not None and p.grad is not None]
    if values is None:
        return
    # One rank alone may have changed them, so all note something. Of unlike samples nothing can be said: a size of 0.
    numbers = torch.zeros(2, dtype=torch.float64)
    if any(id(grad) != number or grad._version != version for grad, number, version in now):
        changed = sample([grad for grad, *_ in now], _VALUES)
        if changed.shape == values.shape:
            numbers = torch.stack([changed @ values, values @ values])
    elif len(now) == len(sampled):
        numbers = torch.ones(2, dtype=torch.float64)
    later.add(sharding, _scaled_alike, "", numbers)


def _scaled_alike(_: str, ranks: list[list[float]]) -> None:
    factors = [product / size for product, size in ranks if size > 0]
    if factors and max(factors) - min(factors) > _LIMIT * max(map(abs, factors)):
        raise RuntimeError(
            "cp_rewrite: gradients were changed between the backward and cp.sum_gradients by other factors on each "
            f"rank ({', '.join(f'{factor:.4g}' for factor in factors)}), so their sum is not one process's: clip, "
            "or add noise, after cp.sum_gradients"
        )


def is_summed(sharding: Sharding, parameter: nn.Parameter) -> bool:
    """True if a parameter's gradient is summed, and no backward was since.

    Raises:
        RuntimeError: it is, and was changed since, as by clipping.
    """
    backwards, grad = _groups[sharding.group_name], parameter.grad
    mark = None if grad is None or not watched(sharding) else _mark_of(grad)
    if grad is None or mark is None or mark[2] != backwards.count:
        return False
    if mark[0] != grad._version and mark[1] == parameter._version and backwards.count:
        raise RuntimeError(
            "cp_rewrite: cp.sum_gradients was called twice for one backward, and gradients were changed in between: "
            "call it once per optimizer step, before gradients are clipped"
        )
    return mark[0] == grad._version


def mark_summed(sharding: Sharding, parameters: Sequence[nn.Parameter]) -> None:
    """Note of gradients that they are summed: their version, that of the parameter, and the backward they are of."""
    count = _groups[sharding.group_name].count
    for parameter in parameters:
        parameter.grad._cp_rewrite_sum = (parameter.grad._version, parameter._version, count)  # type: ignore[union-attr]


def _mark_of(grad: Tensor) -> Any:
    return getattr(grad, "_cp_rewrite_sum", None)
