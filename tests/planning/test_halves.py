"""Slices shared out over ranks by halving."""

from __future__ import annotations

import cProfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.load import load_of
from cp_rewrite.planning.cost.tiles import imbalance
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.layouts.balanced import VARIANTS
from cp_rewrite.planning.layouts.by_name import lay_out
from cp_rewrite.planning.layouts.halves import even_pairs, share_out_by_halves
from cp_rewrite.planning.layouts.options import LayoutOptions
from cp_rewrite.planning.layouts.share_out import Slices, slice_tiles
from cp_rewrite.planning.layouts.token_order import outer_order
from cp_rewrite.planning.plan import plan
from cp_rewrite.planning.schedule import build
from tests.helpers.amount import drawn
from tests.helpers.packs import batches, masks


@drawn(100)
@given(batches(max_rows=1, max_total=1000), masks(), st.integers(2, 20), st.booleans(), st.sampled_from((1, 8)))
def test_every_rank_gets_its_tokens_once(
    rows: tuple[Documents, ...], mask: PackedMask, world_size: int, nodes: bool, unit: int
):
    documents = rows[0] if unit == 1 else Documents.from_lengths((rows[0].lengths * unit).tolist())
    if documents.total < unit:
        return
    slices = Slices.of_row(documents, mask, unit)
    units, more = divmod(-(-documents.total // unit), world_size)
    quotas = [(units + (rank < more)) * unit for rank in range(world_size)]
    node_size = world_size // 2 if nodes and world_size % 2 == 0 else world_size
    halved = share_out_by_halves(slices, quotas, node_size, mask, unit)
    evened = even_pairs(*halved, quotas, node_size, mask, unit)
    check_shares(*halved, quotas, mask, unit)
    check_shares(*evened, quotas, mask, unit)
    most = [np.bincount(owner, shares.work, world_size).max() for shares, owner in (halved, evened)]
    assert most[1] <= most[0]
    nodes_tokens = [np.bincount(owner // node_size, shares.size) for shares, owner in (halved, evened)]
    assert (nodes_tokens[0] == nodes_tokens[1]).all()


@drawn(40)
@given(batches(max_rows=1, max_total=3000), masks(), st.integers(2, 9))
def test_several_ways_at_once_are_those_of_each_alone(rows: tuple[Documents, ...], mask: PackedMask, world_size: int):
    slices = Slices.of_row(rows[0], mask)
    tokens, more = divmod(rows[0].total, world_size)
    quotas = [tokens + (rank < more) for rank in range(world_size)]
    halved = share_out_by_halves(slices, quotas, world_size, mask, 1, VARIANTS)
    evened, owner = even_pairs(*halved, quotas * len(VARIANTS), world_size, mask, 1)
    for way, whole in enumerate(VARIANTS):
        alone = share_out_by_halves(slices, quotas, world_size, mask, 1, (whole,))
        mine = np.flatnonzero(halved[1] // world_size == way)
        found = halved[0].take(mine), halved[1][mine] - way * world_size
        one, other = (
            (shares.take(order := np.argsort(shares.start)), ranks[order]) for shares, ranks in (alone, found)
        )
        assert (one[0].table == other[0].table).all()
        assert (one[1] == other[1]).all()
        mine = np.flatnonzero(owner // world_size == way)
        check_shares(evened.take(mine), owner[mine] - way * world_size, quotas, mask, 1)


def check_shares(shares: Slices, owner: Int, quotas: list[int], mask: PackedMask, unit: int) -> None:
    assert np.bincount(owner, shares.size, len(quotas)).tolist() == quotas
    order = np.argsort(shares.start)
    assert (shares.start[order] == np.cumsum(shares.size[order]) - shares.size[order]).all()  # once each
    assert (shares.start % unit == 0).all()
    assert (shares.work == np.rint(10 * slice_tiles(shares, mask))).all()


@pytest.mark.parametrize(
    ("lengths", "most", "received"),
    [
        (np.random.default_rng(0).lognormal(6.5, 1.2, 200).astype(int).tolist(), 1.02, 1.05),
        ([6144] * 85 + [2048], 1.02, 0.8),  # three quarters of a rank's share
        ([600 + i % 7 for i in range(800)], 1.02, 0.1),
        ([64 * 2048], 1.02, 48.0),  # one document: the zigzag's three quarters of all rows
    ],
)
def test_many_ranks_are_balanced_and_receive_little(lengths: list[int], most: float, received: float):
    p = plan(lengths, 64)
    assert p.imbalance <= most
    assert p.recv_rows.mean() <= received * p.order.local_size
    assert p.fill_rows < 64


@pytest.mark.parametrize(
    ("world_size", "lengths"),
    [(64, [65341] * 2 + [350] * 1124), (256, [98304] * 6 + [1536] * 981)],
)
def test_rows_of_tiles_of_long_documents_are_swapped(world_size: int, lengths: list[int]):
    """A row of tiles of the long ones is up to a fifth of a rank's work."""
    assert plan(lengths, world_size).imbalance <= 1.02


@pytest.mark.parametrize(("exchange", "even", "uneven"), [("needed", [1, 8], []), ("a2a+needed", [8], [1])])
def test_what_the_exchange_makes_wait_is_evened_out(exchange: str, even: list[int], uneven: list[int]):
    """Ranks, or nodes where heads are exchanged inside of them: their ranks then share work whoever owns the tokens."""
    documents, mask = Documents.from_lengths([65341] * 2 + [350] * 1124), PackedMask()
    order = lay_out(documents, 64, "balanced", mask, LayoutOptions(ranks_per_node=8, exchange=exchange))
    schedules = {inner: build([documents], [outer_order(order, inner)], mask) for inner in (1, 8)}
    found = {inner: imbalance(load_of(schedule).tiles) for inner, schedule in schedules.items()}
    assert all(found[inner] <= 1.02 for inner in even)
    assert all(found[inner] > 1.02 for inner in uneven)


@pytest.mark.filterwarnings("error")
def test_more_ranks_than_tokens():
    p = plan([0, 1, 7, 3, 1, 0, 2], 24)
    assert sorted(p.order.sizes.tolist()) == [0] * 10 + [1] * 14


def test_documents_stay_in_a_node():
    p = plan([1024] * 256, 64, ranks_per_node=8)
    assert p.recv_rows.sum() == 0
    one_each = plan([8 * 4096] * 8, 64, ranks_per_node=8)
    assert one_each.node_rows.sum() == 0
    assert one_each.imbalance <= 1.01


def test_no_step_loops_over_documents():
    """Calls of Python functions do not grow with the documents, nor much with the ranks."""

    def calls(documents: int, world_size: int) -> int:
        lengths = np.random.default_rng(0).integers(1, 200, documents).tolist()
        profile = cProfile.Profile()
        profile.enable()
        plan(lengths, world_size, ranks_per_node=8)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    few = calls(4000, 64)
    assert calls(16000, 64) < 1.1 * few
    assert calls(16000, 256) < 2 * few
