"""cp.plan and its command line: balance, traffic, choices, pictures."""

from __future__ import annotations

import pickle
import random
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite.__main__ import main
from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.cost.load import kernel_seconds
from cp_rewrite.planning.layouts import balanced
from cp_rewrite.planning.layouts.options import LayoutOptions
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan import Plan, compare, plan
from tests import AS_SHORT
from tests.helpers.amount import drawn
from tests.helpers.packs import batches, masks

MIXED = [3104, 3200, 1600, 160, 128, 5120, 900, 77, 41, 2054]


def pack(seed: int, tokens: int) -> list[int]:
    """Log-normal lengths, none above a quarter of the pack."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(max(1, min(int(rng.lognormvariate(6.5, 1.2)), tokens // 4, left)))
    return lengths


@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_balanced_is_balanced(seed: int, world_size: int):
    p = plan(pack(seed, world_size * 8192), world_size)
    assert p.imbalance <= 1.02
    assert p.fill_rows == 0
    assert p.recv_fraction[0] <= 0.2
    assert p.order.sizes.tolist() == [8192] * world_size


@pytest.mark.parametrize(
    "mask", [PackedMask(causal=False), PackedMask(window=(1023, 0)), PackedMask(causal=False, window=(512, 512))]
)
def test_balanced_under_other_masks(mask: PackedMask):
    p = plan(pack(1, 65536), 4, mask=mask)
    assert p.imbalance <= 1.03
    assert p.recv_fraction[0] < 0.2


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_one_document_is_cut_in_zigzag(world_size: int):
    p = plan([world_size * 8192], world_size)
    assert p.imbalance == pytest.approx(1.0)
    assert p.recv_fraction[0] == pytest.approx(0.75)
    assert p.pieces.max() == 2


def test_two_documents_stay_in_halves_of_the_ranks():
    p = plan([16384, 16384], 4)
    assert p.imbalance == pytest.approx(1.0)
    assert p.recv_fraction[0] == pytest.approx(0.25)


def test_equal_documents_stay_whole():
    p = plan([512] * 64, 4)
    assert p.recv_rows.tolist() == [0] * 4
    assert p.imbalance == 1.0
    assert p.pieces.tolist() == [16] * 4


def test_over_nodes_heads_inside_and_rows_between_are_weighed():
    p = plan([128 * 1024] * 4, 64, ranks_per_node=8)
    assert p.exchange == "a2a+needed"
    (inside, across), (inside_heads, across_heads) = p.moved_bytes["needed"], p.moved_bytes["a2a+needed"]
    row = 2 * 8 * 128 * 2  # bytes: keys and values, 8 heads of 128, bf16
    assert across == pytest.approx(float(p.node_rows.mean()) * row)
    assert inside == pytest.approx(float((p.recv_rows - p.node_rows).mean()) * row)
    # Each rank has one of 8 key heads, and all rows of other nodes that its node needs.
    assert across_heads == pytest.approx(float(p.places[8].received.sum(1).mean()) * row / 8)
    assert across_heads < across / 4
    # Of 8 ranks' rows 7 in 8 come from others: 8 query heads and a key, a value head; results go back alike.
    assert inside_heads == 8192 * 7 * 2 * (8 + 1) * 128 * 2
    assert "a rank receives" in str(p)
    assert "a2a+needed" not in plan([128 * 1024] * 4, 64).seconds


def test_with_few_key_heads_a_part_of_a_node_is_weighed_too():
    """8 ranks of a node and 2 key heads: over all 8 each key head is there 4 times, and its rows come 4 times."""
    p = plan([128 * 1024] * 4, 64, heads=(64, 2), ranks_per_node=8)
    assert list(p.places) == [8, 2]
    whole, part = p.moved_bytes["a2a+needed"], p.moved_bytes["a2a:2+needed"]
    assert part[1] == pytest.approx(float(p.node_rows.mean()) * p.model.kv_bytes / 2, rel=0.1)
    assert whole[0] != part[0]
    assert p.seconds["a2a:2+needed"] != p.seconds["a2a+needed"]


def test_nodes_keep_documents():
    lengths = pack(3, 16 * 4096)
    near = plan(lengths, 16, ranks_per_node=4)
    assert near.node_rows.sum() < 0.15 * near.recv_rows.sum()  # 12 of 15 other ranks are on other nodes
    assert near.imbalance <= 1.05


@drawn(60)
@given(batches(max_rows=1, max_total=1500), masks(), st.integers(1, 8), st.booleans())
def test_never_dearer_than_a_simple_layout(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, short: bool):
    """`short`: planned as rows of so few tokens are outside of tests."""
    with patch.multiple(balanced, **AS_SHORT) if short else nullcontext():
        ours = plan(rows[0], world_size, "balanced", mask)
    assert ours.order.local_size == -(-rows[0].total // world_size)
    assert (np.bincount(ours.order.rank_of(), minlength=world_size) <= ours.order.local_size).all()
    for layout in LAYOUTS[:3]:
        other = plan(rows[0], world_size, layout, mask)
        if other.order.local_size == ours.order.local_size:
            assert ours.seconds["needed"] <= other.seconds["needed"] * (1 + 1e-9)


def test_no_rank_receives_too_much_where_another_plan_does_with_less():
    """Three documents of a whole share each, and short ones: some plans give one rank 32%."""
    short = [762, 762, 762, 918, 1536, 3072]
    lengths = [8192, 8192, 8192, 184, *short, 32768 - 3 * 8192 - 184 - sum(short)]
    p = plan(lengths, 4)
    assert p.recv_fraction[1] <= 0.3
    assert p.imbalance <= 1.02


def test_chunks_and_padding():
    p = plan([3000, 5200], 2, total=8448, chunk_size=1, pad_to_multiple=128)
    assert p.order.local_size == 4224
    assert p.fill_rows == 0
    p = plan([3072, 5200], 2, chunk_size=1024, pad_to_multiple=1024)
    assert p.order.local_size == 5120
    assert p.fill_rows == 2 * 5120 - 8272
    assert (p.order.segments[0] % 1024 == 0).all()
    assert (p.local_order(0)[-1], p.local_order(1)[-1]).count(-1) >= 1
    rows = (Documents.from_lengths([3072, 5120]), Documents.from_lengths([8192]))
    batch = plan_batch(rows, 2, options=LayoutOptions(512, 1000))
    assert batch.local_size == 5000
    assert all((order.segments[0] % 512 == 0).all() for order in batch.orders)
    assert batch.schedule(PackedMask()).local_rows == 10000


@drawn(60)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 8))
def test_plans_are_deterministic_and_pickle(lengths: list[int], world_size: int):
    lengths = [*lengths, 1]
    first, again = plan(lengths, world_size), plan(list(lengths), world_size)
    copied: Plan = pickle.loads(pickle.dumps(first))
    for other in (again, copied):
        np.testing.assert_array_equal(first.rank_of, other.rank_of)
    assert first.imbalance >= 1.0
    assert first.recv_rows.sum() == first.load.received.sum()
    owned = np.concatenate([first.local_order(rank) for rank in range(world_size)])
    assert sorted(owned[owned >= 0].tolist()) == list(range(sum(lengths)))
    assert (owned < 0).sum() == first.fill_rows < max(world_size, 1)


def test_batch_plan_pads_short_rows_and_pickles():
    rows = (Documents.from_lengths([7, 9]), Documents.from_lengths([16]))
    batch = plan_batch(rows, 2, "dual_chunk")
    assert batch.local_size == 10
    assert batch.local_indices(0).tolist() == [[0, 1, 6, 7, 8, 9, -1, -1, -1, -1], [0, 1, 2, 3, 12, 13, 14, 15, -1, -1]]
    assert batch.local_indices(1).tolist() == [[2, 3, 4, 5, *range(10, 16)], [*range(4, 12), -1, -1]]
    schedule = batch.schedule(PackedMask())
    assert batch.schedule(PackedMask(window=(None, 0))) is schedule
    copied = pickle.loads(pickle.dumps(batch))
    np.testing.assert_array_equal(copied.local_indices(0), batch.local_indices(0))


def test_batch_plan_refuses_ragged_rows():
    with pytest.raises(ValueError, match="at least one row"):
        plan_batch((), 2)
    with pytest.raises(ValueError, match="one length"):
        plan_batch((Documents.from_lengths([3]), Documents.from_lengths([4])), 2)


def test_says_what_it_does():
    p = plan(MIXED, 4)
    text = str(p)
    assert "balanced: 10 documents, 16384 tokens on 4 ranks, same document & causal" in text
    assert len(text.splitlines()) == 3 + 4 + 1
    assert f"imbalance {p.imbalance:.3f}" in text
    assert f"best: {p.exchange}" in text
    table = compare({layout: plan(MIXED, 4, layout) for layout in LAYOUTS})
    assert table.splitlines()[1].startswith("balanced")
    assert p.seconds[p.exchange] > kernel_seconds(p.load.whole_tiles / 4, 0, p.device, p.model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "no token"),
        ({"lengths": [4], "heads": (6, 4)}, "multiple"),
        ({"lengths": [4], "total": 2}, "row has 2"),
        ({"lengths": [4], "ranks_per_node": 3}, "must divide"),
        ({"lengths": [4], "layout": "best"}, "layout must be one of"),
        ({"lengths": [4], "chunk_size": 0}, "chunk_size must be >= 1"),
        ({"lengths": [4], "pad_to_multiple": -1}, "pad_to_multiple must be >= 1"),
        ({"lengths": [3, 5], "chunk_size": 2}, "document 1 starts at token 3"),
        ({"lengths": [6], "chunk_size": 2}, "whole chunks of 2 need 4"),
        ({"lengths": [3.5, 5]}, "lengths must be whole numbers, got float64"),
        ({"lengths": "3,5"}, "lengths must be whole numbers"),
        ({"lengths": [[3, 5], [2, 6]]}, r"lengths must be a list of numbers, got shape \(2, 2\)"),
        ({"lengths": [4], "world_size": "2"}, "world_size must be a whole number, got '2'"),
        ({"lengths": [4], "mask": "causal"}, r"mask must be a cp_rewrite\.PackedMask or None"),
        ({"lengths": [4], "heads": 8}, r"heads must be \(query, key/value\)"),
        ({"lengths": [4], "head_dim": 0}, "head_dim must be >= 1"),
        ({"lengths": Documents.from_lengths([4]), "total": 9}, "total is 9, but the Documents"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        plan(**{"world_size": 2, **arguments})  # type: ignore[arg-type]


def test_command_line_takes_nodes(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "--lengths", "1024,1024,2048", "--world-size", "4", "--layout", "balanced", "--nodes", "2"]
    assert main(words) == 0
    assert "inside its node of 2" in capsys.readouterr().out


def test_command_line_compares_layouts(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    words = ["plan", "--lengths", ",".join(map(str, MIXED)), "--world-size", "4", "--plot", str(picture)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(layout in out for layout in LAYOUTS)
    assert "against" in out
    assert picture.stat().st_size > 10_000


def test_command_line_reads_files_and_masks(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "lengths.txt").write_text("300 200\n524\n")
    words = ["plan", "--lengths", str(tmp_path / "lengths.txt"), "--world-size", "2", "--layout", "contiguous"]
    assert main([*words, "--full", "--window", "64,64", "--device", "cpu"]) == 0
    assert "window (64, 64)" in capsys.readouterr().out
    assert main([*words, "--chunk-size", "100", "--pad-to-multiple", "600"]) == 0
    assert "176 rows of fill" in capsys.readouterr().out


def test_calibrate_checks_its_file_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("cp_rewrite.diagnose.machine.measure", lambda _: pytest.fail("measured for nothing"))
    assert main(["calibrate", "--output", "/no such folder/device.json"]) == 2
    assert "--output must be a file in a folder that there is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "12,x", "--world-size", "2"], "got 'x'"),
        (["--lengths", "12,-3", "--world-size", "2"], "must be >= 0"),
        (["--lengths", "12", "--world-size", "0"], "--world-size must be >= 1"),
        (["--lengths", "12", "--world-size", "2", "--layout", "best"], "layout must be one of"),
        (["--lengths", "12", "--world-size", "2", "--window", "5"], "--window must be two whole numbers"),
        (["--lengths", "12", "--world-size", "2", "--device", "nope"], "device must be one of"),
        (["--lengths", "12", "--world-size", "2", "--heads", "3,2"], "heads must be"),
        (["--lengths", "12", "--world-size", "2", "--nodes", "3"], "--nodes must divide --world-size 2, got 3"),
        (["--lengths", "12", "--world-size", "2", "--nodes", "2", "--ranks-per-node", "1"], "give one of them"),
        (["--lengths", "12", "--world-size", "2", "--chunk-size", "5"], "whole chunks of 5 need 10"),
    ],
)
def test_command_line_errors_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
