"""A rank that is killed in the middle of a step, or leaves a batch and lives on: the other one names it and ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from cp_rewrite.agree import heartbeat, turns
from tests.end_to_end.test_conformance_gpu import free_port

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
STAGES = ("forward", "exchange", "backward", "gradients")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)

    def forward(self, input_ids: Tensor, doc_ids: Tensor, times: int = 1) -> Tensor:
        x = self.embed(input_ids).unflatten(-1, (2, 16)).transpose(1, 2)
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum() * times


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def step(model: Any, batch: dict[str, Tensor], sharding: cp.Sharding, stage: str | None) -> None:
    if stage == "shard":
        die()
    with sharding.shard(batch) as local:
        if stage == "forward":
            die()
        if stage == "exchange":
            dist.all_to_all_single = die
        if stage == "error":
            raise IndexError("an id that one rank alone has")
        if stage == "wait":
            with suppress(queue.Empty):
                queue.Queue[None]().get(timeout=heartbeat.GRACE_S + 15)
            sys.exit(3)
        loss = model(**local, times=2) if stage == "argument" else model(**local)
    if stage == "backward":
        loss.register_hook(die)
    loss.backward()
    if stage == "gradients":
        dist.all_reduce = die
    cp.sum_gradients(model.parameters(), sharding)
    model.zero_grad()


def train(rank: int, port: int, stage: str) -> None:
    """Two good steps, then one in which rank 1 dies, or leaves the batch while rank 0 waits for no rank."""
    stages = ("wait", "error") if stage == "wait" else (None, stage)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    sharding = cp.Sharding(
        mesh["cp"], {"input_ids": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"), exchange="needed", inner="eager"
    )
    torch.manual_seed(0)
    model = torch.compile(Model(), backend=cp.backend(sharding), fullgraph=True)
    batch = {"input_ids": torch.arange(64)[None] % 16, "doc_ids": torch.arange(64)[None] // 40}
    for number in range(3):
        try:
            step(model, batch, sharding, stages[rank] if number == 2 else None)
        except IndexError:
            time.sleep(300)  # as where something keeps a process that failed from ending
    dist.barrier()


def start(stage: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.batch.test_heartbeat", str(rank), str(port), stage],
            cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_named_and_the_other_ends(stage: str) -> None:
    ranks = start(stage)
    ranks[1].wait(timeout=240)
    died = time.monotonic()
    errors = ranks[0].communicate(timeout=60)[1]
    assert time.monotonic() - died < 60
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode not in (0, None)
    assert "cp_rewrite: rank 1 of the group (" in errors, errors
    assert ") died; rank 0 can't go on without it" in errors, errors


@pytest.mark.slow
def test_a_rank_that_is_killed_while_another_waits_in_shard_is_named_in_seconds() -> None:
    ranks = start("shard")
    ranks[1].wait(timeout=240)
    died = time.monotonic()
    errors = ranks[0].communicate(timeout=60)[1]
    assert time.monotonic() - died < 15  # 2 s to see it; the rest is the end of a process on a loaded machine
    said = [line for line in errors.splitlines() if "RuntimeError: cp_rewrite: " in line]
    assert len(said) == 1, errors
    assert "rank 1 of the group brought no batch (rank 1 died)" in said[0], errors
    assert "may be compiling" not in errors


def end_of_rank_0(stage: str) -> tuple[int | None, str]:
    """(exit code, errors) of rank 0, beside a rank 1 that lives on."""
    ranks = start(stage)
    errors = ranks[0].communicate(timeout=300)[1]
    ranks[1].kill()
    ranks[1].wait()
    return ranks[0].returncode, errors


@pytest.mark.slow
def test_a_rank_that_fails_and_lives_on_is_named_and_the_other_ends() -> None:
    code, errors = end_of_rank_0("error")
    assert code not in (0, None)
    assert ") left a batch: IndexError: an id that one rank alone has; rank 0 can't go on" in errors, errors


@pytest.mark.slow
def test_a_process_that_waits_for_no_rank_lives_on() -> None:
    """The other rank left the batch; this one waits in a queue, as a worker that gets its next task does."""
    code, errors = end_of_rank_0("wait")
    assert code == 3, errors


@pytest.mark.slow
def test_a_rank_that_compiles_anew_is_named_by_all() -> None:
    """Its call has another argument; the other rank waits for it in a collective of the graph that it has."""
    ranks = start("argument")
    for errors in [rank.communicate(timeout=300)[1] for rank in ranks]:
        assert "rank 0 runs a call by a graph that it has, where rank 1 compiles another" in errors
        assert "ranks call the model with other arguments (numbers, flags, strings" in errors
    assert all(rank.returncode not in (0, None) for rank in ranks)


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])


BUSY_AT_EXIT = """
import datetime, sys, time
import torch.distributed as dist
from cp_rewrite.agree import heartbeat, turns

class Slow:
    def __init__(self, store): self.store, self.other = store, store.clone()  # a client takes one call at a time
    def get(self, key): return self.store.get(key)
    def check(self, keys): return self.store.check(keys)
    def set(self, key, value):
        if "/beat/" not in key:
            return self.store.set(key, value)
        print("beats", flush=True)
        self.other.wait(["never"], datetime.timedelta(seconds=1))

class Late:
    def __del__(self, sleep=time.sleep): sleep(2)

sys.late = Late()
heartbeat.PERIOD_S = 0.05
heartbeat.Heartbeat(Slow(dist.TCPStore("localhost", 0, 1, True)), 0, 2).start()
time.sleep(0.3)
"""
"""The thread is inside a store's call when the process ends, and comes back while Python takes itself down."""


def test_a_process_ends_well_while_its_heartbeat_talks_to_the_store() -> None:
    run = subprocess.run([sys.executable, "-c", BUSY_AT_EXIT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "beats" in run.stdout
    assert run.returncode == 0, run.stderr


class Faltering:
    """A store whose answers fail for some beats, as under a load that makes connections late."""

    def __init__(self, failing: int) -> None:
        self.kept, self.failing = dict[str, str](), failing

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value
        self.failing -= "/beat/" in key
        if "/beat/" in key and self.failing >= 0:
            raise dist.DistNetworkError("late")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


@pytest.mark.parametrize("failing", [1, 1000])
def test_a_store_that_is_late_once_is_not_said_to_be_gone(
    failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.05)
    watch = heartbeat.Heartbeat(Faltering(failing), 0, 2)
    watch.start()
    time.sleep(0.5)
    watch._leave()
    assert ("store, most often rank 0, died" in capsys.readouterr().err) == (failing > 1)


class Gone:
    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")


def test_where_the_store_is_gone_the_users_error_stays_and_the_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "store_of", lambda group: Gone())
    sharding: Any = SimpleNamespace(rank=1, world_size=2, group=None, group_name="of this test", check_batches=True)
    turns.fail(sharding, "batch", "no batch: KeyError")  # what raises it goes on
    with pytest.raises(RuntimeError, match=r"holds the group's store.*died; rank 1, which enters sharding.shard"):
        turns.compare(sharding, "batch", "a batch")


def test_a_rank_that_is_still_being_killed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connections close, and this rank's collective fails, before its process is gone."""
    watch = heartbeat.Heartbeat(Faltering(0), 0, 2)
    watch.others[1] = watch.me
    still = iter([True, True, True])
    monkeypatch.setattr(heartbeat, "_runs", lambda process: next(still, False))
    monkeypatch.setattr(sys, "last_value", RuntimeError("gloo: Connection closed by peer"), raising=False)
    watch.start()
    watch._leave()
    assert ") died; rank 0 can't go on without it" in capsys.readouterr().err
