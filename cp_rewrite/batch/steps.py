"""Watches over training steps: backwards that add to gradients which are summed already, and ranks that scale
gradients, or hold weights, otherwise than others. They raise or warn.

    add, due, compare       numbers of a step, compared over the ranks with a later batch, in the message that is sent
                            anyway
    watch_backward, …,      backwards once `sum_gradients` was called, and gradients between a backward and their sum
    mark_summed
    WeightWatch             weights, buffers and random numbers in the calls of one graph

Nothing waits for a GPU: numbers are copied to the host beside the step, and read one batch later, of a GPU two.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.agree import heartbeat, turns
from cp_rewrite.agree.turns import SAMPLE, talks
from cp_rewrite.sharding import Sharding, device_of
from cp_rewrite.torch_internals import at_end_of_backward

from .active import is_captured
from .buffers import OVERWRITTEN, buffers_of

Rule = Callable[[str, list[list[float]]], None]
"""Called with what numbers are about and each rank's; raises or warns, on all ranks alike."""


@dataclass(frozen=True)
class _Note:
    rule: Rule
    about: str
    numbers: Tensor
    ready: torch.cuda.Event | None

    def text(self) -> str:
        if self.ready is not None:
            self.ready.synchronize()
        return ",".join(map(repr, self.numbers.tolist()))


_batches: defaultdict[str, deque[list[_Note]]] = defaultdict(lambda: deque([[]]))
"""By group: what was noted in each of the last batches."""


def add(sharding: Sharding, rule: Rule, about: str, numbers: Tensor) -> None:
    """Have a few float64 numbers, (n,), of the batch in flight compared by a rule."""
    ready = None
    if numbers.is_cuda:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        numbers, ready = host.copy_(numbers, non_blocking=True), torch.cuda.Event()
        ready.record()
    _batches[sharding.group_name][-1].append(_Note(rule, about, numbers, ready))


def due(sharding: Sharding) -> list[_Note]:
    """Notes to compare with the batch that begins: of an earlier one, which a GPU is done with."""
    batches, notes = _batches[sharding.group_name], list[_Note]()
    batches.append([])
    while len(batches) > (1 if device_of(sharding).type == "cpu" else 2):
        notes += batches.popleft()
    return notes


def text_of(notes: Sequence[_Note]) -> str:
    """The notes as they are sent to other ranks."""
    return ";".join(note.text() for note in notes)


def compare(notes: Sequence[_Note], texts: Sequence[str]) -> None:
    """Apply the rules of this rank's notes to all ranks' texts, unless one has fewer, as it left a batch with an
    error."""
    ranks = [[list(map(float, part.split(","))) for part in text.split(";") if part] for text in texts]
    if len(set(map(len, ranks))) == 1:
        for note, *values in zip(notes, *ranks, strict=True):
            note.rule(note.about, values)


def watched(sharding: Sharding) -> bool:
    """True if steps are compared: all but those that a CUDA graph captures, which take a capacity."""
    return sharding.check_batches and not (sharding.capacity and is_captured()) and talks(sharding)


