"""Plans made ahead of time: a thread takes the next batches from a loader and plans them while this one trains.

    thread    batch 1, plan 1 | batch 2, plan 2 | waits         | batch 3, plan 3
    main      step 0                            | cut 1, step 1                   | cut 2, step 2

Ahead, the rows of ranks are joined (`rows="own"`), the documents of a batch are read, its plan and, from the
second batch on, the tables that the compiled graphs read are made. Batches are cut, and ranks compared, in the thread
that trains, in the loader's order. That thread also says what each batch is planned for, when it takes the batch
`ahead` + 1 places before: so this does not depend on how fast threads are, and is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cp_rewrite.agree.turns import talks
from cp_rewrite.arguments import whole_number
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.cost.devices import SiteKind
from cp_rewrite.planning.routes.route import Arrays
from cp_rewrite.sharding import Sharding

from .active import Place, arrays_of, last_plan, site_now
from .marks import marks_of
from .notes import Block
from .own_rows import Given, hosts_of, join_rows
from .shard import given_to_all, plan_of, shard

_SECONDS = 0.05
"""Between two looks at whether the loop has ended, where nothing else happens."""


@dataclass(frozen=True)
class Planned:
    """A batch, or the error that taking or planning it ended with.

    Args:
        given: as the loader gave it, or joined of what all ranks' loaders gave. site: what it is planned for. plan:
            its plan; arrays: tables of it that graphs asked for before.
        state: of the loader once it gave the batch.
        error: raised where the batch is taken. last: there is no other one.
    """

    given: Given = field(default_factory=lambda: Given({}))
    site: SiteKind | None = None
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
        self._hosts: Any = None  # by which hosts exchange rows, where each rank has its own

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
        own = self._sharding.rows == "own" and talks(self._sharding)
        if own and self._hosts is None:
            self._hosts = hosts_of(self._sharding)
        ready: queue.Queue[Planned] = queue.Queue()
        ended, may_take = threading.Event(), queue.Queue[SiteKind | None]()
        for _ in range(self._ahead + 1):
            may_take.put(site_now(self._sharding))
        arguments = (ready, ended, may_take, own)
        thread = threading.Thread(target=self._plan_ahead, args=arguments, name="cp_rewrite plans", daemon=True)
        thread.start()
        try:
            while True:
                planned = ready.get()
                may_take.put(site_now(self._sharding))
                if planned.error is not None:
                    raise planned.error
                if planned.last:
                    return
                self._state = planned.state
                made: Any = {
                    "given": planned.given,
                    "site": planned.site,
                    "planned": planned.plan,
                    "arrays": planned.arrays,
                }
                yield Block(shard(self._sharding, planned.given.batch, **made, **self._how))
                active, rank = last_plan(self._sharding), self._sharding.rank
                if active is not None:  # rank 0's are for compilers' examples
                    self._places |= {place for place in active.arrays if place[2] == rank}
        finally:
            ended.set()
            thread.join()

    def _plan_ahead(
        self, ready: queue.Queue[Planned], ended: threading.Event, may_take: queue.Queue[SiteKind | None], own: bool
    ) -> None:
        """The thread: batches in the loader's order, until the loop has ended.

        Ranks join rows together (`own`): each of them joins as many batches as the loop lets it, also where it has
        ended meanwhile, for the others may wait for these rows.
        """
        taken = iter(self._taken(own))
        while True:
            try:
                site = may_take.get(timeout=_SECONDS)
            except queue.Empty:
                if ended.is_set():
                    return
                continue
            if ended.is_set() and not own:
                return
            try:
                given, state = next(taken)
                ready.put(self._planned(given, state, site))
            except StopIteration:
                ready.put(Planned(last=True))
                return
            except BaseException as error:  # comes out in the thread that trains
                ready.put(Planned(error=error))
                return

    def _taken(self, own: bool) -> Iterator[tuple[Given, Any]]:
        """The group's batches, and the loader's state behind each."""
        if not own:
            for batch in self._loader:
                yield given_to_all(self._sharding, batch), _state_of(self._loader)
            return
        rows = iter(self._loader)
        while (given := self._joined(rows)) is not None:
            yield given, _state_of(self._loader)

    def _joined(self, rows: Iterator[Mapping[str, Any]]) -> Given | None:
        """The next rows of all ranks. A rank whose loader has ended has none while those of others go on."""
        batch, failed = None, None
        try:
            batch = next(rows, None)
        except BaseException as error:
            failed = error
        return join_rows(self._sharding, batch, self._hosts, failed)

    def _planned(self, given: Given, state: Any, site: SiteKind | None) -> Planned:
        given = replace(given, marks=marks_of(given.batch))
        try:
            plan = plan_of(self._sharding, given, site)
            plan.local_indices(self._sharding.rank)  # made here, it is only read where the batch is cut
            arrays = {place: arrays_of(self._sharding, plan, place) for place in self._places}
        except Exception:  # raised again by `shard`, which tells the other ranks
            return Planned(given, site, state=state)
        return Planned(given, site, plan, arrays, state)


def _state_of(loader: Any) -> Any:
    return loader.state_dict() if hasattr(loader, "state_dict") else None
