"""Batches whose plans a thread makes ahead of time: the same as without, in the same order, errors and states too."""

from __future__ import annotations

import cProfile
import importlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import cp_rewrite as cp
from cp_rewrite import planning
from cp_rewrite.batch import ahead
from cp_rewrite.batch.active import active_plan, site_inputs
from tests.helpers.packed_model import PackedModel
from tests.helpers.pool import Pool

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
PACKS = [(3, 5, 8), (16,), (1, 1, 14), (7, 9), (2, 14), (4, 12)]


def make_sharding(**options: Any) -> cp.Sharding:
    return cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), **options)


def make_batch(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.arange(positions.numel())[None] + 100 * lengths[0]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def _only(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return batches[0]


class Counting:
    """A loader with a state, as StatefulDataLoader has."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.given, self.fails_at = 0, fails_at

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.given < len(PACKS):
            if self.given == self.fails_at:
                raise OSError("a file is gone")
            self.given += 1
            yield make_batch(PACKS[self.given - 1])

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "cp_rewrite plans"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_same_batches_as_without(workers: int) -> None:
    sharding = make_sharding()
    loader: DataLoader[Any] = DataLoader(
        [make_batch(pack) for pack in PACKS],  # pyright: ignore[reportArgumentType]
        batch_size=1,
        collate_fn=_only,
        num_workers=workers,
    )
    seen = 0
    for block, pack in zip(sharding.batches(loader, ahead=2, shift_labels=True), PACKS, strict=True):
        with block as local:
            ahead_of_time = dict(local)
        with sharding.shard(make_batch(pack), shift_labels=True) as local:
            assert local.keys() == ahead_of_time.keys()
            assert all(torch.equal(local[name], ahead_of_time[name]) for name in local)
        seen += 1
    assert seen == len(PACKS)


def test_a_data_set_of_hugging_face_is_a_loader() -> None:
    datasets: Any = importlib.import_module("datasets")
    rows = [{name: x.tolist() for name, x in make_batch(pack).items()} for pack in PACKS]
    loader = datasets.Dataset.from_list(rows).with_format("torch")
    for block, pack in zip(make_sharding().batches(loader), PACKS, strict=True):
        with block as local:
            assert local.plan.rows[0].lengths.tolist() == list(pack)


def test_plans_and_tables_are_made_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def noted(name: str) -> Any:
        plain = getattr(ahead, name)

        def call(*arguments: Any) -> Any:
            made.append((name, threading.current_thread().name))
            return plain(*arguments)

        return call

    for name in ("plan_of", "arrays_of"):
        monkeypatch.setattr(ahead, name, noted(name))
    monkeypatch.setattr("cp_rewrite.batch.shard.plan_of", lambda *_: pytest.fail("planned by the thread that trains"))
    sharding, inputs = make_sharding(), site_inputs(cp.PackedMask(), "needed")
    for block in sharding.batches(Counting(), ahead=1):
        with block:
            tables = [active_plan(sharding).tensor(key) for key in inputs]
            assert all(torch.is_tensor(table) for table in tables)
        time.sleep(0.02)
    assert made.count(("plan_of", "cp_rewrite plans")) == len(PACKS)
    assert made.count(("arrays_of", "cp_rewrite plans")) >= 2 * (len(PACKS) - 3)
    assert {thread for _, thread in made} == {"cp_rewrite plans"}


DOC_TOKENS = {"input_ids": 1, "position_ids": 1, "doc_ids": 1, "labels": 1}
READ = {"local_indices", "local_size", "fill", "padding", "<genexpr>", "bind", "name"}
"""Functions of the planner that only read what is made."""


def make_packed(lengths: tuple[int, ...]) -> dict[str, Any]:
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    batch = {name: x % 19 for name, x in make_batch(lengths).items()}
    return {**batch, "doc_ids": doc_ids, "num_items": torch.tensor(16)}


class FromRankZero:
    """A loader on rank 0, whose batches all ranks get, over a group of its own: it runs in the thread that plans."""

    def __init__(self) -> None:
        self._group = dist.new_group(list(range(2)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for pack in PACKS * 2:
            given: list[Any] = [make_packed(pack) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(given, src=0, group=self._group)
            yield given[0]


def train_profiled(mesh: DeviceMesh, planned_ahead: bool) -> tuple[list[float], set[str]]:
    """(losses of all steps, functions of the planner that the training thread called from the sixth on)."""
    torch._dynamo.reset()
    sharding = cp.Sharding(mesh, DOC_TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    model: Any = torch.compile(PackedModel(), backend=cp.backend(sharding), fullgraph=True)
    profile, losses = cProfile.Profile(), list[float]()
    batches = [make_packed(pack) for pack in PACKS * 2]
    blocks = sharding.batches(FromRankZero()) if planned_ahead else (sharding.shard(batch) for batch in batches)
    for step, block in enumerate(blocks):
        if step == 5:  # two batches and one more were planned before the first step showed which tables are read
            profile.enable()
        with block as local:
            loss = model(**local)
            losses.append(sharding.whole(loss).item())
        loss.backward()
    profile.disable()
    folder = str(Path(planning.__file__).parent)
    codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
    return losses, {code.co_name for code in codes if code.co_filename.startswith(folder)}


def test_the_thread_that_trains_plans_nothing(pool: Pool) -> None:
    """Batches of one rank, that all get; losses are those without."""
    (losses, called), (others, called_too) = pool.run(2, train_profiled, True)
    (expected, without), _ = pool.run(2, train_profiled, False)
    assert losses == others == expected
    assert called <= READ, called - READ
    assert called_too <= READ, called_too - READ
    assert {"plan_batch", "lay_out", "balanced"} <= without


def test_the_state_is_that_of_the_batch_in_training() -> None:
    batches = make_sharding().batches(Counting(), ahead=3)
    assert batches.state_dict() == {"given": 0}
    for number, block in enumerate(batches, 1):
        with block:
            assert batches.state_dict() == {"given": number}
        if number == 2:
            break
    resumed = make_sharding().batches(Counting(), ahead=3)
    resumed.load_state_dict(batches.state_dict())
    with next(iter(resumed)) as local:
        assert int(local["input_ids"][0, 0]) // 100 == PACKS[2][0]


def test_errors_come_out_where_their_batch_is_taken() -> None:
    blocks = iter(make_sharding().batches(Counting(fails_at=3), ahead=2))
    for _ in range(3):
        with next(blocks):
            pass
    with pytest.raises(OSError, match="a file is gone"):
        next(blocks)


def test_a_bad_batch_raises_where_it_is_cut() -> None:
    good, bad = make_batch((4, 4)), {"input_ids": torch.zeros(1, 8)}
    blocks = iter(make_sharding().batches([good, bad], ahead=2))
    with next(blocks):
        pass
    with pytest.raises(KeyError, match="the batch has no such tensor"), next(blocks):
        pass
    blocks.close()  # type: ignore[attr-defined]


def test_a_block_is_entered_once() -> None:
    sharding, batch = make_sharding(), make_batch(PACKS[0])
    taken = list(sharding.batches([batch, batch]))
    again = sharding.shard(batch)
    for block in (*taken, again):
        with block:
            pass
        with pytest.raises(RuntimeError, match="entered before: a batch is cut once"), block:
            pass
    with sharding.shard(batch) as local:  # nothing is left open
        assert local["input_ids"].shape == (1, 8)


def refilled(how: str) -> Iterator[dict[str, Tensor]]:
    """A loader that fills the same memory again for each batch."""
    batch = make_batch(PACKS[0])
    for lengths in PACKS:
        for name, value in make_batch(lengths).items():
            if how == "copied":
                batch[name].copy_(value)
            elif how == "by numpy":
                batch[name].numpy()[:] = value
            else:  # new tensors of the old memory
                batch = {n: x.view_as(x) for n, x in batch.items()}
                batch[name].data.copy_(value)
        yield batch


@pytest.mark.parametrize("how", ["copied", "by numpy", "views"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_loader_that_fills_the_same_tensors_again_is_an_error(how: str, ahead: int) -> None:
    blocks = iter(make_sharding().batches(refilled(how), ahead=ahead))
    first = next(blocks)
    time.sleep(0.3)  # so that the thread has taken all that it may
    with pytest.raises(RuntimeError, match=r"input_ids.*written to after this batch was taken"), first:
        pass
    blocks.close()  # type: ignore[attr-defined]


def test_a_batch_may_come_again() -> None:
    batch = make_batch(PACKS[0])
    with_same_positions = [{**make_batch((n,)), "position_ids": batch["position_ids"]} for n in (16, 16, 16)]
    for block in make_sharding().batches([batch, batch, *with_same_positions, batch], ahead=2):
        with block:
            pass


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="ahead must be >= 1, got 0"):
        make_sharding().batches([], ahead=0)
    with pytest.raises(TypeError, match="the loader, a list, has no state_dict"):
        make_sharding().batches([]).state_dict()