def sample(tensors: Sequence[Tensor], each: int = SAMPLE) -> Tensor:
    """(n,) float64: up to about `each` values of each tensor, evenly spread."""
    flat = [x.detach().reshape(-1) for x in tensors]
    return torch.cat([x[:: max(1, x.numel() // each)] for x in flat]).double()


_AT_ONCE, _VALUES = 8, 256
"""Gradients that are sampled, and values of each."""
_LOOKS = 3
_LIMIT = 2e-3
"""Relative difference of factors, beyond the rounding of bfloat16."""


@dataclass
class Backwards:
    """The last backward of one group, as far as it is known. It is watched once `sum_gradients` was called: it must not
    add to gradients that are summed already, and between its end and the sum they may only be scaled, by the same
    factor on all ranks.

        forward ─ backward begins: are there summed gradients? ─ ends: sample them ─ sum: compare with the sample, mark
    """

    count: int = 0
    sampled: list[tuple[weakref.ref[nn.Parameter], int, int]] = field(default_factory=list[Any])
    """Parameter, `id` and version of its gradient."""
    values: Tensor | None = None
    looked: int = 0
    """Backwards that found gradients of a step before, to which they add."""


_groups: dict[str, Backwards] = {}
"""By group, from its first `sum_gradients` on."""


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
            heartbeat.note_backward(sharding.group_name, call)
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


_begins = WeakTensorKeyDictionary()
"""Result of a call -> what is called where its backward begins. No attribute: a result may be saved to a file."""


def _begin_with(out: Sequence[Any], begin: Callable[..., None]) -> None:
    """Have `begin` called where the backward of a call comes to its results."""
    # An op in place on a view of a result passes the view's own node by.
    values = [value for value in out if isinstance(value, Tensor)]
    bases = [value._base if value._is_view() else value for value in values]
    for node in {base.grad_fn for base in bases if base is not None and base.grad_fn is not None}:
        node.register_prehook(begin)
    for value in values:
        _begins[value] = [*_begins.get(value, ()), begin]


def begun_from(output: Tensor, result: Tensor) -> Tensor:
    """The output that a model returns for a result of its graph. The backward begins with the output: FSDP gathers
    weights there, and would wait for a rank that skips it before anything was noted."""
    if output.requires_grad:
        for begin in _begins.get(result, ()):
            output.register_hook(begin)
    return output


@torch.no_grad()
def _note_factor(sharding: Sharding, place: int, grads: Sequence[Tensor | None]) -> None:
    """Have the gradient of a loss compared: ranks that scale theirs by other factors sum parts of different losses."""
    grad = grads[place]
    if grad is not None and grad.layout == torch.strided:
        add(sharding, _same_factor, "", grad.detach().reshape(1).double())


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
    add(sharding, _scaled_alike, "", numbers)


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
    """Note that gradients are summed: their version, that of the parameter, and the backward they come from."""
    count = _groups[sharding.group_name].count
    for parameter in parameters:
        parameter.grad._cp_rewrite_sum = (parameter.grad._version, parameter._version, count)  # type: ignore[union-attr]


def _mark_of(grad: Tensor) -> Any:
    return getattr(grad, "_cp_rewrite_sum", None)


_WEIGHTS_AT_ONCE = 8
"""Weights and buffers that are sampled in a call, by turns."""
_UNSAMPLED = (torch.complex64, torch.complex128)
_LIMITS = {True: 1e-4, False: 1e-6}
"""Was `sum_gradients` called -> relative difference from which ranks hold other models. Below it they may round
otherwise, as optimizers do whose kernels each rank chose by measuring."""
_HALF_LIMIT = 1e-3
"""The same where weights have 16 bits or fewer."""
_told: set[str] = set()


class WeightWatch:
    """Looks at weights, buffers and random numbers in the calls of one graph. Weights and buffers are the same on all
    ranks: compared at the first call, a sample of them at each later one.

    What drives all weights of a rank apart shows there one batch later: a sum of gradients that was forgotten, a step
    that one rank skips, a rate or a checkpoint that one rank alone has. A batch looks at `_WEIGHTS_AT_ONCE` weights and
    buffers, by turns: what drives one of n apart shows within n / `_WEIGHTS_AT_ONCE` batches.

    Args:
        places: names of weights and buffers -> their places among a call's arguments.
    """

    def __init__(self, sharding: Sharding, places: Mapping[str, int]) -> None:
        self.sharding, self.places = sharding, dict(places)
        self._whole: dict[str, int] | None = None
        self._trained: list[int] = []
        self._turn = 0
        self._drawn: Tensor | None = None

    def before(self, args: Sequence[Any]) -> None:
        """Before a call: note a sample; of the first call all weights are compared."""
        if self._whole is None:
            weights = turns.whole_weights({name: args[place] for name, place in self.places.items()})
            self._whole = {name: self.places[name] for name, x in weights.items() if x.dtype not in _UNSAMPLED}
            self._trained = [
                self.places[name]
                for name, x in weights.items()
                if isinstance(x, nn.Parameter) and x.requires_grad and x.is_floating_point()
            ]
            if self.sharding.random == "per_rank" and watched(self.sharding):
                self._drawn = _random_state(self.sharding)
        elif torch.is_grad_enabled() and watched(self.sharding):
            self._sample(args, list(self._whole.items()))

    def after(self) -> None:
        """After a call: note this rank's random numbers, if the call drew some."""
        if self._drawn is not None:
            if not torch.equal(self._drawn, _random_state(self.sharding)):
                number = int(hashlib.sha256(self._drawn.numpy().tobytes()).hexdigest()[:12], 16)
                add(self.sharding, _check_seeds, "", torch.tensor([number], dtype=torch.float64))
            self._drawn = None

    def parameters(self, args: Sequence[Any]) -> list[nn.Parameter]:
        """The weights of a call that train and have memory of their own."""
        return [args[place] for place in self._trained]

    @torch.no_grad()
    def _sample(self, args: Sequence[Any], whole: Sequence[tuple[str, int]]) -> None:
        if whole:
            step = math.ceil(len(whole) / _WEIGHTS_AT_ONCE)
            chosen = whole[self._turn % step :: step]
            self._turn += 1
            weights = [args[place] for _, place in chosen]
            values = sample(weights)
            half = any(weight.is_floating_point() and weight.itemsize < 4 for weight in weights)
            limit = _HALF_LIMIT if half else _LIMITS[self.sharding.group_name in _groups]
            rule = partial(_check_weights, limit)
            names = ", ".join([_readable(name) for name, _ in chosen[:3]] + ["…"] * (len(chosen) > 3))
            add(self.sharding, rule, names, torch.stack([values.sum(), values.norm()]))


def _random_state(sharding: Sharding) -> Tensor:
    return torch.cuda.get_rng_state() if device_of(sharding).type == "cuda" else torch.get_rng_state()


def _warn_once(about: str, text: str) -> None:
    if about not in _told:
        _told.add(about)
        warnings.warn(text, stacklevel=2)


def _readable(source: str) -> str:
    """`layers.0.weight` of Dynamo's `L['self']._modules['layers']._modules['0']._parameters['weight']`."""
    parts = re.findall(r"\[['\"]?([^'\"\]]*)['\"]?\]|\.(?!_modules|_parameters|_buffers)(\w+)", source)
    return ".".join(index or name for index, name in parts[1:]) or source


def _check_weights(limit: float, names: str, ranks: list[list[float]]) -> None:
    sums, size = [total for total, _ in ranks], ranks[0][1]
    if len(set(map(repr, sums))) == 1:
        return
    apart = (
        max(abs(total - sums[0]) for total in sums) / max(size, 1e-30) if all(map(math.isfinite, sums)) else math.inf
    )
    different = [rank for rank, total in enumerate(sums) if repr(total) != repr(sums[0])]
    found = (
        f"cp_rewrite: weights or buffers that all ranks of the group had alike differ on ranks {different} from rank "
        f"0's, by {apart:.1e} of their size, in a sample of {names}. "
    )
    if apart <= limit:
        _warn_once(
            "weights",
            f"{found}An optimizer that rounds otherwise on each rank (compiled, its kernels chosen by measuring) "
            f"drifts slowly; else: {_CAUSES}",
        )
    else:
        raise RuntimeError(found + _CAUSES)


_CAUSES = (
    "Call cp.sum_gradients(model.parameters(), sharding) once per step, after the last backward, before gradients are "
    "clipped and before optimizer.step(), with all parameters that the optimizer has; take the same step on all ranks, "
    "with the same rate, seed of noise and checkpoint"
)


def _check_seeds(_: str, ranks: list[list[float]]) -> None:
    if len({number for (number,) in ranks}) == 1:
        _warn_once(
            "seeds",
            "cp_rewrite: all ranks of the group draw the same random numbers, so dropout drops the same of different "
            "tokens: seed the ranks apart, torch.manual_seed(seed + rank), after weights are made",
        )
