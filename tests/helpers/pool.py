"""Gloo processes that live for the whole test session, so that a multi-process case costs milliseconds."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.batch import active, steps

TIMEOUT_S = 300
"""The longest that all ranks of a case may take. Collectives that wait for a rank end after half of it."""


def warm_context() -> Any:
    """Processes are forked off from one, for a whole session, that has imported and run what all of them need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.warm"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # so that it finds tests/
        forkserver.ensure_running()
    return context


class Pool:
    """`size` processes; `run(P, fn, *args)` calls `fn(mesh, *args)` on the first P of them and returns P results."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank. Raises AssertionError with the tracebacks when a rank raised; also when one died, or some
        gave nothing in `TIMEOUT_S` seconds. Then the next case gets new processes."""
        # Ranks of one group must have compiled the same before: sizes that only some have seen show in graphs.
        fresh, self._world_size = world_size > self._world_size, world_size
        self._cases += 1
        for rank in range(world_size):
            self._tasks[rank].put((world_size, fresh, self._cases, fn, args))
        results: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < world_size:
            try:
                rank, value, error = self._results.get(timeout=1)
            except queue.Empty:
                self._check_processes({*range(world_size)} - {*results}, deadline, errors)
                continue
            results[rank] = value and pickle.loads(value)
            if error:
                errors.append(f"rank {rank}:\n{error}")
        if errors:  # what a rank has not done any more would fail the next cases, too
            self._renew()
            raise AssertionError("\n".join(errors))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _renew(self) -> None:
        self.close()
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = warm_context()
        self._tasks = [context.Queue() for _ in range(self.size)]
        self._results: Any = context.Queue()
        self._world_size = self._cases = 0
        self._processes = [
            context.Process(
                target=_serve, args=(rank, self.size, self._folder.name, self._tasks[rank], self._results), daemon=True
            )
            for rank in range(self.size)
        ]
        for process in self._processes:
            process.start()

    def _check_processes(self, waited_for: set[int], deadline: float, errors: list[str]) -> None:
        """Start anew, and raise, where one of these ranks can't answer any more or had its time."""
        dead = {rank: code for rank in waited_for if (code := self._processes[rank].exitcode) is not None}
        if not dead and time.monotonic() < deadline:
            return
        ended = [f"rank {rank} ended with exit code {code}" for rank, code in dead.items()]
        stuck = [f"rank {rank} gave nothing:\n{self._stacks(rank)}" for rank in sorted(waited_for - {*dead})]
        self._renew()
        raise AssertionError("\n".join([*errors, *ended, *stuck]))

    def _stacks(self, rank: int) -> str:
        """Stacks of a rank's threads: what each is doing."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return _stacks_file(self._folder.name, rank).read_text()


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks{rank}"


def _serve(rank: int, size: int, folder: str, tasks: Any, results: Any) -> None:
    stacks = _stacks_file(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)  # as in tests/conftest.py
    torch._dynamo.config.recompile_limit = 64  # one model is compiled for many annotations
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("cp",)) for n in range(1, size + 1)}
    while True:
        world_size, fresh, case, fn, args = tasks.get()
        # Torch names a group by how many its process has made: alike here, whatever groups only some ranks made before.
        distributed_c10d._world.group_count = 1000 * case
        steps._batches.clear()  # a rank that failed in the last test noted less than others
        active._noted.sites.clear()  # as in a new process: first batches are planned for usual heads
        if fresh:
            torch._dynamo.reset()
        try:
            # Pickled here, so that what can't travel fails here and not in the queue's own thread.
            results.put((rank, pickle.dumps(fn(meshes[world_size], *args)), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
