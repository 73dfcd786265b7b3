from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.pool import Pool

# Examples that compile or talk to other processes have no steady duration.
settings.register_profile("default", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("default")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes. Mark modules that use it `xdist_group("pool")`: one pool serves them all."""
    processes = Pool(4)
    yield processes
    processes.close()
