"""Which attention plans are made for: that of graphs that all ranks of a group have compiled and compared.

    first batch      planned for what the annotation names, else for usual sizes
    its model call   compiled; all ranks have found their graphs alike, and note how attention runs there
    later batches    planned for that

What a batch is planned for must be the same on all ranks: it is read in the thread that trains, at places of the loop,
however far ahead a batch is planned.
"""

from __future__ import annotations

import threading

from cp_rewrite.planning.cost.devices import SiteKind
from cp_rewrite.sharding import Sharding


class _Noted(threading.local):
    """Of each thread that trains, by what graphs depend on: how most attention runs, and how much that is."""

    def __init__(self) -> None:
        self.sites: dict[object, tuple[SiteKind, int]] = {}


_noted = _Noted()


def note_sites(sharding: Sharding, site: SiteKind, columns: int) -> None:
    """Have later batches planned for a site that has so many columns of queries in a graph, unless one that was noted
    before has as many. All ranks do so between the same batches."""
    known = _noted.sites.get(sharding.graph_key)
    if known is None or columns > known[1]:
        _noted.sites[sharding.graph_key] = site, columns


def site_now(sharding: Sharding) -> SiteKind | None:
    """What a batch is planned for whose plan is asked for now, by the thread that trains. None: it is not known.

    The ranks of a plain world size compare no graphs.
    """
    if isinstance(sharding.mesh, int):
        return None
    known = _noted.sites.get(sharding.graph_key)
    return None if known is None else known[0]
