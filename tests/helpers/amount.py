"""How much is drawn and tried: `make test` less than `make test-slow`, and that less than `make sweep`, which leaves
nothing out."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Sequence
from datetime import date
from typing import TypeVar

from hypothesis import settings

Value = TypeVar("Value")

everything = False
"""True: nothing is left out. Set by tests/conftest.py before it reads any test."""
FEW = 2
"""So many cases of a slow test that has more, and a twentieth of the others, are tried a day."""
SHARE = 3
"""One in so many cases of a test marked `shared` is tried a day by `make test`."""


def begin() -> None:
    """Note when slow tests are left out: `CP_MINUTES` from now, where that is set. Workers read the first note."""
    if minutes := os.environ.get("CP_MINUTES"):
        os.environ.setdefault("CP_UNTIL", str(time.time() + 60 * float(minutes)))


def is_over() -> bool:
    """True if the minutes of `begin` have passed."""
    return time.time() > float(os.environ.get("CP_UNTIL", "inf"))


def order(files: Collection[str]) -> dict[str, int]:
    """A drawn place for each file, another each day, so that no file is always among those that time leaves out."""
    drawn_files = random.Random(seed()).sample(sorted(files), len(files))
    return {file: place for place, file in enumerate(drawn_files)}


def seed() -> int:
    """Seed of all draws: `CP_SEED`, or today's number. tests/conftest.py says which, and hands it to all workers."""
    return int(os.environ.get("CP_SEED", date.today().toordinal()))


def some(values: Sequence[Value]) -> list[Value]:
    """Cases of a slow test that are tried today."""
    count = FEW + (len(values) - FEW) // 20
    return [*values] if everything or count >= len(values) else random.Random(seed()).sample(values, count)


def share(cases: Sequence[Value]) -> list[Value]:
    """Cases of a test marked `shared` that `make test` tries today."""
    return random.Random(seed()).sample(cases, -(-len(cases) // SHARE))


def examples(all_of_them: int, quick: int | None = None) -> int:
    """A number of examples: all where nothing is left out; elsewhere `quick`, by default a third."""
    return all_of_them if everything else quick or -(-all_of_them // 3)


def drawn(all_of_them: int, quick: int | None = None) -> settings:
    """Decorator of a hypothesis test: how many examples it draws."""
    return settings(max_examples=examples(all_of_them, quick))
