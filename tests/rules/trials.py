"""Which ops are tried on which arguments with which claims: some of each day, or all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .claims import Claims, draw
from .outcome import Outcome, outcome
from .program import NotTried
from .samples import Sample, ops, samples


@dataclass(frozen=True)
class Trial:
    """sized: where an argument is the token count, the op gets that of the shard, as the program of `x.size(1)`."""

    sample: Sample
    claims: Claims
    ranks: int
    sized: bool

    def run(self) -> Outcome:
        return outcome(self.sample, self.claims, self.ranks, self.sized)

    def __str__(self) -> str:
        return f"{self.sample} with {self.claims} on {self.ranks} ranks{', sized' * self.sized}"


@dataclass
class Found:
    """How trials ended: how many, and which of those that are right nowhere (`wrong`) or refused needlessly."""

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    missing: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By op."""

    def add(self, trial: Trial) -> None:
        try:
            ended = trial.run()
        except NotTried:
            self.counts["not tried"] += 1
            return
        self.counts[ended.kind] += 1
        if ended.kind in ("wrong", "raised"):
            self.wrong.append(f"{ended.kind}: {trial}: {ended.why}")
        elif ended.kind == "missing":
            self.missing.setdefault(trial.sample.op, []).append(f"{trial}: {ended.why}")


def tried(trials: Iterable[Trial]) -> Found:
    """What became of them."""
    found = Found()
    for trial in trials:
        found.add(trial)
    return found


def of_day(count: int, seed: int) -> Iterator[Trial]:
    """So many, of ops at random."""
    chance = random.Random(seed)
    for name in chance.sample(sorted(ops()), min(count, len(ops()))):
        yield from _of_op(name, 1, 1, chance)


def of_op(name: str, most: int = 20, each: int = 4) -> Iterator[Trial]:
    """Up to `most` samples of an op with `each` claims."""
    return _of_op(name, most, each, random.Random(name))


def _of_op(name: str, most: int, each: int, chance: random.Random) -> Iterator[Trial]:
    found = list(samples(name))
    for sample in chance.sample(found, min(most, len(found))):
        for claims in draw(sample.tensors, each, chance):
            yield Trial(sample, claims, chance.choice((2, 3)), chance.random() < 0.3)
