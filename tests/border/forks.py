"""Ranks as forks of one warm process: each run starts clean, costs milliseconds to start, and a hang is an outcome.

    server (forked once: torch imported, one model compiled) ── fork ──► rank 0
                                                             └─ fork ──► rank 1

A rank that failed stays alive until all have reported, as a trainer does that handles its exception: what the others
wait for never comes, and they are ended as `HANG`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.pool import warm_context

WAIT_S = 60
"""How long ranks may go on when one has failed: those that then still wait for it hang."""
LIMIT_S = 300
"""How long a run may take."""
HANG = "Hang"
_PACKAGE = str(Path(cp.__file__).parent)


@dataclass(frozen=True)
class Failure:
    """Error that a rank raised.

    Args:
        kind: name of the exception's type; HANG for a rank that still waited when another had failed.
        message: its text.
        ours: raised by a line of this project, or noted by one, as every error must be that a user sees.
        reasons: names of the `Reason`s of a refusal.
        wrapped: the refusal reached the caller inside of another exception.
        untraced: torch can't compile the program, with any backend.
        trace: the traceback, to be read.
    """

    kind: str
    message: str
    ours: bool
    reasons: tuple[str, ...] = ()
    wrapped: bool = False
    untraced: bool = False
    trace: str = ""


class Forks:
    """`run(P, fn, *args)` calls `fn(mesh, *args)` on P fresh processes; gives results or Failures by rank."""

    def __init__(self) -> None:
        context = warm_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        self._pipe.send((world_size, fn, args))
        return pickle.loads(self._pipe.recv_bytes())

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.terminate()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)  # no thread may run when a rank is forked off
    warnings.simplefilter("ignore")
    _warm_up()
    gc.disable()  # a collection would copy every page that it looks at
    gc.freeze()
    while True:
        try:
            world_size, fn, args = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            pipe.send_bytes(pickle.dumps(_run(world_size, f"{folder}/store", fn, args)))


def _warm_up() -> None:
    """Import what is imported when first used. Without a backward: a process that ran one can't fork ranks that do."""
    from tests.border.model import TOKENS, Model, pack

    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
    cp.explain(Model(), sharding)(**pack())
    torch._dynamo.reset()


def _run(world_size: int, store: str, fn: Callable[..., Any], args: Any) -> list[Any]:
    release, hold = os.pipe()
    ranks: dict[int, tuple[int, int]] = {}
    """The pipe that a rank reports by -> rank, process."""
    for rank in range(world_size):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(hold)
            _play(rank, world_size, store, fn, args, write, release)
        os.close(write)
        ranks[read] = (rank, pid)
    os.close(release)
    reports: dict[int, Any] = {}
    parts: dict[int, bytes] = dict.fromkeys(ranks, b"")
    end = time.monotonic() + LIMIT_S
    while len(reports) < world_size and (left := end - time.monotonic()) > 0:
        for read in select.select([r for r, (rank, _) in ranks.items() if rank not in reports], [], [], left)[0]:
            part = os.read(read, 1 << 20)
            parts[read] += part
            if not part:
                rank, pid = ranks[read]
                report = reports[rank] = pickle.loads(parts[read]) if parts[read] else _died(pid, _stderr(store, rank))
                end = min(end, time.monotonic() + WAIT_S) if isinstance(report, Failure) else end
    os.close(hold)  # all may go
    for read, (_, pid) in ranks.items():
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lost = Failure(HANG, "it waits", False)
    return [reports.get(rank, lost) for rank in range(world_size)]


def _died(pid: int, stderr: Path) -> Failure:
    """How a process ended that reported nothing, and the last lines it wrote."""
    end = time.monotonic() + 5
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and time.monotonic() < end:
        time.sleep(0.01)
    if ended is None:
        how = "closed its pipe and lives on"
    elif ended.si_code == os.CLD_EXITED:
        how = f"ended with exit code {ended.si_status}"
    else:
        how = f"was ended by {signal.Signals(ended.si_status).name}"
    lines = stderr.read_text(errors="replace").splitlines()[-15:] if stderr.exists() else []
    return Failure("Died", "\n".join([f"the process {how}, without a word", *lines]), False)


def _stderr(store: str, rank: int) -> Path:
    return Path(f"{store}.stderr{rank}")


def _play(rank: int, size: int, store: str, fn: Callable[..., Any], args: Any, write: int, release: int) -> None:
    """One rank, to its end."""
    try:
        os.dup2(os.open(_stderr(store, rank), os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        faulthandler.enable()
        # A fork makes torch's pool of threads anew when first asked for, and several threads that ask at once, as those
        # of a backward where torch knows of GPUs, find none: this one asks before there are others.
        torch.set_num_threads(1)
        wait = timedelta(seconds=2 * LIMIT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
        mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("cp",))
        result = fn(mesh, *args)
        data = pickle.dumps(result)
    except BaseException as error:
        data = pickle.dumps(failure_of(error))
    with os.fdopen(write, "wb") as out:
        out.write(data)
    os.read(release, 1)
    os._exit(0)


def failure_of(error: BaseException) -> Failure:
    """The error as it reached the caller, and what it was made from."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    refusals = [e for e in chain if isinstance(e, cp.RewriteRefused)]
    trace = "".join(traceback.format_exception(error))[-4000:]
    if refusals:
        reasons = tuple(r.reason.name for r in refusals[0].refusals)
        return Failure("RewriteRefused", str(refusals[0]), True, reasons, refusals[0] is not error, False, trace)
    notes = [note for e in chain for note in getattr(e, "__notes__", ()) if note.startswith("cp_rewrite")]
    ours = next((e for e in chain if _raised_here(e)), None)
    kinds = [type(e) for e in chain]
    untraced = kinds[0].__module__.startswith("torch.") and not (ours or notes) and BackendCompilerFailed not in kinds
    message = "\n".join([str(ours or error), *notes])
    return Failure(
        type(ours or chain[-1]).__name__,
        message,
        ours is not None or bool(notes),
        (),
        ours not in (None, error),
        untraced,
        trace,
    )


def _raised_here(error: BaseException) -> bool:
    """True if a `raise` of the project made it, not an assertion or a call of something else."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, AssertionError) or type(error).__module__.startswith("torch."):
        return False  # torch wraps an error under its traceback
    return os.path.realpath(frames[-1].filename).startswith(_ROOTS) and "raise" in (frames[-1].line or "")


_ROOTS = (_PACKAGE, os.path.realpath(f"{_PACKAGE}/passes"))
