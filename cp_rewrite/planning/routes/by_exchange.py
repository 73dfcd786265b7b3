"""The routes of all exchanges, and between whom one of them moves rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .gathered import ALL_GATHER, LOCAL
from .needed import NEEDED
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

ExchangeName = Literal["auto", "all_gather", "needed", "p2p", "a2a", "a2a+all_gather", "a2a+needed", "a2a+p2p"]
"""What a user asks for."""

BETWEEN_GPUS = {"needed": "push"}
"""What of that -> what carries it out where all ranks can map each other's memory (one NVLink domain): the same
rows travel, by one-sided writes. Reports name what carries it out."""


@dataclass(frozen=True)
class Exchange:
    """How rows travel, and between whom. Args: kind: one of `ROUTES`. group: name of the process group, "" for one
    rank. world_size: its ranks."""

    kind: str
    group: str
    world_size: int

    @property
    def route(self) -> Route:
        """What its ops read."""
        return ROUTES[self.kind]


def over_part(exchange: str, inner: int) -> str:
    """The name of `a2a+…` where heads are scattered over `inner` ranks, fewer than share a node: `a2a:2+needed`."""
    return exchange.replace("a2a+", f"a2a:{inner}+")


def part_of(exchange: str) -> int | None:
    """The ranks that `over_part` put into a name; None: all that share a node, or the mesh's last dim."""
    scattered = exchange.partition("+")[0]
    return int(scattered.removeprefix("a2a:")) if ":" in scattered else None


def split_exchange(exchange: str) -> tuple[bool, str]:
    """(whether heads are scattered, how keys travel then): `a2a+p2p` is (True, "p2p"), `a2a` (True, "local")."""
    scattered, _, outer = exchange.rpartition("+")
    return (True, "local") if exchange == "a2a" else (bool(scattered), outer)
