"""Ranks of a context-parallel group played by threads of this process, on the CPU: no launcher, no network.

    with thread_group(2) as run:
        results = run(step)      # step() in two threads at once, where rank() is 0 and 1

Collectives between the threads go through a list with one slot per rank, and a barrier:

    slots            rank 0's tensor, rank 1's tensor
    all wait         every slot is filled
    each reads       all slots
    all wait         nobody fills a slot again before all have read
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import traceback

from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import finished_work, registered_group

GROUP = "cp_rewrite_threads"
"""The name by which graphs know the group."""
_place = threading.local()
_REDUCE = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}


def rank() -> int:
    """The rank that this thread plays."""
    return getattr(_place, "rank", 0)


@dataclass(frozen=True)
class ThreadSharding(Sharding):
    """A Sharding whose rank is the one that the thread plays."""

    @property
    def rank(self) -> int:
        return rank()

    @property
    def group_name(self) -> str:
        return GROUP

    @staticmethod
    def like(sharding: Sharding) -> ThreadSharding:
        """The same annotation over threads. Of the exchanges they have only what `needed` calls, without a capacity."""
        values: dict[str, Any] = {f.name: getattr(sharding, f.name) for f in fields(Sharding)}
        values.update(
            mesh=sharding.world_size,
            exchange="needed",
            kernel="reference",
            inner="eager",
            verify="first_step",
            capacity=None,
        )
        return ThreadSharding(**values)


class ThreadGroup(dist.ProcessGroup):  # pyright: ignore[reportUntypedBaseClass]
    """The collectives that rewritten graphs and `token_mean` call, between threads."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.barrier_ = threading.Barrier(size, timeout=300)
        self.slots: list[Any] = [None] * size

    def exchange(self, value: Any) -> list[Any]:
        """Every thread's value, in order of ranks."""
        self.slots[rank()] = value
        self.barrier_.wait()
        values = list(self.slots)
        self.barrier_.wait()
        return values

    def alltoall_base(self, output: Tensor, input: Tensor, recv: list[int], send: list[int], opts: Any = None) -> Any:
        parts = self.exchange(input.split(send))
        output.copy_(torch.cat([sent[rank()] for sent in parts]))
        return finished_work(output)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        reduce = _REDUCE[opts.reduceOp.op] if opts is not None else torch.sum
        values = self.exchange([tensor.clone() for tensor in tensors])
        for tensor, *parts in zip(tensors, *values, strict=True):
            tensor.copy_(reduce(torch.stack(parts), 0))
        return finished_work(tensors)

    def getSize(self) -> int:
        return len(self.slots)

    def getRank(self) -> int:
        return rank()

    def getBackendName(self) -> str:
        return "threads"


@contextmanager
def node_that_runs() -> Generator[None]:
    """torch notes for the whole process which node runs, and whether what is traced gets its line: threads that run
    graphs at once would leave one's for good, and later refusals would name it."""
    names = ("current_meta", "current_replay_node", "should_preserve_node_meta", "_should_preserve_node_meta")
    before = {name: getattr(traceback, name) for name in names if hasattr(traceback, name)}
    try:
        yield
    finally:
        vars(traceback).update(before)


@contextmanager
def thread_group(size: int) -> Generator[Callable[[Callable[[], Any]], list[Any]]]:
    """A group of threads: yields `run(fn)`, which calls `fn` in all of them at once and returns its results by rank.

    Where a thread raises, `run` raises that error: the others stop at the barrier.
    """
    group = ThreadGroup(size)

    def play(place: int, fn: Callable[[], Any]) -> Any:
        _place.rank = place
        try:
            return fn()
        except BaseException:
            group.barrier_.abort()  # the others must not wait for this one
            raise

    def run(fn: Callable[[], Any]) -> list[Any]:
        with node_that_runs(), ThreadPoolExecutor(size) as threads:
            futures = [threads.submit(play, place, fn) for place in range(size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        # The first that failed broke the barrier of the others.
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    with registered_group(GROUP, group):
        yield cast(Any, run)
