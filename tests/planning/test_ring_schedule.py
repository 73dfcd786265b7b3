"""The steps of a ring, played in numpy, against the dense mask."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.routes.ring import ring_tables
from tests.helpers.amount import drawn
from tests.helpers.packs import batches, masks
from tests.planning.test_schedule import global_rows, seen_by, summed_rows, wanted_pairs


@drawn(300)
@given(batches(), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_steps_cover_exactly_the_mask(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    plan = plan_batch(rows, world_size, layout, mask)
    schedule, total, where = plan.schedule(mask), rows[0].total, global_rows(plan)
    seen = np.zeros((len(rows) * total, len(rows) * total), dtype=np.int64)
    for rank in range(world_size):
        tables = ring_tables(schedule, rank)
        assert all(len(array) >= 2 for array in tables.values())
        steps = [step for step, *_ in tables["rounds"].tolist() if step >= 0]
        assert steps == sorted(steps)
        for i, (step, c0, c1, p0, p1, l0, l1, e0, e1, s0, s1) in enumerate(tables["rounds"].tolist()):
            if step < 0:
                continue
            source = where[(rank - step) % world_size][tables["kv_rows"][e0:e1]]
            cu_q, cu_k = (tables[name][c0:c1] for name in ("cu_seqlens_q", "cu_seqlens_k"))
            assert cu_q[-1] == schedule.local_rows
            assert (np.diff(cu_q) >= 0).all()
            assert cu_k[-1] <= e1 - e0
            ptr = tables["sum_ptr"][i * (schedule.local_rows + 1) : (i + 1) * (schedule.local_rows + 1)]
            lists = tables["sum_rows"][s0:s1]
            owners = tables["kv_rows"][e0:e1]
            summed = [summed_rows(ptr, lists, row) for row in range(schedule.local_rows)]
            assert [owners[members].tolist() for members in summed] == [[i] * len(x) for i, x in enumerate(summed)]
            assert sorted(np.concatenate(summed).tolist()) == list(range(e1 - e0))
            for queries, keys in seen_by({"pieces": tables["pieces"][p0:p1], "launches": tables["launches"][l0:l1]}):
                np.add.at(seen, (where[rank][queries], source[keys]), 1)
    np.testing.assert_array_equal(seen, wanted_pairs(rows, mask))


def test_usual_masks_need_one_round_per_step() -> None:
    rows = [Documents.from_lengths([40, 9, 100, 3])]
    for mask in (PackedMask(), PackedMask(causal=False)):
        for layout in LAYOUTS:
            schedule = plan_batch(rows, 4, layout, mask).schedule(mask)
            for rank in range(4):
                steps = ring_tables(schedule, rank)["rounds"][:, 0]
                assert len(np.unique(steps[steps >= 0])) == (steps >= 0).sum()
