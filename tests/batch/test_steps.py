"""Slips of training loops that drive ranks apart, or gradients away from those of one process: each is said."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch import steps
from cp_rewrite.capacity import Capacity
from tests.helpers.pool import Pool

TOKENS = {"x": 1, "position_ids": 1}


class Model(nn.Module):
    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))
        self.first, self.second, self.dropped = nn.Linear(4, 8), nn.Linear(8, 1), dropped

    def forward(self, x: Tensor, position_ids: Tensor, cubed: bool = False) -> Tensor:
        h = F.dropout(self.first(x).relu(), self.dropped)
        return (self.second(h) * self.scale * (position_ids[..., None] + 1)).pow(3 if cubed else 2).sum()


class Loop:
    """A model on one rank, and what is done with it in each step."""

    def __init__(self, mesh: DeviceMesh, rate: float = 1e-3, dropped: float = 0.0, fixed: bool = False) -> None:
        random: Any = "per_rank" if dropped else "refused"
        capacity = Capacity(5, 8, 64) if fixed else None
        packing = cp.PositionIds("position_ids")
        self.sharding = cp.Sharding(mesh, TOKENS, packing, inner="eager", random=random, capacity=capacity)
        self.model, self.rank = Model(dropped), mesh.get_local_rank()
        self.compiled = torch.compile(self.model, backend=cp.backend(self.sharding), fullgraph=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate)

    def backward(self, step: int, cubed: bool = False, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        batch = {"x": torch.randn(1, 7, 4, generator=generator), "position_ids": torch.arange(7)[None]}
        with self.sharding.shard(batch) as local:
            loss = self.compiled(**local, cubed=cubed)
        (loss * factor).backward()
        return loss

    def sum(self) -> None:
        cp.sum_gradients(self.model.parameters(), self.sharding)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def forgotten(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()


def partly(loop: Loop, step: int) -> None:
    loop.backward(step)
    cp.sum_gradients(loop.model.second.parameters(), loop.sharding)
    loop.step()


def changed_on_one(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.model.first.bias.add_(loop.rank if step == 2 else 0)
    once(loop, step)


def clipped_before(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.clip()
    loop.sum()
    loop.step()


def clipped_between(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.sum()
    loop.clip()
    loop.sum()
    loop.step()


def each_micro_batch(loop: Loop, step: int) -> None:
    for part in (0, 10):
        loop.backward(step + part)
        loop.sum()
    loop.step()


def shrunk_on_one(loop: Loop, step: int) -> None:
    loop.backward(step)
    for p in loop.model.parameters() if loop.rank else ():
        assert p.grad is not None
        p.grad = p.grad * 0.5 if step % 2 else p.grad.mul_(0.5)
    loop.sum()
    loop.step()


def buffer_on_one(loop: Loop, step: int) -> None:
    loop.model.scale.fill_(1 + (loop.rank if step == 2 else 0))
    once(loop, step)


def scaled_on_one(loop: Loop, step: int) -> None:
    loop.backward(step, factor=1 + loop.rank)
    loop.sum()
    loop.step()


def other_argument(loop: Loop, step: int) -> None:
    """Rank 1 alone passes an argument at step 2; both have a graph for it from step 0."""
    loop.backward(step, cubed=step == 0 or (loop.rank == 1 and step == 2))
    loop.sum()
    loop.step()


def new_argument(loop: Loop, step: int) -> None:
    loop.backward(step, cubed=loop.rank == 1 and step == 2)
    loop.sum()
    loop.step()


def kept(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.sum()
    loop.optimizer.step()


def once(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.sum()
    loop.step()


def twice(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.sum()
    loop.sum()
    loop.step()


def scaled(loop: Loop, step: int) -> None:
    """As loss scaling does, before the sum."""
    loop.backward(step)
    for p in loop.model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5).mul_(2)
    loop.sum()
    loop.step()


def saved(loop: Loop, step: int) -> None:
    """The loss is written to a file with its history, and read."""
    file, loss = io.BytesIO(), loop.backward(step)
    torch.save(loss, file)
    file.seek(0)
    assert torch.equal(torch.load(file), loss)
    loop.sum()
    loop.step()


def skipped(loop: Loop, step: int) -> None:
    """A step of another batch is skipped, on all ranks, and its gradients are filled with zeros."""
    loop.backward(step + 10)
    loop.sum()
    loop.optimizer.zero_grad(set_to_none=False)
    once(loop, step)


def zeroed(loop: Loop, step: int) -> None:
    once(loop, step)
    for p in loop.model.parameters():
        p.grad = torch.zeros_like(p) if step == 0 else p.grad
    loop.optimizer.zero_grad(set_to_none=False)


SLIPS: dict[Callable[[Loop, int], None], str] = {
    forgotten: "differ on ranks [1] from rank 0's",
    partly: "differ on ranks [1] from rank 0's",
    changed_on_one: "differ on ranks [1] from rank 0's",
    clipped_before: "changed between the backward and cp.sum_gradients by other factors",
    clipped_between: "called twice for one backward",
    shrunk_on_one: "changed between the backward and cp.sum_gradients by other factors",
    buffer_on_one: "differ on ranks [1] from rank 0's",
    scaled_on_one: "got another gradient on each rank of the group (1, 2)",
    other_argument: "rank 1 runs another graph in the same call than rank 0",
    new_argument: "ranks call the model with other arguments (numbers, flags",
    kept: "zero gradients after the step",
    each_micro_batch: "adds to gradients that cp.sum_gradients has summed",
}
HARMLESS = (once, twice, scaled, saved, skipped, zeroed)


def slips_on(mesh: DeviceMesh, fixed: bool) -> list[str]:
    found: list[str] = []
    for slip in SLIPS:
        loop, error = Loop(mesh, rate=0.05, fixed=fixed), ""
        try:
            for step in range(5):
                slip(loop, step)
        except RuntimeError as caught:
            error = str(caught)
        found.append(error)
    return found


@pytest.mark.parametrize("fixed", [False, True], ids=["", "in buffers of fixed sizes"])
def test_what_drives_ranks_apart_is_an_error_on_all(pool: Pool, fixed: bool) -> None:
    for found in pool.run(2, slips_on, fixed):
        for (slip, says), error in zip(SLIPS.items(), found, strict=True):
            assert says in error, f"{slip.__name__}: {error}"


def harmless_on(mesh: DeviceMesh, fixed: bool) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in HARMLESS:
            loop = Loop(mesh, fixed=fixed)
            for step in range(4):
                run(loop, step)
            found.append([p.detach() for p in loop.model.parameters()])
    return found


@pytest.mark.parametrize("fixed", [False, True], ids=["", "in buffers of fixed sizes"])
def test_what_is_harmless_trains_as_one_sum_does(pool: Pool, fixed: bool) -> None:
    ran = pool.run(2, harmless_on, fixed)
    for ranks in zip(*ran, strict=True):
        for weight, other in zip(*ranks, strict=True):
            assert torch.equal(weight, other)
    for expected, *others in ran:
        for found in others:
            torch.testing.assert_close(found, expected)


def warned_on(mesh: DeviceMesh, rate: float, dropped: float, apart: int) -> list[str]:
    """Warnings of a loop without a sum of gradients that matters; ranks are seeded `apart`."""
    steps._told.clear()
    steps._batches.clear()
    loop = Loop(mesh, rate, dropped)
    torch.manual_seed(apart * loop.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            (forgotten if rate else once)(loop, step)
    return [str(warning.message) for warning in caught if "cp_rewrite" in str(warning.message)]


@pytest.mark.parametrize(
    ("rate", "dropped", "apart", "says"),
    [
        (1e-7, 0.0, 0, "An optimizer that rounds otherwise on each rank"),
        (0.0, 0.5, 0, "all ranks of the group draw the same random numbers"),
        (0.0, 0.5, 1, None),
    ],
    ids=["small steps", "one seed", "seeds of their own"],
)
def test_what_may_be_meant_is_one_warning(
    pool: Pool, rate: float, dropped: float, apart: int, says: str | None
) -> None:
    for found in pool.run(2, warned_on, rate, dropped, apart):
        assert len(found) == (says is not None)
        if says is not None:
            assert says in found[0]
