"""Gloo processes that live for the whole test session, so that a multi-process case costs milliseconds."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import tempfile
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
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.batch.steps import later

TIMEOUT_S = 540


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
        self._folder = tempfile.TemporaryDirectory()
        context = warm_context()
        self._tasks = [context.Queue() for _ in range(size)]
        self._results: Any = context.Queue()
        store = str(Path(self._folder.name) / "store")
        self._world_size = 0
        self._processes = [
            context.Process(target=_serve, args=(rank, size, store, self._tasks[rank], self._results), daemon=True)
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank; raises AssertionError with the tracebacks when a rank raised."""
        # Ranks of one group must have compiled the same before: sizes that only some have seen show in graphs.
        fresh, self._world_size = world_size > self._world_size, world_size
        for rank in range(world_size):
            self._tasks[rank].put((world_size, fresh, fn, args))
        results: dict[int, Any] = {}
        errors: list[str] = []
        for _ in range(world_size):
            rank, value, error = self._results.get(timeout=TIMEOUT_S)
            results[rank] = value and pickle.loads(value)
            if error:
                errors.append(f"rank {rank}:\n{error}")
        assert not errors, "\n".join(errors)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)  # as in tests/conftest.py
    torch._dynamo.config.recompile_limit = 64  # one model is compiled for many annotations
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=150)
    )
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("cp",)) for n in range(1, size + 1)}
    while True:
        world_size, fresh, fn, args = tasks.get()
        later._batches.clear()  # a rank that failed in the last test noted less than others
        if fresh:
            torch._dynamo.reset()
        try:
            # Pickled here, so that what can't travel fails here and not in the queue's own thread.
            results.put((rank, pickle.dumps(fn(meshes[world_size], *args)), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
