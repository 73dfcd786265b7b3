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

DRAWN = 6
"""How many claims are drawn for each that is wanted: of an op with three operands most do not go together."""


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

    def add(self, trial: Trial) -> bool:
        """Run a trial; False: it can't be tried."""
        try:
            ended = trial.run()
        except NotTried:
            self.counts["not tried"] += 1
            return False
        self.counts[ended.kind] += 1
        if ended.kind in ("wrong", "raised"):
            self.wrong.append(f"{ended.kind}: {trial}: {ended.why}")
        elif ended.kind == "missing":
            self.missing.setdefault(trial.sample.op, []).append(f"{trial}: {ended.why}")
        return True


def tried(trials: Iterable[Iterable[Trial]], each: int) -> Found:
    """Outcomes of the first `each` of every sample's trials that can be tried."""
    found = Found()
    for of_sample in trials:
        left = each
        for trial in of_sample:
            left -= found.add(trial)
            if not left:
                break
    return found


def of_day(count: int, seed: int) -> Found:
    """Outcomes of one trial each of `count` ops at random."""
    chance = random.Random(seed)
    names = chance.sample(sorted(ops()), min(count, len(ops())))
    return tried((trials for name in names for trials in _of_op(name, 1, 1, chance)), 1)


def of_op(name: str, most: int = 20, each: int = 4) -> Found:
    """Outcomes of up to `most` samples of an op with `each` claims."""
    return tried(_of_op(name, most, each, random.Random(name)), each)


def _of_op(name: str, most: int, each: int, chance: random.Random) -> Iterator[Iterator[Trial]]:
    """The trials of every sample: more than `each`, since some can't be tried."""
    found = list(samples(name))
    for sample in chance.sample(found, min(most, len(found))):
        claims = draw(sample.tensors, DRAWN * each, chance)
        yield (Trial(sample, one, chance.choice((2, 3)), chance.random() < 0.3) for one in claims)
