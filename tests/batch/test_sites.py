"""Batches are planned for the attention that runs, once a graph is compiled: ranks plan alike, whatever their speed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.active import note_sites, site_now
from cp_rewrite.documents import Documents
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.cost.devices import Model, SiteKind
from cp_rewrite.planning.layouts.options import LayoutOptions
from tests.helpers.packed_model import HEADS, WIDTH, PackedModel
from tests.helpers.pool import Pool

TOKENS = {"input_ids": 1, "position_ids": 1, "doc_ids": 1, "labels": 1}
PACKS = [(23, 122, 25, 51, 35), (25, 100, 35), (90, 17, 149), (133, 11, 16)]
"""Each is laid out in another way for the model's heads than for 64 and 8 of 128."""
OURS = LayoutOptions(model=Model((HEADS, HEADS), WIDTH // HEADS, 4), exchange="needed")
STEPS, AHEAD = 6, 2
FIRST = AHEAD + 2
"""Batches whose plans are asked for before the first graph is compiled: one that trains, one that is taken, those that
wait."""


def make_batch(step: int) -> dict[str, Tensor]:
    lengths = torch.tensor(PACKS[step % len(PACKS)])
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    ids = (7 * torch.arange(doc_ids.numel()) % 19)[None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "doc_ids": doc_ids,
        "labels": (ids + 1) % 19,
        "num_items": torch.tensor(float(ids.numel())),
    }


class Slow:
    """A loader that takes its time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(STEPS):
            time.sleep(self._seconds)
            yield make_batch(step)


def owners(lengths: tuple[int, ...], options: LayoutOptions | None = None) -> list[int]:
    return plan_batch([Documents.from_lengths(lengths)], 2, options=options).orders[0].rank_of().tolist()


Step = tuple[list[int], float, list[float], int]
"""Owners of a batch's tokens, its loss, sums of its gradients, and graphs that were made so far."""


def train(mesh: DeviceMesh, ahead: bool, slow_loader: int) -> list[Step]:
    torch._dynamo.reset()
    counters.clear()
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    module = PackedModel()
    model: Any = torch.compile(module, backend=cp.backend(sharding), fullgraph=True)
    loader, found = Slow(0.05 * (dist.get_rank() == slow_loader)), list[Step]()
    for block in sharding.batches(loader, ahead=AHEAD) if ahead else map(sharding.shard, loader):
        with block as local:
            loss = model(**local)
        loss.backward()
        time.sleep(0.05 * (dist.get_rank() == 1))
        cp.sum_gradients(module.parameters(), sharding)
        owned = local.plan.orders[0].rank_of().tolist()
        gradients = [float(p.grad.abs().sum()) for p in module.parameters()]
        module.zero_grad()
        found.append((owned, sharding.whole(loss).item(), gradients, counters["stats"]["unique_graphs"]))
    return found


def trained_alone() -> list[tuple[float, list[float]]]:
    module, found = PackedModel(), list[tuple[float, list[float]]]()
    for step in range(len(PACKS)):
        loss = module(**make_batch(step))
        loss.backward()
        found.append((loss.item(), [float(p.grad.abs().sum()) for p in module.parameters()]))
        module.zero_grad()
    return found


@pytest.mark.parametrize(("ahead", "first", "slow_loader"), [(True, FIRST, 0), (False, 1, 1)])
def test_ranks_plan_alike_for_the_models_heads(pool: Pool, ahead: bool, first: int, slow_loader: int) -> None:
    """The same losses and gradients, those of one process, before and behind; no graph is made anew."""
    mine, others = pool.run(2, train, ahead, slow_loader)
    alone = trained_alone()
    assert [step[0] for step in mine] == [step[0] for step in others]
    for number, (owned, loss, gradients, graphs) in enumerate(mine):
        lengths = PACKS[number % len(PACKS)]
        usual, ours = owners(lengths), owners(lengths, OURS)
        assert usual != ours
        assert owned == (usual if number < first else ours), number
        assert graphs == mine[0][3]
        expected = alone[number % len(PACKS)]
        assert loss == pytest.approx(expected[0], rel=1e-5)
        np.testing.assert_allclose(gradients, expected[1], rtol=2e-4, atol=1e-6)
    assert len(mine) == STEPS


def train_with_an_error(mesh: DeviceMesh) -> list[list[int]]:
    """Rank 1 leaves the first batch with an error, once the model is compiled."""
    torch._dynamo.reset()
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    model: Any = torch.compile(PackedModel(), backend=cp.backend(sharding), fullgraph=True)
    owned: list[list[int]] = []
    for step in range(2):
        with contextlib.suppress(OSError), sharding.shard(make_batch(step)) as local:
            owned.append(local.plan.orders[0].rank_of().tolist())
            model(**local)
            if step == 0 and sharding.rank == 1:
                raise OSError("a log can't be written")
    return owned


def test_ranks_plan_alike_where_one_left_a_batch(pool: Pool) -> None:
    mine, others = pool.run(2, train_with_an_error)
    assert mine == others == [owners(PACKS[0]), owners(PACKS[1], OURS)]


def test_what_the_annotation_names_wins() -> None:
    site = SiteKind(Model((32, 32), 64, 4), "push")
    for options, heads, head_dim in (
        ({}, (32, 32), 64),
        ({"heads": (8, 2)}, (8, 2), 64),
        ({"head_dim": 16}, (32, 32), 16),
        ({"heads": [8, 2], "head_dim": 16}, (8, 2), 16),
    ):
        sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), **options)  # pyright: ignore[reportArgumentType]
        found = sharding.layout_options(site)
        assert (found.model, found.exchange) == (Model(heads, head_dim, 4), "push")
        usual = sharding.layout_options()
        assert usual.exchange == "auto"
        assert usual.model.heads == (sharding.heads or (64, 8))
        assert usual.model.head_dim == (sharding.head_dim or 128)
    limited = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), capacity=cp.Capacity(4, 8, 64))
    assert limited.layout_options(site) == limited.layout_options()
    assert limited.layout_options().exchange == "needed"


def test_nothing_is_known_of_a_plain_world_size() -> None:
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
    note_sites(sharding, SiteKind(Model(), "needed"), 1)
    assert site_now(sharding) is None


def test_the_graph_with_most_attention_counts(pool: Pool) -> None:
    assert (
        pool.run(2, noted_in_turn) == [["2/2 heads of 8, needed", "4/1 heads of 8, push", "4/1 heads of 8, push"]] * 2
    )


def noted_in_turn(mesh: DeviceMesh) -> list[str]:
    sharding, found = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids")), list[str]()
    assert site_now(sharding) is None
    for heads, exchange, columns in (((2, 2), "needed", 16), ((4, 1), "push", 64), ((8, 8), "needed", 64)):
        note_sites(sharding, SiteKind(Model(heads, 8), exchange), columns)
        found.append(str(site_now(sharding)))
    assert site_now(cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), capacity=cp.Capacity(4, 8, 64))) is None
    return found
