"""Memory that torch's allocator gave out on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cp_rewrite.experts import gates
from cp_rewrite.kernels import choices

SLICE = 64
"""Rows."""


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes beside what was held when `run` began, at the worst moment."""
    held, most = 0, 0
    for size in _given(run):
        held += size
        most = max(most, held)
    return most


def largest_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the largest tensor that `run` made."""
    return max(_given(run))


def _given(run: Callable[[], Any]) -> list[int]:
    """Bytes that were given out, in order; what came back is less than 0."""
    with _as_on_gpus(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events: Any = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return [event.nbytes() for event in memory]


@contextmanager
def _as_on_gpus() -> Generator[None]:
    """Without what gloo alone does: sums of shards are made in a copy of the whole, and threads that torch's profiler
    does not see hold tensors for some time behind a call, so that it misses that they are freed. And without what torch
    makes between the rows that come into a kernel of GPUs and those that come out."""
    exchange = dist.all_to_all_single

    def released(received: Tensor, sent: Tensor, *args: Any, **options: Any) -> None:
        counts = [x._use_count() for x in (received, sent)]
        exchange(received, sent, *args, **options)
        end = time.monotonic() + 1
        while [x._use_count() for x in (received, sent)] != counts and time.monotonic() < end:
            time.sleep(1e-4)

    def in_place(output: Tensor, input: Tensor, op: Any, group: Any, async_op: bool = False) -> None:
        assert not async_op
        dist.all_reduce(input, op, group)
        output.copy_(input.view(dist.get_world_size(group), *output.shape)[dist.get_rank(group)])

    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with ExitStack() as patches:
        for module, name, stand_in in (
            (dist, "all_to_all_single", released),
            (dist, scatter, in_place),
            (gates, "_run", partial(_by_slices, gates._run, 2)),
            (choices, "add_listed", partial(_by_slices, choices.add_listed, 1)),
        ):
            patches.enter_context(mock.patch.object(module, name, stand_in))
        yield


def _by_slices(function: Callable[..., Any], whole: int, *given: Any) -> Any:
    """Results of a function of rows, some at a time, so that what it makes between takes next to nothing, as in the one
    kernel that runs on a GPU. The first `whole` of what it is given are no rows, or are read as a whole."""
    rows = given[whole:]
    parts = zip(*(x.split(SLICE) for x in rows), strict=True)
    found: list[Tensor] = []
    for i, part in enumerate(parts):
        each = function(*given[:whole], *part)
        each = [each] if isinstance(each, Tensor) else [*each]
        found = found or [x.new_empty(rows[0].shape[0], *x.shape[1:]) for x in each]
        for out, x in zip(found, each, strict=True):
            out[i * SLICE : i * SLICE + x.shape[0]] = x
    return found[0] if whole == 1 else found
