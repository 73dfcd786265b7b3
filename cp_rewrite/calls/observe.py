"""Signs of a compile and a run: counters, trace artifacts, NVTX ranges, progress on stderr; and what compile caches key
on.

    TORCH_LOGS="+cp_rewrite"                    each pass with its time and op-count difference (DEBUG)
    torch._dynamo.utils.counters["cp_rewrite"]  graphs, sites, refusals by reason, exchanges, segments
    TORCH_TRACE=folder                          tlparse shows the artifacts cp_rewrite_before, _after, _refused
    nsys profile -t nvtx,cuda                   ranges cp_rewrite::exchange, ::attention, forward and backward
    stderr of rank 0                            what a compile is at (`progress`, `listen`)
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._logging import trace_structured

from cp_rewrite.batch.active import in_batch, last_batch
from cp_rewrite.passes.values.state import State
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import on_compiles


def count(state: State) -> None:
    """Add one graph to `counters["cp_rewrite"]`."""
    mine = counters["cp_rewrite"]
    if state.refusals:
        mine["graphs refused"] += 1
        for refusal in state.refusals:
            mine[f"refused {refusal.reason.name}"] += 1
        return
    mine["graphs rewritten"] += 1
    mine["sites"] += len(state.decisions)
    for decision in state.decisions:
        mine[f"exchange {decision.exchange_name}"] += 1
        mine[f"kernel {decision.kernel}"] += 1


def count_segments(segments: int, compiled: int) -> None:
    """Add the segments that a graph is cut into for FSDP, and how many of them are compiled."""
    counters["cp_rewrite"]["segments"] += segments
    counters["cp_rewrite"]["segments compiled"] += compiled


def trace(name: str, lines: Callable[[], Sequence[str]]) -> None:
    """Hand an artifact to tlparse; `lines` is called only when someone listens."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"cp_rewrite_{name}", "encoding": "string"},
        payload_fn=lambda: "\n".join(lines()),
        expect_trace_id=False,
    )


@functools.cache
def source_hash() -> str:
    """Digest of this package's sources.

    Compile caches key on the rewritten graph. They do not see what our ops do in their backward: after a change of it
    they would hand out old gradients.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    # `passes` and `csrc` are links in a checkout, which `rglob` from their parent would not follow.
    files = [file for folder in (root, root / "passes", root / "csrc") for file in folder.rglob("*")]
    for file in sorted({file for file in files if file.suffix in (".py", ".cu", ".cuh")}):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def cache_key(sharding: Sharding) -> Generator[None]:
    """Compile caches filled inside hold for these sources and this annotation only."""
    config: Any = torch.compiler.config
    annotation = f"{sharding.world_size} {sharding.graph_key[1:]}"  # all but the mesh, whose ranks differ
    tag = hashlib.sha256(f"{source_hash()} {annotation}".encode()).hexdigest()[:16]
    with config.patch(cache_key_tag=f"{config.cache_key_tag}|cp_rewrite:{tag}"):
        yield


_started: dict[str, float] = {}
"""By stage that was begun and not ended: when."""
_backwards = [0, 0]
"""Compiled segments: backwards that were compiled since, and those that are to come."""


@contextmanager
def progress(what: str, part: int = 1, parts: int = 1) -> Generator[None]:
    """Say that `what` goes on, and how long it took. `part` of `parts`: the same stage in turns, which share a line.

    cp_rewrite: capture 14.2 s
    cp_rewrite: proof 5.1 s
    cp_rewrite: compile of segment 7 of 18 …         gone once the last is done: compile of 18 segments 31.0 s
    cp_rewrite: backward of segment 12 of 18 …       compiled when the first backward comes to it
    """
    if not speaks():
        yield
        return
    _begin(what, part, parts)
    try:
        yield
    except BaseException:
        _started.pop(what, None)
        _write("")
        raise
    _end(what, part, parts)
    if what == "compile" and part == parts and torch.is_grad_enabled():
        _backwards[:] = [0, parts]


def speaks() -> bool:
    """True if this process is rank 0, or the only one."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def listen() -> None:
    """Hear of captures and of backwards that torch compiles."""
    on_compiles(_compile_starts, _compile_ends)


def _compile_starts(trigger: str) -> None:
    if not speaks():
        return
    if trigger == "DYNAMO" and in_batch():
        plan = last_batch()
        _pulse.begin(None if plan is None else plan.handed.number)
        _begin("capture", 1, 1)
    elif trigger == "LAZY_BACKWARD" and _backwards[0] < _backwards[1]:
        _backwards[0] += 1
        _pulse.begin()
        _begin("backward", *_backwards)


def _compile_ends(trigger: str) -> None:
    _pulse.end()
    if trigger == "LAZY_BACKWARD" and "backward" in _started:
        _end("backward", *_backwards)
    elif trigger == "DYNAMO" and "capture" in _started:  # of a graph that is not ours
        del _started["capture"]
        _write("")


def _begin(what: str, part: int, parts: int) -> None:
    if "capture" in _started and what != "capture":
        _end("capture", 1, 1)
    _started.setdefault(what, time.perf_counter())
    _write(f"cp_rewrite: {what}{f' of segment {part} of {parts}' if parts > 1 else ''} …")


def _end(what: str, part: int, parts: int) -> None:
    if part < parts:
        _write("")
        return
    seconds = time.perf_counter() - _started.pop(what, time.perf_counter())
    _write(f"cp_rewrite: {what}{f' of {parts} segments' if parts > 1 else ''} {seconds:.1f} s\n")


def _write(text: str) -> None:
    """A line in the place of the one that stands on the terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


PERIOD_S = 10.0
"""Seconds of compiling after which another line is written where no terminal shows the stages."""


class _Pulse:
    """Lines while torch compiles, by a thread that lives no longer. A step's graphs and backwards are one compile.
    Where stderr is no terminal, as in a job's log, a line every ten seconds, and none of what takes less:

        cp_rewrite: compiling … 10 s
        cp_rewrite: compiling … 20 s
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._began, self._before, self._lines, self._batch = 0.0, 0.0, 0, -1

    def begin(self, batch: int | None = None) -> None:
        """`batch`: its number; seconds are counted anew with another one. None: of the batch before."""
        if sys.stderr.isatty():  # which shows the stages
            return
        with self._lock:
            if batch is not None and batch != self._batch:
                self._before, self._lines, self._batch = 0.0, 0, batch
            self._began = time.monotonic()
            self._wait()

    def end(self) -> None:
        """No line is written once this has returned."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._before += time.monotonic() - self._began

    def _wait(self) -> None:
        seconds = self._before + time.monotonic() - self._began
        self._lines = max(self._lines, int(seconds / PERIOD_S))
        self._timer = timer = threading.Timer((self._lines + 1) * PERIOD_S - seconds, lambda: self._beat(timer))
        timer.daemon = True
        timer.start()

    def _beat(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:
                self._lines += 1
                print(f"cp_rewrite: compiling … {self._lines * PERIOD_S:g} s", file=sys.stderr, flush=True)
                self._wait()


_pulse = _Pulse()
