from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.helpers import pool as pools
from tests.helpers.pool import Pool


def end(mesh: Any) -> None:
    if mesh.get_rank() == 1:
        os._exit(3)


def wait(mesh: Any) -> None:
    if mesh.get_rank() == 1:
        time.sleep(600)


def rank_of(mesh: Any) -> int:
    return mesh.get_rank()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "says"), [(end, "rank 1 ended with exit code 3"), (wait, r"rank 1 gave nothing:(.|\n)*in wait")]
)
def test_a_case_that_loses_a_rank_fails_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, job: Any, says: str
) -> None:
    processes = Pool(2)
    try:
        assert processes.run(2, rank_of) == [0, 1]
        monkeypatch.setattr(pools, "TIMEOUT_S", 2)
        with pytest.raises(AssertionError, match=says):
            processes.run(2, job)
        monkeypatch.undo()
        assert processes.run(2, rank_of) == [0, 1]
    finally:
        processes.close()
