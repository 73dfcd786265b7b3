"""Costs of state layers under a token order: beside measured times and tables, and in plans that weigh them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cp_rewrite as cp
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.planning.cost.states import StatePieces
from cp_rewrite.planning.layouts.by_name import LAYOUTS
from cp_rewrite.planning.states import States, state_tables

QWEN = cp.StateLayers("gated_delta_rule", heads=32, keys=128, values=128, per_attention=3)
ATTENTION: dict[str, Any] = {"heads": (16, 2), "head_dim": 256}


@pytest.mark.parametrize(
    ("layout", "milliseconds"),
    [("balanced", 14.08), ("contiguous", 11.48), ("dual_chunk", 14.04)],
)
def test_one_document_on_two_gpus_takes_what_was_measured(layout: str, milliseconds: float) -> None:
    layers = cp.StateLayers("gated_delta_rule", heads=64, keys=128, values=128, per_attention=1)
    order = cp.plan([32768], 2, layout).order
    seconds = layers.seconds(cp.Documents.from_lengths([32768]), order, DEVICES["h200"], 2)
    assert seconds == pytest.approx(1e-3 * milliseconds, rel=0.05)


@pytest.mark.parametrize(("lengths", "milliseconds"), [((32768,), 7.23), ((11, 700, 32057), 7.01)])
def test_a_selective_scan_on_two_gpus_takes_what_was_measured(lengths: tuple[int, ...], milliseconds: float) -> None:
    layers = cp.StateLayers("selective_scan", heads=8192, keys=16, values=1, per_attention=1)
    order = cp.plan(list(lengths), 2).order
    seconds = layers.seconds(cp.Documents.from_lengths(lengths), order, DEVICES["h200"], 2)
    assert seconds == pytest.approx(1e-3 * milliseconds, rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("ranks", "node"), [(1, 1), (3, 3), (6, 2), (6, 1)])
def test_summaries_are_those_of_the_tables(ranks: int, node: int, resets: bool, layout: str) -> None:
    documents = cp.Documents.from_lengths([300, 1, 7, 120, 0, 1, 64, 512], 1100)
    plan = plan_batch([documents], ranks, layout)
    pieces = StatePieces.of(documents, plan.orders[0], resets)
    for way, found in (("", pieces), ("_back", pieces.back())):
        splits = np.stack([state_tables(plan, States(resets), rank)[f"splits{way}"][1] for rank in range(ranks)])
        near = np.arange(ranks)[:, None] // node == np.arange(ranks)[None] // node
        expected = [np.where(where, splits, 0).sum(1) for where in (near, ~near)]
        assert np.array_equal(found.received(ranks, node), expected)


@pytest.mark.parametrize(("ranks", "tokens", "halves"), [(2, 8192, True), (2, 65536, False), (8, 4096, True)])
def test_a_document_is_cut_once_a_rank_where_states_weigh_more(ranks: int, tokens: int, halves: bool) -> None:
    alone = cp.plan([tokens], ranks, **ATTENTION)
    both = cp.plan([tokens], ranks, states=QWEN, **ATTENTION)
    slices = cp.plan([tokens], ranks, "contiguous", states=QWEN, **ATTENTION)
    assert np.array_equal(alone.rank_of, both.rank_of) != halves
    assert np.array_equal(slices.rank_of, both.rank_of) == halves
    quarters = cp.plan([tokens], ranks, "head_tail", states=QWEN, **ATTENTION)
    assert both.seconds["needed"] <= 1.0001 * min(p.seconds["needed"] for p in (slices, quarters))
    assert both.state_seconds < both.seconds["needed"]
    assert "of them states" in str(both)


def test_ssd_needs_no_passes_of_its_own() -> None:
    layers = cp.StateLayers("ssd", heads=64, keys=128, values=64, per_attention=3)
    one, two = (cp.plan([8192], 2, layout, states=layers).state_seconds for layout in ("contiguous", "head_tail"))
    assert two == pytest.approx(one, rel=0.05)


def test_summaries_over_nodes_are_weighed() -> None:
    documents = cp.Documents.from_lengths([4096])
    order = cp.plan([4096], 4, "contiguous").order
    one, two = (QWEN.seconds(documents, order, DEVICES["h200"], node) for node in (4, 2))
    assert two > one
    weighed, tails = (
        cp.plan([4096], 4, layout, states=QWEN, ranks_per_node=2, **ATTENTION) for layout in ("balanced", "head_tail")
    )
    assert weighed.state_seconds < tails.state_seconds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("delta", 1, 1, 1), "kind must be one of"),
        (("ssd", 0, 1, 1), "heads"),
        (("ssd", 1, 1.5, 1), "keys"),
        (("ssd", 1, 1, 1, 1, 2), "resets"),
    ],
)
def test_what_is_no_layer_is_refused(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        cp.StateLayers(*given)


def test_an_annotation_takes_layers_alone() -> None:
    with pytest.raises(TypeError, match=r"states must be a cp_rewrite\.StateLayers or None"):
        cp.Sharding(2, {"x": 1}, cp.WholeRows(), states=3)  # pyright: ignore[reportArgumentType]
    one, two = (cp.Sharding(2, {"x": 1}, cp.WholeRows(), states=states) for states in (None, QWEN))
    assert one.graph_key == two.graph_key
