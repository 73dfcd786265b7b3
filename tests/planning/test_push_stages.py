"""In how many stages of heads rows travel, by a model of what an exchange and a kernel take side by side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import PUSH_LINK, PUSH_PARTS_LINK, PUSH_STAGE_BACK, PUSH_TAKEN
from cp_rewrite.planning.routes import push as stages
from cp_rewrite.planning.routes.push import (
    Shape,
    StageLoad,
    backward_seconds,
    backward_stages,
    forward_seconds,
    forward_stages,
    push_route,
)
from tests.helpers.packed import make_schedule

MHA, GQA = Shape(32, 32, 128, 128, 2), Shape(64, 8, 128, 128, 2)


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
    """One rank that computes for 1 s what travels for 0.5 s; all its keys are peers'."""
    tiles = int(stages._H200.forward / (4.0 * 128 * 128 * 128 * 32))
    rows = int(0.5 * PUSH_LINK * stages._H200.link / MHA.row_bytes)
    load = StageLoad(0, tiles, 0, rows, 0, 0)
    assert forward_seconds(load, MHA, (32,)) == pytest.approx(1.5, rel=0.05)
    assert forward_seconds(load, MHA, (16, 16)) == pytest.approx(1.25 + 0.06, rel=0.02)
    assert forward_seconds(load, MHA, (4, 12, 16)) == pytest.approx(1.125 + 0.06, rel=0.02)
    # A cut whose early part waits for nothing hides what it takes time for.
    assert forward_seconds(load._replace(early=tiles), MHA, (32,)) == pytest.approx(2.06, rel=0.02)
    kernel = 2.5 * stages._H200.forward / stages._H200.backward
    assert backward_seconds(load, MHA, (32,), False) == pytest.approx(kernel + 0.8, rel=0.02)
    assert backward_seconds(load, MHA, (32,), True) == pytest.approx(kernel + 0.4, rel=0.02)
    taken = 0.12 * 0.5 + 0.18 * 0.4 / 0.7 * 0.75
    assert backward_seconds(load, MHA, (8, 16, 8), False) == pytest.approx(kernel + 0.125 + 0.1 + taken, rel=0.02)


def test_own_rows_cost_more_in_stages() -> None:
    """They are copied before any stage, and summed by few blocks: where rows are mostly own ones there is one stage."""
    own = StageLoad(0, 6000, 0, 2000, 40000, 0)
    assert len(backward_stages((own,), MHA, False)) == 1
    assert len(backward_stages((own._replace(coming=20000, own=10000),), MHA, False)) > 1
    near = own._replace(near=40000)
    assert forward_seconds(own, MHA, (32,)) - forward_seconds(near, MHA, (32,)) > 1e-4
    assert forward_seconds(own, MHA, (16, 16)) == forward_seconds(near, MHA, (16, 16))


def test_a_backward_in_parts_copies_no_early_rows_and_hides_what_comes() -> None:
    own = StageLoad(3000, 3000, 0, 2000, 40000, 0)
    near = own._replace(near=39000)
    copies = stages._copy_seconds(39000, MHA, stages._H200)
    coming = stages._link_seconds(2000, MHA, stages._H200)
    for kept, saved in ((False, 2 * copies), (True, copies)):
        gain = backward_seconds(own, MHA, (32,), kept) - backward_seconds(near, MHA, (32,), kept)
        assert gain == pytest.approx(saved, abs=PUSH_STAGE_BACK + 2 * coming)
    early, late = (near._replace(early=x, late=6000 - x, coming=20000) for x in (6000, 0))
    waits = backward_seconds(late, MHA, (32,), False) - backward_seconds(early, MHA, (32,), False)
    assert waits == pytest.approx((1 - PUSH_TAKEN) * 10 * coming / PUSH_PARTS_LINK, rel=0.01)


def test_the_model_is_what_was_measured() -> None:
    """On 2 H200, 32 heads: ms of a forward and of a backward, in one stage and in several."""
    document = loads_of([16384], 2)

    def slowest(seconds: Callable[..., float], sizes: tuple[int, ...], *kept: bool) -> float:
        return 1e3 * max(seconds(load, MHA, sizes, *kept) for load in document)

    assert slowest(forward_seconds, (32,)) == pytest.approx(1.89, rel=0.1)
    assert slowest(forward_seconds, (2, 6, 12, 12)) == pytest.approx(1.73, rel=0.15)
    assert slowest(backward_seconds, (32,), False) == pytest.approx(5.57, rel=0.05)
    assert slowest(backward_seconds, (4, 12, 12, 4), False) == pytest.approx(5.16, rel=0.05)
    assert slowest(backward_seconds, (32,), True) == pytest.approx(5.27, rel=0.05)
