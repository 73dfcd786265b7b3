"""Each case in processes of its own, a rank each, so that a crash or a hang is an outcome."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from .cases import Case
from .trial import Outcome, Trial


def forkserver() -> Any:
    """Forks processes off one that has imported what all need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.warm"])
    return context


class Running:
    """The processes of a case, one for each rank of its trial."""

    def __init__(self, context: Any, trial: type[Trial], case: Case, limit_s: float) -> None:
        self.case, self.limit_s, self.started = case, limit_s, time.monotonic()
        self.alone: float | None = None  # when rank 0 ended
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # so that the server finds tests/
            self.processes = [
                context.Process(target=serve, args=(trial, case, rank, str(path), limit_s), daemon=True)
                for rank in range(trial.ranks)
            ]
            for process in self.processes:
                process.start()

    def outcome(self) -> Outcome | None:
        """None: not over yet."""
        path = Path(self.folder.name)
        over = time.monotonic() - self.started > self.limit_s
        results = [path / f"out{rank}" for rank in range(len(self.processes))]
        ended = [not process.is_alive() for process in self.processes]
        found = [Outcome(**json.loads(file.read_text())) if file.exists() else None for file in results]
        first = found[0]
        waits = first is not None and first.verdict in ("right", "different", "crashed") and not all(ended[1:])
        if waits and self.alone is None:
            self.alone = time.monotonic()
        alone = 0.0 if self.alone is None else time.monotonic() - self.alone
        if first is not None and (not waits or over or alone > 20):
            return self.close(self.joined(first, found[1:]))
        if all(ended) or over:
            verdict = "hung" if over else "crashed"
            codes = [process.exitcode for process in self.processes]
            texts = [f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(path.glob("*[01].txt"))]
            why = [f"exit codes {codes}", *texts]
            return self.close(Outcome(**asdict(self.case), verdict=verdict, why=why))
        return None

    @staticmethod
    def joined(first: Outcome, others: Sequence[Outcome | None]) -> Outcome:
        """Rank 0's, or another's where that is worse."""
        for rank, other in enumerate(others, 1):
            if first.verdict == "right" and (other is None or other.verdict != "right"):
                return other or replace(first, verdict="crashed", why=[f"rank {rank} ended without a word"])
        return first

    def close(self, outcome: Outcome) -> Outcome:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
        return replace(outcome, seconds=round(time.monotonic() - self.started, 1))


def serve(trial: type[Trial], case: Case, rank: int, folder: str, limit_s: float) -> None:
    """A rank's process: what it is at goes into files of `folder`, at last what became of it."""
    torch.set_num_threads(1)
    path = Path(folder)
    stack = (path / f"stack{rank}.txt").open("w")
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(limit_s - 2, file=stack)

    @functools.cache
    def mesh() -> DeviceMesh:
        method, timeout = f"file://{path / 'store'}", timedelta(seconds=limit_s)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=trial.ranks, timeout=timeout)
        return DeviceMesh("cpu", list(range(trial.ranks)), mesh_dim_names=("cp",))

    def stage(word: str) -> None:
        (path / f"stage{rank}.txt").write_text(word)

    outcome = trial(case, rank, mesh, stage).run()
    (path / f"new{rank}").write_text(json.dumps(asdict(outcome)))
    (path / f"new{rank}").rename(path / f"out{rank}")
    os._exit(0)  # not by way of the group's destructors


def sweep(
    cases: Sequence[Case],
    workers: int,
    limit_s: float,
    ends: float,
    done: Callable[[Outcome], None],
    trial: type[Trial] = Trial,
) -> None:
    """Try all, `workers` at a time, until the clock says `ends`; each outcome is given to `done`.

    A model that is not right is tried in other ways (`Trial.next_try`), where the trial has some.
    """
    context, left, running = forkserver(), [*reversed(cases)], list[Running]()
    while (left or running) and time.monotonic() < ends:
        while left and len(running) < workers:
            running.append(Running(context, trial, left.pop(), limit_s))
        for one in list(running):
            outcome = one.outcome()
            if outcome is not None:
                running.remove(one)
                done(outcome)
                left += trial.next_try(one.case, outcome)
        time.sleep(0.05)
    for one in running:
        one.close(Outcome(**asdict(one.case)))
