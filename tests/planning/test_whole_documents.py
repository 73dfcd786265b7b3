"""Documents left whole by `balanced`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.layouts import balanced
from cp_rewrite.planning.layouts.share_out import Slices, share_out_whole
from cp_rewrite.planning.plan import plan
from tests.helpers.amount import drawn

MIX = [3072, 150, 3072, 1536, 1536, 350, 1536, 150, 350, 762, 350, 762, 350, 150, 2258]


@pytest.mark.parametrize("window", [None, 2048])
def test_two_ranks_share_a_mix_nearly_without_a_cut(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    mask = PackedMask(window=(window, 0))
    whole = plan(MIX, 2, mask=mask)
    assert int(whole.schedule.received.sum(1).max()) <= 16
    assert whole.imbalance <= 1.01
    monkeypatch.setattr(balanced, "share_out_whole", lambda *_: None)
    assert int(plan(MIX, 2, mask=mask).schedule.received.sum(1).max()) > 100


@drawn(100)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 3))
def test_each_rank_gets_its_tokens_each_once(lengths: list[int], ranks: int, unit: int) -> None:
    lengths = [unit * length for length in lengths]
    chunks, more = divmod(sum(lengths) // unit, ranks)
    quotas = [(chunks + (rank < more)) * unit for rank in range(ranks)]
    slices = Slices.of_row(Documents.from_lengths(lengths), PackedMask(), unit)
    shared = share_out_whole(slices, quotas)
    if shared is None:
        return
    assert [int(each.size.sum()) for each in shared] == quotas
    everything = Slices.join(shared)
    order = np.argsort(everything.start)
    starts, ends = everything.start[order], (everything.start + everything.size)[order]
    assert starts.tolist() == [0, *ends[:-1].tolist()]
    assert ends[-1] == sum(lengths)
    assert not (everything.size % unit).any()
    # One head a time is given away: at most one for each rank but the last that has tokens too many or too few.
    assert len(everything) <= len(slices) + ranks - 1
    in_document = (
        everything.start
        - np.cumsum([0, *lengths[:-1]])[np.searchsorted(np.cumsum(lengths), everything.start, side="right")]
    )
    assert (everything.first == in_document).all()


def test_what_is_too_long_too_much_or_too_many_is_not_left_whole() -> None:
    def shared(lengths: list[int], ranks: int) -> list[Slices] | None:
        rows, more = divmod(sum(lengths), ranks)
        quotas = [rows + (rank < more) for rank in range(ranks)]
        return share_out_whole(Slices.of_row(Documents.from_lengths(lengths), PackedMask()), quotas)

    assert shared([4096, 1024, 1024], 2) is None
    assert shared([2048, *[128] * 32], 2) is None
    assert shared([16] * 500, 2) is None
    assert shared([1024, 1024], 2) is not None
