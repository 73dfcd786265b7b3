"""Memory that torch's allocator gave out on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events: Any = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return [event.nbytes() for event in memory]
