"""Weights and buffers are the same on all ranks: compared at a graph's first call, a sample of them at each later one.

What drives all weights of a rank apart shows there one batch later: a sum of gradients that was forgotten, a step that
one rank skips, a rate or a checkpoint that one rank alone has. A batch looks at `_AT_ONCE` weights and buffers, by
turns: what drives one of n apart shows within n / `_AT_ONCE` batches.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cp_rewrite.batch import agree
from cp_rewrite.sharding import Sharding, device_of

from . import later
from .backward import is_summing
from .later import sample, watched

_AT_ONCE = 8
"""Weights and buffers that are sampled in a call, by turns."""
_UNSAMPLED = (torch.complex64, torch.complex128)
_LIMITS = {True: 1e-4, False: 1e-6}
"""Was `sum_gradients` called -> relative difference from which ranks hold other models. Below it they may round
otherwise, as optimizers do whose kernels each rank chose by measuring."""
_HALF_LIMIT = 1e-3
"""The same where weights have 16 bits or fewer."""
_told: set[str] = set()


class WeightWatch:
    """What is looked at in the calls of one graph.

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
            weights = agree.whole_weights({name: args[place] for name, place in self.places.items()})
            self._whole = {name: self.places[name] for name, x in weights.items() if x.dtype not in _UNSAMPLED}
            self._trained = [self.places[name] for name, x in weights.items() if _trains(x)]
            if self.sharding.random == "per_rank" and watched(self.sharding):
                self._drawn = _random_state(self.sharding)
        elif torch.is_grad_enabled() and watched(self.sharding):
            self._sample(args, list(self._whole.items()))

    def after(self) -> None:
        """After a call: note this rank's random numbers, if the call drew some."""
        if self._drawn is not None:
            if not torch.equal(self._drawn, _random_state(self.sharding)):
                number = int(hashlib.sha256(self._drawn.numpy().tobytes()).hexdigest()[:12], 16)
                later.add(self.sharding, _check_seeds, "", torch.tensor([number], dtype=torch.float64))
            self._drawn = None

    def parameters(self, args: Sequence[Any]) -> list[nn.Parameter]:
        """The weights of a call that train and have memory of their own."""
        return [args[place] for place in self._trained]

    @torch.no_grad()
    def _sample(self, args: Sequence[Any], whole: Sequence[tuple[str, int]]) -> None:
        if whole:
            step = math.ceil(len(whole) / _AT_ONCE)
            chosen = whole[self._turn % step :: step]
            self._turn += 1
            weights = [args[place] for _, place in chosen]
            values = sample(weights)
            half = any(weight.is_floating_point() and weight.itemsize < 4 for weight in weights)
            limit = _HALF_LIMIT if half else _LIMITS[is_summing(self.sharding)]
            rule = partial(_check_weights, limit)
            names = ", ".join([_readable(name) for name, _ in chosen[:3]] + ["…"] * (len(chosen) > 3))
            later.add(self.sharding, rule, names, torch.stack([values.sum(), values.norm()]))


def _trains(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad and value.is_floating_point()


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
