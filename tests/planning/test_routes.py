"""The table of routes: it says what their tensors are, and every exchange has its line, and its functions."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.exchange import CARRIERS
from cp_rewrite.planning.names import ExchangeName, split_exchange
from cp_rewrite.planning.plan_input import KERNEL_TABLES
from cp_rewrite.planning.routes.by_exchange import BETWEEN_GPUS, ROUTES
from tests.helpers.packed import make_schedule
from tests.helpers.packs import batches, grown, masks

ONE_TOKEN = [grown(Documents.from_lengths([1]), 0)]


@pytest.mark.parametrize("kind", ROUTES)
@settings(max_examples=20, deadline=None)
@given(batches(), masks(), st.integers(1, 5))
def test_tensors_are_as_the_table_says(
    kind: str, rows: tuple[Documents, ...], mask: PackedMask, world_size: int
) -> None:
    route = ROUTES[kind]
    world_size = 1 if kind == "local" else world_size
    schedule, _ = make_schedule(rows, world_size, "balanced", mask)
    smallest, _ = make_schedule(ONE_TOKEN, world_size, "contiguous", mask)
    tables = KERNEL_TABLES if route.in_steps else ()
    for rank in range(world_size):
        arrays, others = route.arrays(schedule, rank), route.arrays(smallest, rank)
        assert list(arrays) == [tensor.name for tensor in tables + route.tensors]
        for tensor in tables + route.tensors:
            sizes = len(arrays[tensor.name]), len(others[tensor.name])
            # A compiler takes a length of 0 or 1 for one that all batches have.
            assert sizes[0] == sizes[1] if tensor.static else min(sizes) >= 2


def test_every_exchange_has_a_route_and_functions() -> None:
    named = {split_exchange(name)[1] for name in get_args(ExchangeName) if name != "auto"}
    assert named | set(BETWEEN_GPUS.values()) == set(ROUTES)
    for kind, carrier in CARRIERS.items():
        assert callable(carrier.take), kind
        assert callable(carrier.give_back), kind
