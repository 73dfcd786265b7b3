"""Numbers of a step that are compared over the ranks with a later batch, in the message that is sent anyway.

Nothing waits for a GPU: numbers are copied to the host beside the step, and read `_lag` batches later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_rewrite.batch.active.current import is_captured
from cp_rewrite.batch.agree import SAMPLE
from cp_rewrite.batch.ranks.turns import talks
from cp_rewrite.sharding import Sharding, device_of

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
    """What is to be compared with the batch that begins: notes of an earlier one, which a GPU is done with."""
    batches, notes = _batches[sharding.group_name], list[_Note]()
    batches.append([])
    while len(batches) > (1 if device_of(sharding).type == "cpu" else 2):
        notes += batches.popleft()
    return notes


def text_of(notes: Sequence[_Note]) -> str:
    """What other ranks are sent of them."""
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
