"""How much is drawn: `make test` draws less than `make test-all`."""

from __future__ import annotations

from hypothesis import settings

everything = False
"""Whether slow tests run too. Set by tests/conftest.py before it reads any test."""


def examples(all_of_them: int, quick: int | None = None) -> int:
    """So many where slow tests run; elsewhere `quick`, by default a third."""
    return all_of_them if everything else quick or -(-all_of_them // 3)


def drawn(all_of_them: int, quick: int | None = None) -> settings:
    """Decorator of a hypothesis test: how many examples it draws."""
    return settings(max_examples=examples(all_of_them, quick))
