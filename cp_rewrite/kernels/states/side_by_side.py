"""Kernels compiled side by side, by processes that launch none.

Triton and TileLang compile a kernel when it is first called, and Triton each variant that it tunes when it times that:
one after another, in minutes. So processes go through a run first, each without a launch, and compile every so many
kernels and variants of it into the caches of Triton and TileLang, where the run itself finds them.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any
from unittest import mock

_PROCESSES = 16
"""As many at most: each begins with seconds of imports, and takes half a GB of the GPU."""
_SECONDS = 600
"""Processes that take longer are ended."""


def compile_side_by_side(function: str, *args: object) -> None:
    """Compile what a call launches, for this GPU.

    A process that fails, or takes too long, leaves its kernels to the call itself.

    Args:
        function: `module:name` of what is called. args: for it, pickled.
    """
    count = min(_PROCESSES, len(os.sched_getaffinity(0)))
    program = "from cp_rewrite.kernels.states.side_by_side import compile_share; compile_share()"
    path = os.pathsep.join(filter(None, sys.path))
    running: list[subprocess.Popen[bytes]] = []
    for share in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        running.append(process)
        assert process.stdin is not None
        try:
            with process.stdin as given:
                pickle.dump((function, args, share, count), given)
        except BrokenPipeError:
            continue
    end = time.monotonic() + _SECONDS
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def compile_share() -> None:
    """Compile one of `count` shares of a call's kernels, as standard input tells."""
    function, args, share, count = pickle.load(sys.stdin.buffer)
    module, _, name = function.partition(":")
    call = getattr(import_module(module), name)
    with ExitStack() as stack:
        for replaced in (_of_tilelang(_Share(range(count), share)), _of_triton(_Share(range(count)[::-1], share))):
            for owner, method, function in replaced:
                stack.enter_context(mock.patch.object(owner, method, function))
        call(*args)


class _Share:
    """Of kernels that are asked for one by one, every so many are this process's."""

    def __init__(self, turns: Sequence[int], share: int) -> None:
        self._turns, self._share, self._seen = itertools.cycle(turns), share, set[str]()

    def compile(self, compile: Callable[[], object], *key: object) -> None:
        """Call `compile` if the turn of a kernel that was not asked for yet is this process's; nothing is raised."""
        known = repr(key)
        if known not in self._seen:
            self._seen.add(known)
            if next(self._turns) == self._share:
                with suppress(Exception):  # compilers raise what they like, and some variants are too large
                    compile()


_Replaced = tuple[Any, str, Callable[..., Any]]
"""(class, name of a method, what takes its place)."""


def _of_triton(share: _Share) -> Iterator[_Replaced]:
    """Kernels of Triton, and all variants of those that are tuned, are compiled by shares, and never launched."""
    try:
        tuner = import_module("triton.runtime.autotuner").Autotuner
        kernel = import_module("triton.runtime.jit").JITFunction
    except (ImportError, AttributeError):
        return
    launch = kernel.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool = True, **kwargs: Any) -> None:
        given = [(x.dtype, x.ndim) if hasattr(x, "dtype") else x for x in (*args, *kwargs.values())]
        share.compile(lambda: launch(self, *args, grid=grid, warmup=True, **kwargs), id(self), given, [*kwargs])

    def all_variants(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
        self.nargs = None

    yield kernel, "run", compiled
    yield tuner, "run", all_variants


def _of_tilelang(share: _Share) -> Iterator[_Replaced]:
    """Kernels that functions of TileLang give are compiled by shares, and do nothing when called."""
    try:
        function: Any = import_module("tilelang.jit").JITImpl
    except (ImportError, AttributeError):
        return

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        share.compile(lambda: self.compile(*args, **kwargs), id(self), args, sorted(kwargs.items()))
        return lambda *_, **__: None

    yield function, "__call__", compiled
