from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.pool import Pool


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    """Two gloo processes, and no more: a Trainer works with all that there are."""
    processes = Pool(2)
    yield processes
    processes.close()
