"""Ranks that did something else than others since they last compared are named; a late rank is in step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from cp_rewrite.agree import heartbeat
from tests.batch.test_heartbeat import Model
from tests.end_to_end.test_conformance_gpu import free_port

ROOT = Path(__file__).parent.parent.parent
OTHERS = ",".join


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (
            ("c1.1.3,b1.1,gradients", "c1.1.3,gradients"),
            "rank 1 skipped the backward of call 1 of the batch, which rank",
        ),
        (("c1.1.3,batch", "c1.1.3,b1.1"), "rank 0 skipped the backward of call 1 of the batch, which rank 1 runs, and"),
        (("c1.1.3,c1.2.3", "c1.1.3,b1.1"), "rank 0 calls a model again (call 2 of the batch), where rank 1 runs the"),
        (("c1.1.3,batch", "c1.1.3,c1.2.3"), "rank 1 calls a model once more (call 2 of the batch) than rank 0, which"),
        (
            ("c1.1.3,b1.1", "c1.1.4,b1.1"),
            "rank 1 runs another graph in the same call than rank 0: ranks call",
        ),
        (("c1.1.3", "graph"), "rank 0 runs a call by a graph that it has, where rank 1 compiles another"),
        (("c1.1.3,c1.2.3,b1.1", "c1.1.3,c1.2.3,b1.2"), "rank 1 runs the backward of call 2 of the batch, where rank 0"),
        (("c1.1.3", "c1.1.3", "c1.1.3,b1.1", "c1.1.3,batch"), ""),
        (("c1.1.3,b1.1", "c1.1.3"), ""),
        (("c1.1.3,b1.1", ""), ""),
        (("c1.1.3,gradients", "c1.1.3,batch"), ""),
        (("error,c1.1.3,gradients", "c1.1.3,b1.1,batch"), ""),
    ],
)
def test_ranks_part_where_both_did_something(events: tuple[str, ...], says: str) -> None:
    found = heartbeat.difference(dict(enumerate(events)))
    assert found.startswith(says) if says else not found, found


@pytest.fixture
def group() -> Generator[str]:
    yield "of a test"
    del heartbeat._histories["of a test"]


def test_a_rank_in_another_turn_is_compared_by_the_turn_that_both_know(group: str) -> None:
    assert heartbeat.take_turn(group, "batch") == 0
    call = heartbeat.note_call(group, 5)
    assert (call, heartbeat.text(group)) == ("1.1", "1:batch:c1.1.5")
    assert not heartbeat.histories_apart(group, 0, 1, "1:batch:c1.1.5,b1.1"), "this rank is late"
    assert not heartbeat.histories_apart(group, 0, 1, "0::"), "the other one is"
    assert "rank 0 calls a model again" not in heartbeat.histories_apart(group, 0, 1, "1:batch:c1.1.5")
    assert "rank 1 skipped the backward" not in heartbeat.histories_apart(group, 0, 1, "2:c1.1.5,batch:")
    heartbeat.note_backward(group, call)
    assert "rank 1 skipped the backward of call 1" in heartbeat.histories_apart(group, 0, 1, "2:c1.1.5,batch:c2.1.5")
    heartbeat.take_turn(group, "gradients")
    assert heartbeat.ended(group) == "c1.1.5,b1.1,gradients"
    assert "rank 1 calls a model again" in heartbeat.histories_apart(group, 0, 1, "1:batch:c1.1.5,c1.2.5")


def test_what_a_rank_did_that_left_a_batch_with_an_error_is_compared_with_nothing(group: str) -> None:
    heartbeat.note_call(group, 5)
    heartbeat.note_error(group)
    assert not heartbeat.histories_apart(group, 0, 1, "0::c0.1.5,b0.1")
    assert not heartbeat.histories_apart(group, 0, 1, "1:c0.1.5,b0.1,batch:")


class Step:
    """One rank's part of the loops below."""

    def __init__(self, rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        self.sharding = cp.Sharding(
            mesh["cp"], {"input_ids": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"), exchange="needed", inner="eager"
        )
        torch.manual_seed(0)
        self.models: list[nn.Module] = [Model(), Model()]
        self.rank, self.sharded = rank, os.environ.get("FSDP") == "1"
        if self.sharded:
            self.calls: list[Callable[..., Tensor]] = [cp.parallelize(m, mesh, self.sharding) for m in self.models]
        else:
            self.calls = [torch.compile(m, backend=cp.backend(self.sharding), fullgraph=True) for m in self.models]
        weights = [p for model in self.models for p in model.parameters()]
        self.weights, self.optimizer = weights, torch.optim.SGD(weights, 1e-3)

    def run(self, models: str, backward: bool = True) -> None:
        batch = {"input_ids": torch.arange(64)[None] % 16, "doc_ids": torch.arange(64)[None] // 40}
        with self.sharding.shard(batch) as local:
            losses = [self.calls[int(number)](**local) for number in models]
        if backward:
            torch.stack(losses).sum().backward()
        if not self.sharded:
            cp.sum_gradients(self.weights, self.sharding)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


SLIPS: dict[str, Callable[[Step, bool], None]] = {
    "once more": lambda step, odd: step.run("01" + "0" * odd),
    "another model": lambda step, odd: step.run("0" + "1" * odd),
    "no backward": lambda step, odd: step.run("01", not odd),
}
"""The second: what is done where a rank is odd."""


def train(rank: int, port: int, slip: str) -> None:
    """Two good steps, then one in which rank 1 does something else; "late": in which it comes 40 s late."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    step = Step(rank)
    for number in range(4):
        if slip == "late":
            if rank and number == 2:
                hold = time.monotonic() + 40
                while time.monotonic() < hold:
                    torch.linalg.eigvals(torch.eye(900))
            step.run("01")
        elif number < 2:
            step.run("01")
        else:
            SLIPS[slip](step, bool(rank) and number == 2)
    dist.barrier()


def ended(slip: str, fsdp: bool) -> tuple[list[int], list[str], float]:
    """(exit codes, what ranks printed, seconds)"""
    port, start = free_port(), time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.batch.test_history", str(rank), str(port), slip],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "FSDP": str(int(fsdp))},
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], errors, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize(("slip", "fsdp"), [("once more", True), ("another model", True), ("no backward", True)])
def test_a_rank_that_does_something_else_is_named(slip: str, fsdp: bool) -> None:
    codes, errors, seconds = ended(slip, fsdp)
    assert 0 not in codes
    assert seconds < 110
    said = "skipped the backward of call" if slip == "no backward" else "call"
    named = all(said in error and heartbeat.OTHER_STEP in error for error in errors)
    # Where collectives meet by chance with other sizes gloo ends the process itself.
    assert named or any("Is there a distributed collective mismatch" in error for error in errors), errors


@pytest.mark.slow
def test_a_late_rank_is_waited_for() -> None:
    codes, errors, _ = ended("late", False)
    assert codes == [0, 0], errors


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
