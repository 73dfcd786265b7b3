"""Plans made ahead of time: a thread takes the next batches from a loader and plans them while this one trains.

    thread    batch 1, plan 1 | batch 2, plan 2 | waits         | batch 3, plan 3
    main      step 0                            | cut 1, step 1                   | cut 2, step 2

What is planned: the documents of a batch are read, its plan and, from the second batch on, the tables that the compiled
graphs read are made. Batches are cut, and ranks compared, in the thread that trains, in the loader's order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cp_rewrite.arguments import whole_number
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.routes.route import Arrays
from cp_rewrite.sharding import Sharding

from .active import last_plan
from .active.plan import Place, arrays_of
from .notes import Block
from .shard import plan_of, shard

_SECONDS = 0.05
"""Between two looks at whether the loop has ended, where nothing else happens."""


@dataclass(frozen=True)
class Planned:
    """A batch, or the error that taking or planning it ended with.

    Args:
        batch: as the loader gave it. plan: its plan; arrays: tables of it that graphs asked for before.
        state: of the loader once it gave the batch.
        error: raised where the batch is taken. last: there is no other one.
    """

    batch: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: BatchPlan | None = None
    arrays: Mapping[Place, Arrays] = field(default_factory=dict[Place, Arrays])
    state: Any = None
    error: BaseException | None = None
    last: bool = False


class Batches:
    """Iterates over a loader's batches, each as the block of `Sharding.shard`. Made by `Sharding.batches`."""

    def __init__(self, sharding: Sharding, loader: Iterable[Mapping[str, Any]], ahead: int, how: dict[str, Any]):
        self._sharding, self._loader, self._how = sharding, loader, how
        self._ahead = whole_number("ahead", ahead)
        self._state: Any = _state_of(loader)
        self._places: frozenset[Place] = frozenset()  # of the tables that graphs asked for

    def state_dict(self) -> Any:
        """The loader's `state_dict` as it was once it had given the batch that was taken last: batches that are
        planned already are given again after a resume.

        Raises:
            TypeError: the loader has no `state_dict`.
        """
        if not hasattr(self._loader, "state_dict"):
            raise TypeError(f"the loader, a {type(self._loader).__name__}, has no state_dict")
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Resume the loader; before the loop begins."""
        self._loader.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self._state = state

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Block]:
        ready: queue.Queue[Planned] = queue.Queue(self._ahead)
        ended = threading.Event()
        thread = threading.Thread(target=self._plan_ahead, args=(ready, ended), name="cp_rewrite plans", daemon=True)
        thread.start()
        try:
            while True:
                planned = ready.get()
                if planned.error is not None:
                    raise planned.error
                if planned.last:
                    return
                self._state = planned.state
                cut = shard(self._sharding, planned.batch, planned=planned.plan, arrays=planned.arrays, **self._how)
                yield Block(cut)
                active, rank = last_plan(self._sharding), self._sharding.rank
                if active is not None:  # rank 0's are for compilers' examples
                    self._places |= {place for place in active.arrays if place[2] == rank}
        finally:
            ended.set()
            thread.join()

    def _plan_ahead(self, ready: queue.Queue[Planned], ended: threading.Event) -> None:
        """The thread: batches in the loader's order, until the loop has ended."""
        try:
            for batch in self._loader:
                state = _state_of(self._loader)
                if ended.is_set() or not _put(ready, self._planned(batch, state), ended):
                    return
            _put(ready, Planned(last=True), ended)
        except BaseException as error:  # comes out in the thread that trains
            _put(ready, Planned(error=error), ended)

    def _planned(self, batch: Mapping[str, Any], state: Any) -> Planned:
        try:
            plan = plan_of(self._sharding, batch)
            arrays = {place: arrays_of(self._sharding, plan, place) for place in self._places}
        except Exception:  # raised again by `shard`, which tells the other ranks
            return Planned(batch, state=state)
        return Planned(batch, plan, arrays, state)


def _put(ready: queue.Queue[Planned], planned: Planned, ended: threading.Event) -> bool:
    """Hand over; False where the loop has ended meanwhile."""
    while not ended.is_set():
        try:
            ready.put(planned, timeout=_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def _state_of(loader: Any) -> Any:
    return loader.state_dict() if hasattr(loader, "state_dict") else None
