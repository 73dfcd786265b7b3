"""The routes of all exchanges, and between whom one of them moves rows."""

from __future__ import annotations

from dataclasses import dataclass

from .gathered import ALL_GATHER, LOCAL, NEEDED
from .push import PUSH
from .ring import RING
from .route import Route

ROUTES: dict[str, Route] = {
    "local": LOCAL,
    "all_gather": ALL_GATHER,
    "needed": NEEDED,
    "push": PUSH,
    "p2p": RING,
}
"""Kind of exchange -> its route. `ops/exchanges/KIND.py` moves rows along it; that of `p2p` is an attention op."""

BETWEEN_GPUS = {"needed": "push"}
"""Kind of exchange -> the kind that carries it out where all ranks can map each other's memory (one NVLink domain): the
same rows travel, by one-sided writes. Reports name what carries it out."""


@dataclass(frozen=True)
class Exchange:
    """How rows travel, and between whom. Args: kind: one of `ROUTES`. group: name of the process group, "" for one
    rank. world_size: its ranks."""

    kind: str
    group: str
    world_size: int

    @property
    def route(self) -> Route:
        """The route of this kind: the tables that its ops read."""
        return ROUTES[self.kind]
