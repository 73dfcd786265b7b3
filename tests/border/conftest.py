from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.border.forks import Forks

QUICK = frozenset(
    {
        "test_state_is_assigned_as_it_is_written[load-attribute]",
        "test_random_numbers[python_number-plain]",
        "test_weights_that_differ_between_ranks_are_an_error[weights]",
    }
)
"""Tests of the default suite, some 2 s each; the rest is slow."""


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "border" not in item.path.parts:
            continue
        if "forks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))  # one process is forked off for both
            item.add_marker("long")
        if item.name not in QUICK:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A warm process that ranks are forked off from."""
    server = Forks()
    yield server
    server.close()
