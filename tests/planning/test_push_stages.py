"""In how many stages of heads rows travel, by a model of what an exchange and a kernel take side by side."""

from __future__ import annotations

import numpy as np
import pytest

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes import push_stages as stages
from cp_rewrite.planning.routes.push import push_route
from cp_rewrite.planning.routes.push_stages import (
    Shape,
    StageLoad,
    backward_seconds,
    backward_stages,
    forward_seconds,
    forward_stages,
)
from tests.helpers.packed import make_schedule

MHA, GQA = Shape(32, 32, 128, 128, 2), Shape(64, 8, 128, 128, 2)


@pytest.fixture(autouse=True)
def weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_WORTH", 0.98)
    stages.forward_stages.cache_clear()
    stages.backward_stages.cache_clear()


def loads_of(lengths: list[int], world_size: int, mask: PackedMask | None = None) -> tuple[StageLoad, ...]:
    schedule, _ = make_schedule([Documents.from_lengths(lengths)], world_size, "balanced", mask or PackedMask())
    tables = [push_route(schedule, rank)["loads"] for rank in range(world_size)]
    assert all(np.array_equal(tables[0], each) for each in tables)  # all ranks must find the same stages
    return tuple(StageLoad(*row) for row in tables[0].tolist())


def test_much_data_per_work_travels_in_stages() -> None:
    loads = loads_of([32768], 4)
    for sizes in (forward_stages(loads, MHA), backward_stages(loads, MHA, False), backward_stages(loads, MHA, True)):
        assert len(sizes) > 1
        assert sum(sizes) == 32
        assert min(sizes) >= 2
    assert len(forward_stages(loads, GQA)) == 1


def test_what_needs_no_stages_has_one() -> None:
    assert forward_stages(loads_of([512] * 64, 4), MHA) == backward_stages(loads_of([512] * 64, 4), MHA, False) == (32,)
    few = Shape(8, 1, 128, 128, 2)
    assert forward_stages(loads_of([32768], 4), few) == (1,)  # no two heads
    assert not any(map(any, loads_of([5000, 3000], 2, PackedMask(False, (300, 200)))))  # several launches


def test_stages_hide_the_exchange() -> None:
    """One rank that computes for 1 s what travels for 0.5 s."""
    tiles = int(stages._DEVICE.forward / (4.0 * 128 * 128 * 128 * 32))
    rows = int(0.5 * stages._FEW_LINK * stages._DEVICE.link / MHA.row_bytes)
    load = StageLoad(0, tiles, 0, rows)
    assert forward_seconds(load, MHA, (32,)) == pytest.approx(1.5, rel=0.05)
    assert forward_seconds(load, MHA, (16, 16)) == pytest.approx(1.25 + 0.06, rel=0.02)
    assert forward_seconds(load, MHA, (4, 12, 16)) == pytest.approx(1.125 + 0.06, rel=0.02)
    # A cut whose early part waits for nothing hides what it takes time for.
    assert forward_seconds(StageLoad(tiles, tiles, 0, rows), MHA, (32,)) == pytest.approx(2.06, rel=0.02)
    kernel = 2.5 * stages._DEVICE.forward / stages._DEVICE.backward
    assert backward_seconds(load, MHA, (32,), False) == pytest.approx(kernel + 0.8, rel=0.02)
    assert backward_seconds(load, MHA, (32,), True) == pytest.approx(kernel + 0.4, rel=0.02)
    assert backward_seconds(load, MHA, (8, 16, 8), False) == pytest.approx(kernel + 0.25 + 0.12, rel=0.02)
