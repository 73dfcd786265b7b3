"""The route of rows inside one NVLink domain: what each rank publishes, pulls from its peers, and sends back.

The needed-only exchange without messages: a rank writes the rows that peers read into memory they can all map, and
every rank then reads exactly the rows it needs, each once, straight into its expanded rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .intervals import Int
from .schedule import Schedule

NAMES = (
    "publish_rows", "job_source", "job_ptr", "job_rows", "remote_jobs", "return_rows", "pull_ptr", "pull_rows",
    "capacity",
)  # fmt: skip
"""Names of the route's tensors, in the order in which ops take them. `capacity` stays on the host."""


def pull_route(schedule: Schedule, rank: int) -> dict[str, NDArray[np.integer]]:
    """The tables of one rank. R local rows, E expanded rows; leading dims are at least 2.

    Returns:
        publish_rows (S,) int32: local rows that some peer reads, ascending.
        job_source (U,) int32: each row needed here, once, as owner R + local row: peers' rows first, the peers
            taking turns, then own rows.
        job_ptr (U + 1,), job_rows (E,) int32: the expanded rows that hold it.
        remote_jobs (1,) int32: how many jobs, the first ones, read peers.
        return_rows (W,) int32: expanded rows that belong to peers, ascending.
        pull_ptr (R + 1,) int32, pull_rows int64: who contributes to each local row's gradient, as
            reader << 32 | expanded row of the reader, ascending.
        capacity (1,) int64: E of the rank that has most, the same on all ranks.
    """
    rows = schedule.rows
    gathered = schedule.route("all_gather", rank)
    size = int(schedule.expanded[rank])
    owner = gathered["kv_rows"][:size] // rows
    pulled = schedule.route("pull", rank)
    ptr, contributions = pulled["pull_ptr"].astype(np.int64), pulled["pull_rows"]
    readers = (contributions[: ptr[-1]] >> 32) != rank
    # A row is published when any of its readers is a peer: count peers by row, without a loop.
    peers = np.diff(np.concatenate([[0], np.cumsum(readers)])[ptr])
    source, job_ptr, job_rows = _jobs(gathered["sum_ptr"].astype(np.int64), gathered["sum_rows"], rows, rank)
    remote_jobs = int((source // rows != rank).sum())
    arrays = (
        _index(np.flatnonzero(peers)),
        _index(source),
        _index(job_ptr, last=True),
        _index(job_rows),
        np.array([remote_jobs], dtype=np.int32),
        _index(np.flatnonzero(owner != rank)),
        pulled["pull_ptr"],
        contributions,
        np.array([max(2, int(schedule.expanded.max(initial=0)))], dtype=np.int64),
    )
    return dict(zip(NAMES, arrays, strict=True))


def _jobs(sum_ptr: Int, sum_rows: NDArray[np.integer], rows: int, rank: int) -> tuple[Int, Int, Int]:
    """(source, ptr, expanded rows) of the source rows in use: peers' rows, every peer's spread evenly so that all links
    work all the time and no peer is read by everyone at once, then own rows."""
    counts = np.diff(sum_ptr)
    used = np.flatnonzero(counts)
    owner = used // rows
    per_owner = np.bincount(owner, minlength=1)
    position = np.arange(len(used)) - (np.cumsum(per_owner) - per_owner)[owner]
    order = np.lexsort(((position + 0.5) / np.maximum(per_owner, 1)[owner], owner == rank))
    source = used[order]
    lengths = counts[source]
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    member = np.repeat(sum_ptr[source] - ptr[:-1], lengths) + np.arange(int(ptr[-1]))
    return source, ptr, sum_rows[member].astype(np.int64)


def _index(rows: Int, last: bool = False) -> NDArray[np.int32]:
    """int32, filled up to 2 entries: by the last one (3 for a ptr array, so that it has 2 ranges) or by row 0."""
    missing = (3 if last else 2) - len(rows)
    filling = rows[-1] if last else 0
    return np.concatenate([rows, np.full(max(missing, 0), filling)]).astype(np.int32)
