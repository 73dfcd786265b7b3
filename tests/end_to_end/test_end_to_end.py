"""Loss and every gradient of a compiled, sharded model on gloo processes against the plain model on one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.planning.cost.devices import DEVICES, Device
from tests.helpers.amount import drawn
from tests.helpers.models import build_model
from tests.helpers.one_process import gradients_of, step_of_ranks
from tests.helpers.pool import Pool
from tests.helpers.tolerances import relative_error

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
LAYOUTS = ("contiguous", "head_tail", "dual_chunk", "balanced")
EXCHANGES = ("all_gather", "needed", "p2p", "a2a")
LIMIT = 1e-5
"""Relative norm error of loss and gradients in fp32."""
any_model = pytest.mark.parametrize("name", ["tiny", pytest.param("llama", marks=pytest.mark.slow)])


def make_batch(lengths: list[list[int]], vocab: int = 64) -> dict[str, Tensor]:
    """(B, T) packed rows; tail padding of shorter rows is a document of its own. The first label of each document is
    ignored, as packing collators do."""
    total = max(1, max(sum(row) for row in lengths))
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)))
    rows = [[*row, total - sum(row)] for row in lengths]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    ids = torch.randint(0, vocab, positions.shape, generator=generator)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


@functools.cache
def compiled_model(name: str, sharding: cp.Sharding) -> tuple[nn.Module, Callable[..., Any]]:
    """Compiled once per process: other lengths, token counts and layouts must not need another graph."""
    model = build_model(name)
    return model, torch.compile(model, backend=cp.backend(sharding), fullgraph=True)


@functools.cache
def grid_mesh(outer: int, inner: int) -> DeviceMesh:
    """Made once per process: every mesh makes process groups."""
    return DeviceMesh("cpu", torch.arange(outer * inner).view(outer, inner), mesh_dim_names=("outer", "inner"))


def sharded_step(
    mesh: DeviceMesh,
    name: str,
    batch: dict[str, Tensor],
    layout: Any,
    exchange: Any,
    inner: Any = "aot_eager",
    grid: bool = False,
    speeds: Any = None,
    **cuts: Any,
) -> tuple[float, dict[str, Tensor]]:
    if grid or exchange.startswith("a2a+"):
        mesh = grid_mesh(2, mesh.size() // 2)
    packing = cp.PositionIds("position_ids")
    sharding = cp.Sharding(mesh, TOKENS, packing, layout, exchange, inner=inner, speeds=speeds)
    model, compiled = compiled_model(name, dataclasses.replace(sharding, layout="contiguous"))
    sharding = dataclasses.replace(sharding, **cuts)
    model.zero_grad()
    with sharding.shard(batch, shift_labels=True) as local:
        loss = compiled(**local).loss
    total, grads = step_of_ranks(model, loss, sharding)
    return total, grads if sharding.rank == 0 else {}


def plain_step(name: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(build_model(name))
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def check(
    pool: Pool, world_size: int, name: str, lengths: list[list[int]], layout: str, exchange: str, **kw: Any
) -> None:
    batch = make_batch(lengths)
    loss, grads = plain_step(name, batch)
    (total, sharded), *others = pool.run(
        world_size, functools.partial(sharded_step, **kw), name, batch, layout, exchange
    )
    assert abs(total - loss) <= LIMIT * abs(loss)
    assert all(other[0] == total for other in others)
    assert sharded.keys() == grads.keys()
    for key, grad in grads.items():
        error = float((sharded[key] - grad).norm() / grad.norm().clamp_min(1e-6))
        assert error <= LIMIT, f"{key}: {error:.1e} {lengths} {layout} {exchange}"


def mostly_slow(*exchanges: str, slow: Sequence[str] = ()) -> list[Any]:
    """All pairs of an exchange and a layout; of each of `exchanges` one is not slow, of another layout each time."""
    quick = {(exchange, LAYOUTS[-1 - i]) for i, exchange in enumerate(exchanges)}
    pairs = itertools.product((*exchanges, *slow), LAYOUTS)
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


# Tests on more ranks come first: where more ranks take part than before, all of them forget what they have compiled.
# The exchange between many ranks is `eager`'s to show, how it is compiled that between two.


@any_model
@pytest.mark.parametrize(("exchange", "layout"), mostly_slow("needed", slow=["p2p", "all_gather", "a2a"]))
def test_four_ranks_match_one_process(pool: Pool, name: str, exchange: str, layout: str) -> None:
    check(pool, 4, name, [[13, 1, 7, 0, 29, 31]], layout, exchange, inner="eager")


@any_model
@pytest.mark.parametrize(("exchange", "layout"), mostly_slow("a2a+needed", slow=["a2a+p2p", "a2a+all_gather"]))
def test_a_grid_of_ranks_matches_one_process(pool: Pool, name: str, exchange: str, layout: str) -> None:
    check(pool, 4, name, [[13, 1, 7, 0, 29, 31]], layout, exchange, inner="eager")


SLOW_LINKS = dataclasses.replace(DEVICES["cpu"], link=1.0)


@any_model
@pytest.mark.slow
@pytest.mark.parametrize("speeds", [None, SLOW_LINKS])
def test_auto_weighs_all_exchanges_of_a_grid(pool: Pool, name: str, speeds: Device | None) -> None:
    """Keys travel between all ranks; where only all-to-alls and rings are fast, heads do."""
    check(pool, 4, name, [[13, 1, 7, 0, 29, 31]], "balanced", "auto", inner="eager", grid=True, speeds=speeds)


@any_model
@pytest.mark.parametrize(
    "exchange", ["a2a+p2p", pytest.param("a2a", marks=pytest.mark.slow), pytest.param("p2p", marks=pytest.mark.slow)]
)
def test_two_rows_under_every_exchange(pool: Pool, name: str, exchange: str) -> None:
    inner = "eager" if name == "tiny" else "aot_eager"
    check(pool, 4, name, [[13, 1, 7, 29], [40, 3]], "dual_chunk", exchange, inner=inner)


@pytest.mark.shared
@any_model
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_match_one_process(pool: Pool, name: str, layout: str, exchange: str) -> None:
    check(pool, 2, name, [[13, 1, 7, 0, 29, 31]], layout, exchange)


@any_model
@pytest.mark.parametrize(("exchange", "layout"), mostly_slow("needed", slow=["p2p"]))
def test_chunks_and_padded_ranks_match_one_process(pool: Pool, name: str, exchange: str, layout: str) -> None:
    check(pool, 2, name, [[16, 8, 24, 32]], layout, exchange, chunk_size=8, pad_to_multiple=16)
    check(pool, 2, name, [[16, 7], [8, 15]], layout, exchange, chunk_size=4, pad_to_multiple=20)


@any_model
@pytest.mark.parametrize(
    "exchange", ["needed", pytest.param("p2p", marks=pytest.mark.slow), pytest.param("a2a", marks=pytest.mark.slow)]
)
def test_inductor_matches_one_process(pool: Pool, name: str, exchange: str) -> None:
    check(pool, 2, name, [[13, 1, 7, 29, 31]], "balanced", exchange, inner="inductor")


@any_model
@drawn(6)
@given(
    lengths=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 7, 13, 31, 64]), min_size=1, max_size=8), min_size=1, max_size=1
    ).filter(lambda rows: sum(rows[0]) >= 16),
    layout=st.sampled_from(LAYOUTS),
    exchange=st.sampled_from(["all_gather", "needed", "p2p", "a2a"]),
)
def test_drawn_lengths_match_one_process(
    pool: Pool, name: str, lengths: list[list[int]], layout: str, exchange: str
) -> None:
    check(pool, 2, name, lengths, layout, exchange)


@any_model
def test_two_rows_pack_their_own_documents(pool: Pool, name: str) -> None:
    check(pool, 2, name, [[13, 1, 7, 29], [40, 3]], "balanced", "needed")


def count_compiles(mesh: DeviceMesh, name: str) -> list[int]:
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), "balanced", "needed", inner="aot_eager")
    torch._dynamo.reset()
    model = build_model(name)
    graphs: list[int] = []

    def counting(gm: Any, inputs: Any) -> Any:
        graphs.append(1)
        return cp.backend(sharding)(gm, inputs)

    compiled = torch.compile(model, backend=counting, fullgraph=True)
    counts: list[int] = []
    for lengths in ([40, 24], [1, 2, 3, 58], [64], [50, 50], [30, 7, 11], [96, 32]):
        with sharding.shard(make_batch([lengths]), shift_labels=True) as local:
            compiled(**local).loss.backward()
        counts.append(len(graphs))
    return counts


@any_model
def test_new_lengths_and_token_counts_do_not_recompile(pool: Pool, name: str) -> None:
    for counts in pool.run(2, count_compiles, name):
        assert counts == [1] * 6


def unshard_gradient(mesh: DeviceMesh, lengths: list[list[int]], layout: Any) -> tuple[Tensor, Tensor]:
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"), layout)
    batch = make_batch(lengths)
    x = torch.randn(*batch["input_ids"].shape, 3, generator=torch.Generator().manual_seed(0))
    with sharding.shard({"x": x, "position_ids": batch["position_ids"]}) as local:
        leaf = local["x"].requires_grad_()
    full = sharding.unshard(leaf * 2, dim=1)
    (grad,) = torch.autograd.grad((full * x).sum(), leaf)
    with sharding.shard({"x": 2 * x, "position_ids": batch["position_ids"]}) as local:
        assert torch.equal(grad, local["x"] * local.has_token[..., None])
    return full.detach(), x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[[13, 1, 7, 29]], [[5, 4], [9, 1, 2]]])
def test_unshard_restores_order_and_cuts_gradients(pool: Pool, layout: str, lengths: list[list[int]]) -> None:
    for full, x in pool.run(3, unshard_gradient, lengths, layout):
        assert relative_error(full, 2 * x) == 0
