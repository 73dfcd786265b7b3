"""The first step speaks: what a compile is at, on the terminal of rank 0. Without a terminal nothing is written.

cp_rewrite: capture 14.2 s
cp_rewrite: proof 5.1 s
cp_rewrite: compile of segment 7 of 18 …         gone once the last is done: compile of 18 segments 31.0 s
cp_rewrite: backward of segment 12 of 18 …       compiled when the first backward comes to it
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from cp_rewrite.batch.active.current import in_batch
from cp_rewrite.torch_internals import on_compiles

_started: dict[str, float] = {}
"""By stage that was begun and not ended: when."""
_backwards = [0, 0]
"""Compiled segments: backwards that were compiled since, and those that are to come."""


@contextmanager
def progress(what: str, part: int = 1, parts: int = 1) -> Generator[None]:
    """Say that `what` goes on, and how long it took. `part` of `parts`: the same stage in turns, which share a line."""
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
    """True if this process is rank 0, or the only one, and has a terminal."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank == 0 and sys.stderr.isatty()


def listen() -> None:
    """Hear of captures and of backwards that torch compiles."""
    if speaks():
        on_compiles(_compile_starts, _compile_ends)


def _compile_starts(trigger: str) -> None:
    if trigger == "DYNAMO" and in_batch():
        _begin("capture", 1, 1)
    elif trigger == "LAZY_BACKWARD" and _backwards[0] < _backwards[1]:
        _backwards[0] += 1
        _begin("backward", *_backwards)


def _compile_ends(trigger: str) -> None:
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
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
