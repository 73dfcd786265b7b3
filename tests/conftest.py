from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.pool import Pool

# Examples that compile or talk to other processes have no steady duration.
settings.register_profile("default", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with a pool run on one worker: one pool serves them all."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes."""
    processes = Pool(4)
    yield processes
    processes.close()
