"""The cost model against counting, and its choices."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.choose_exchange import (
    ExchangeChoice,
    all_to_all_seconds,
    choose_exchange,
    exchange_seconds,
    fill_seconds,
    typical_load,
)
from cp_rewrite.planning.cost.constants import TILE, TILE_ROW_OVERHEAD
from cp_rewrite.planning.cost.devices import DEVICES, Device, Model
from cp_rewrite.planning.cost.load import kernel_seconds, load_of
from cp_rewrite.planning.cost.tiles import SeenKeys, window_tiles
from cp_rewrite.planning.layouts.balanced import Bounds
from cp_rewrite.planning.layouts.share_out import Slices, slice_tiles
from cp_rewrite.planning.layouts.token_order import outer_order
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan import plan
from cp_rewrite.planning.routes.gathered import all_gather_seconds, needed_seconds
from cp_rewrite.planning.routes.grid import outer_schedule
from cp_rewrite.planning.routes.push import push_seconds
from cp_rewrite.planning.routes.ring import ring_seconds
from cp_rewrite.planning.schedule import build
from tests.helpers.packs import batches, masks

H200 = DEVICES["h200"]
ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "cp_rewrite" / "planning" / "cost" / "constants.py"
NO_COST = {"_LOADED_BEYOND"}  # a bound of what kernels load


def numbers(path: Path) -> list[str]:
    """Numbers that a file gives names to, and its fractions."""
    tree = ast.parse(path.read_text())
    given = [(n, n.value) for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None]
    found = [ast.unparse(n) for n, value in given if all(map(is_number, getattr(value, "elts", [value])))]
    return found + [ast.unparse(n) for n in ast.walk(tree) if is_number(n) and not float(ast.unparse(n)).is_integer()]


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


@pytest.mark.parametrize("room", ["cost", "routes"])
def test_tuned_numbers_stand_on_one_page(room: str) -> None:
    assert len(numbers(PAGE)) > 40
    for path in sorted((ROOT / "cp_rewrite" / "planning" / room).glob("*.py")):
        elsewhere = [n for n in numbers(path) if n.split()[0] not in NO_COST]
        assert path == PAGE or not elsewhere, f"{path.name} has numbers of its own: {elsewhere}"


def test_the_page_says_of_each_number_what_it_is_and_what_measures_it() -> None:
    body = ast.parse(PAGE.read_text()).body
    for number, after in zip(body, [*body[1:], body[-1]], strict=True):
        if isinstance(number, ast.Assign):
            said = after if isinstance(after, ast.Expr) else body[body.index(after) + 1]  # of pairs, behind the second
            assert isinstance(said, ast.Expr), ast.unparse(number)
    sections = re.split(r"\n# (?=[A-Z])", PAGE.read_text())[1:]
    for section in sections:
        command = re.search(r"(?:Measured|Shown) by\s`([^`]*)`", section)
        assert command is not None, section[:60]
        files = re.findall(r"examples/bench/\w+\.py", command[1])
        assert all((ROOT / name).exists() for name in files)
        assert files or "cp_rewrite calibrate" in command[1]


def counted_tiles(queries: int, keys: int, left: int, right: int) -> float:
    """Tiles that hold a pair of the window, row of tiles by row of tiles."""
    work = 0.0
    for first in range(0, queries, TILE):
        last = min(first + TILE, queries) - 1
        low = 0 if left < 0 else max(0, first + keys - queries - left)
        high = keys - 1 if right < 0 else min(keys - 1, last + keys - queries + right)
        work += high // TILE - low // TILE + 1 + TILE_ROW_OVERHEAD
    return work


@given(
    st.lists(
        st.tuples(
            st.integers(0, 500),
            st.integers(0, 500),
            st.sampled_from((-1, 0, 7, 127, 200)),
            st.sampled_from((-1, 0, 90, 128)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_window_tiles_are_counted_right(pieces: list[tuple[int, int, int, int]]):
    queries, more, left, right = (np.array(column) for column in zip(*pieces, strict=True))
    wanted = [counted_tiles(n, n + m, le, r) for n, m, le, r in pieces]
    np.testing.assert_allclose(window_tiles(queries, queries + more, left, right), wanted)


@given(batches(max_rows=1), masks())
def test_seen_keys(rows: tuple[Documents, ...], mask: PackedMask):
    docs = Documents.from_lengths([rows[0].total])
    alone = PackedMask(mask.causal, mask.window)
    running = np.append(0, np.cumsum(alone.materialize(docs).sum(1)))
    x = np.arange(docs.total + 1)
    np.testing.assert_array_equal(SeenKeys(alone).of(np.full_like(x, docs.total), x), running)


@given(batches(max_rows=1, max_total=900), masks())
def test_whole_documents_cost_what_one_rank_pays(rows: tuple[Documents, ...], mask: PackedMask):
    slices = Slices.of_row(rows[0], mask)
    one_rank = plan(rows[0], 1, "contiguous", mask)
    np.testing.assert_allclose(slices.work.sum(), one_rank.load.tiles.sum())
    np.testing.assert_allclose(slice_tiles(slices, mask), slices.work)


@given(batches(max_rows=1, max_total=900), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS[:3]))
def test_the_least_load_takes_no_longer(rows: tuple[Documents, ...], mask: PackedMask, nodes: int, layout: str):
    p, bounds = plan(rows[0], 2 * nodes, layout, mask), Bounds(rows[0], mask)
    least = bounds.least_load(p.order)
    assert needed_seconds(least, H200, p.model, 2 * nodes) <= needed_seconds(p.load, H200, p.model, 2 * nodes) + 1e-12
    places, size = outer_order(p.order, 2), 2 * p.order.local_size
    grids = {2: load_of(build(rows, [places], mask, size))}
    found = exchange_seconds(p.load, H200, p.model, 2, grids)
    for name, seconds in exchange_seconds(least, H200, p.model, 2, {2: bounds.least_load(places, size)}).items():
        assert seconds <= found[name] + 1e-12, name


@given(batches(max_rows=1, max_total=300), masks(), st.integers(1, 8), st.sampled_from(LAYOUTS))
def test_most_runs_is_a_bound(rows: tuple[Documents, ...], mask: PackedMask, world_size: int, layout: str):
    p = plan(rows[0], world_size, layout, mask)
    pieces_per_interval = 2 if mask.right else 1  # windows that a document's end clips are cut once more
    assert len(p.schedule.runs.reader) <= pieces_per_interval * Bounds(rows[0], mask).most_runs(p.order)


def test_seconds_are_bytes_over_links_and_flops_over_kernels():
    model = Model((8, 2), 64)
    load = plan([4096], 4, "contiguous", heads=model.heads, head_dim=model.head_dim).load
    device = Device("unit", forward=1.0, backward=np.inf, memory=np.inf, link=np.inf, all_to_all=np.inf,
                    ring=np.inf, node_link=1.0, latency=0.0, node_latency=0.0, launch=0.0)  # fmt: skip
    flops = load.tiles.max() * 4 * TILE * TILE * 64 * 8
    assert needed_seconds(load, device, model, 4) == pytest.approx(flops)
    link = replace(device, forward=np.inf, link=1.0, node_link=np.inf)
    # Keys twice in bf16; their gradients once in fp32: rank 3 receives 3072 rows, rank 0 gives back 3072.
    assert needed_seconds(load, link, model, 4) == pytest.approx((2 * 3072 + 2 * 3072) * model.kv_bytes)
    assert all_gather_seconds(load, link, model, 4) == pytest.approx(4 * 3072 * model.kv_bytes)
    across = replace(link, link=np.inf, node_link=1.0)
    assert needed_seconds(load, across, model, 4) == 0
    assert needed_seconds(load, across, model, 2) == pytest.approx((2 * 2048 + 2 * 2048) * model.kv_bytes)
    assert load.whole_tiles == pytest.approx(load.tiles.sum())
    # A ring: three steps with keys, all but the kernel of none hidden; then three with keys and four with gradients.
    ring = replace(device, forward=np.inf, ring=1.0)
    assert ring_seconds(load, ring, model, 4) == pytest.approx((3 + 9 + 2) * 1024 * model.kv_bytes)
    hidden = replace(ring, forward=1e-3, backward=1e-3)
    kernel = ring_seconds(load, replace(hidden, ring=np.inf), model, 4)
    assert ring_seconds(load, hidden, model, 4) == pytest.approx(kernel + 2 * 1024 * model.kv_bytes)
    # Heads: of 8 query heads a rank gets 2, of 2 key heads one, copied; three quarters of all that travel, both ways.
    heads = replace(device, forward=np.inf, all_to_all=1.0)
    row = (4 * 2 * 2 + 2 * 4 * 1) * model.head_dim * model.item_bytes
    assert all_to_all_seconds(load, heads, model, 4, 4) == pytest.approx(2 * 768 * row)


def test_rows_beyond_an_even_share_are_paid_for_outside_attention():
    model = Model((8, 2), 64)
    device = replace(H200, forward=2.0, backward=1.0)
    load = plan([7], 2, "dual_chunk").load  # 4 and 3 tokens; an even share is 3.5
    assert load.fill == 0.5
    assert fill_seconds(load, device, model) == pytest.approx(0.5 * 24 * 512**2 * (1 / 2 + 2))
    more = exchange_seconds(replace(load, fill=1.5), device, model)
    for name, seconds in exchange_seconds(load, device, model).items():
        assert more[name] - seconds == pytest.approx(24 * 512**2 * 2.5)
    assert plan([4096], 4, "contiguous").load.fill == 0
    assert plan([1000, 3096], 4, pad_to_multiple=1500).load.fill == 1500 - 1024


def test_a2a_needs_heads_that_divide():
    load = plan([4096], 4).load
    assert "a2a" in exchange_seconds(load, H200, Model((8, 2)))
    assert "a2a" not in exchange_seconds(load, H200, Model((6, 2)))


def test_load_counts_extra_launches():
    mask = PackedMask(causal=False, window=(64, 64))
    assert load_of(plan([500, 524], 4, "contiguous", mask).schedule).launches == 2


KEYS = ("all_gather", "needed")
ALL = (*KEYS, "p2p", "a2a")


def choose(model: Model, ranks: int, mask: PackedMask, names: tuple[str, ...] = KEYS) -> ExchangeChoice:
    return choose_exchange(model, typical_load(ranks, mask), H200, names)


def test_choice_by_mask():
    packed = choose(Model(), 4, PackedMask())
    assert packed.exchange == "needed"
    assert "20% of remote rows" in packed.reason
    assert "all_gather" in packed.reason
    full_row = choose(Model(), 4, PackedMask(causal=False, packed=False))
    assert full_row.exchange == "all_gather"
    window = choose(Model(), 8, PackedMask(window=(1023, 0), packed=False))
    assert window.exchange == "needed"
    assert choose(Model(), 1, PackedMask()).exchange == "local"
    assert "against no other that can serve" in choose(Model(), 4, PackedMask(), ("p2p",)).reason


@pytest.mark.parametrize("heads", [(64, 8), (32, 32)])
@pytest.mark.parametrize("mask", [PackedMask(), PackedMask(packed=False)])
def test_rows_that_travel_beside_the_kernel_are_weighed_so(heads: tuple[int, int], mask: PackedMask):
    choice = choose(Model(heads), 4, mask, (*ALL, "push"))
    assert choice.exchange == "push"
    assert all(name in choice.reason for name in ALL)
    load = typical_load(4, mask)
    alone = kernel_seconds(load.tiles.max(), 0, H200, Model(heads))
    pushed, needed = (
        push_seconds(load, H200, Model(heads), load.world_size),
        exchange_seconds(load, H200, Model(heads))["needed"],
    )
    assert alone < pushed < needed
    assert "push" not in exchange_seconds(load, H200, Model(heads), ranks_per_node=2)


@pytest.mark.parametrize(
    ("ranks", "heads", "measured"),
    [  # ms of both directions on H200, 8K tokens a rank; rows that are read in place gain more than the model knows
        (2, (32, 32), {"push": 7.07, "needed": 9.82, "all_gather": 9.55, "p2p": 10.90}),
        (2, (64, 8), {"push": 13.79, "needed": 14.52, "all_gather": 14.32, "p2p": 17.24}),
        (4, (32, 32), {"push": 14.50, "needed": 19.93, "all_gather": 17.83, "p2p": 21.04, "a2a": 14.54}),
        (4, (64, 8), {"push": 25.83, "needed": 26.32, "all_gather": 26.07, "p2p": 32.20, "a2a": 26.03}),
    ],
)
def test_predictions_are_near_what_was_measured(ranks: int, heads: tuple[int, int], measured: dict[str, float]):
    """The row is one document, which all exchanges have to move."""
    load, model = plan([8192 * ranks], ranks).load, Model(heads)
    predicted = exchange_seconds(load, H200, model)
    for name, milliseconds in measured.items():
        assert 1e3 * predicted[name] == pytest.approx(milliseconds, rel=0.12), name
    assert min(measured, key=predicted.__getitem__) == "push"


def test_choice_of_many_ranks_with_few_heads_per_key():
    mha, document = Model((32, 32), 128), PackedMask(packed=False)
    short = typical_load(8, document, 2048)
    seconds = exchange_seconds(short, H200, mha)
    assert set(seconds) == {*ALL, "push"}
    assert min(ALL, key=seconds.__getitem__) == choose_exchange(mha, short, H200, ALL).exchange == "a2a"
    weighed = exchange_seconds(typical_load(8, document), H200, mha)
    assert choose(mha, 8, document, ALL).exchange == min(ALL, key=weighed.__getitem__)


def test_grids_are_weighed_by_the_load_of_their_places():
    """8 ranks in 2 nodes, one document: heads in a node and few keys across take less than all keys across."""
    batch, mha = plan_batch([Documents.from_lengths([65536])], 8), Model((32, 32), 128)
    load, places = load_of(batch.schedule(PackedMask())), load_of(outer_schedule(batch, PackedMask(), 4))
    assert (places.world_size, places.local_rows) == (2, 4 * load.local_rows)
    seconds = exchange_seconds(load, H200, mha, 4, {4: places})
    grids = {f"a2a+{name}" for name in ("all_gather", "needed", "p2p")}
    assert set(seconds) == {*ALL, *grids}
    assert choose_exchange(mha, load, H200, [*ALL, *grids], 4, {4: places}).exchange in {"a2a", *grids}
    # Half of the kernel's work is on each place, and each of its ranks has a quarter of the heads.
    free = replace(H200, memory=np.inf, link=np.inf, all_to_all=np.inf, ring=np.inf, node_link=np.inf, latency=0.0,
                   node_latency=0.0, launch=0.0)  # fmt: skip
    alone = kernel_seconds(places.tiles.max(), 1, free, replace(mha, heads=(8, 8)))
    assert exchange_seconds(load, free, mha, 4, {4: places})["a2a+needed"] == pytest.approx(alone)


def test_devices_are_named_or_measured(tmp_path: Path):
    assert Device.named("h200") is H200
    H200.save(tmp_path / "mine.json")
    assert Device.named(str(tmp_path / "mine.json")) == H200
    with pytest.raises(ValueError, match="h200, h100, a100, cpu, or a file"):
        Device.named("tpu")
    known = {"NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA B200": "h100", None: "cpu"}
    assert {product: Device.like(product).name for product in known} == known


@pytest.mark.parametrize(("lengths", "measured"), [([32768], 648), ([512] * 64, 254)])
def test_tiles_explain_the_speeds_they_were_fitted_to(lengths: list[int], measured: float):
    load = plan(lengths, 1).load
    model = Model()
    useful = sum(length**2 / 2 for length in lengths) * 4 * model.head_dim * model.heads[0]
    seconds = load.tiles.sum() * model.tile_flops / H200.forward
    assert useful / seconds / 1e12 == pytest.approx(measured, rel=0.02)
