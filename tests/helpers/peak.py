"""The most memory that torch's allocator held at once on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes beside what was held when `run` began, at the worst moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events: Any = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    held, most = 0, 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
