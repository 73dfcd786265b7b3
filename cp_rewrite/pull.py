"""The route of rows inside one NVLink domain: what each rank publishes, pulls from its peers, and sends back.

The needed-only exchange without messages: a rank writes the rows that peers read into memory they can all map, and
every rank then reads exactly the rows it needs, each once, straight into its expanded rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost import Device, Model
from .intervals import Int
from .schedule import Schedule
from .tiles import TILE

NAMES = (
    "publish_rows", "job_source", "job_ptr", "job_rows", "remote_jobs", "early_jobs", "stages", "rest_cu_seqlens_q",
    "rest_cu_seqlens_k", "return_rows", "pull_ptr", "pull_rows", "capacity",
)  # fmt: skip
"""Names of the route's tensors, in the order in which ops take them. `stages` and `capacity` stay on the host."""

_DEVICE, _MODEL = Device.named("h200"), Model()
_ROWS_PER_PAIR = _MODEL.tile_flops / TILE**2 / _DEVICE.forward / (_MODEL.kv_bytes / _DEVICE.link)
"""Rows that arrive while the kernel works on one pair of query and key. Only speed depends on it."""
_WORTH = 1024
"""Rows that must arrive beside work, or all come first: two launches cost more than one."""


def pull_route(schedule: Schedule, rank: int) -> dict[str, NDArray[np.integer]]:
    """The tables of one rank. R local rows, E expanded rows, N entries of launch 0; leading dims are at least 2.

    Returns:
        publish_rows (S,) int32: local rows that some peer reads, ascending.
        job_source (U,) int32: each row needed here, once, as owner R + local row: peers' rows first, those that early
            entries read before the others, the peers taking turns; then own rows.
        job_ptr (U + 1,), job_rows (E,) int32: the expanded rows that hold it.
        remote_jobs (1,) int32: how many jobs, the first ones, read peers; early_jobs (1,): those for early entries.
        stages (4,) int64: n, rows, keys, early: the kernel runs over the first n entries, with their query rows and
            expanded rows, and over the rest: over part `early` (0 or 1) while the other one's rows arrive. n = 0: all
            rows come first; n = -1: none comes from a peer.
        rest_cu_seqlens_q, rest_cu_seqlens_k (N - n + 1,) int32: running sums over the rest, from 0.
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
    members = gathered["sum_rows"][:size].astype(np.int64)
    needed = _Needed.of(gathered["sum_ptr"].astype(np.int64), rows, rank)
    tables = schedule.attention(rank)
    stages, reads_early = _cut(tables, needed, members)
    n, queries, keys = max(int(stages[0]), 0), int(stages[1]), int(stages[2])
    stage = np.where(needed.remote, np.where(reads_early, 0, 1), 2)
    source, job_ptr, job_rows = _jobs(needed, members, rows, stage)
    arrays = (
        _index(np.flatnonzero(peers)),
        _index(source),
        _index(job_ptr, last=True),
        _index(job_rows),
        np.array([(stage < 2).sum()], dtype=np.int32),
        np.array([(stage < 1).sum()], dtype=np.int32),
        stages,
        tables["cu_seqlens_q"][n:] - queries,
        tables["cu_seqlens_k"][n:] - keys,
        _index(np.flatnonzero(owner != rank)),
        pulled["pull_ptr"],
        contributions,
        np.array([max(2, int(schedule.expanded.max(initial=0)))], dtype=np.int64),
    )
    return dict(zip(NAMES, arrays, strict=True))


@dataclass(frozen=True, eq=False)
class _Needed:
    """The source rows that a rank reads, each once, ascending. Args: source: owner R + local row. remote: a peer's.
    start, count: of its expanded rows, in the list of all by source."""

    source: Int
    remote: NDArray[np.bool_]
    start: Int
    count: Int

    @classmethod
    def of(cls, sum_ptr: Int, rows: int, rank: int) -> _Needed:
        counts = np.diff(sum_ptr)
        source = np.flatnonzero(counts)
        return cls(source, source // rows != rank, sum_ptr[source], counts[source])


def _cut(tables: dict[str, NDArray[np.integer]], needed: _Needed, members: Int) -> tuple[Int, NDArray[np.bool_]]:
    """(stages of `pull_route`, which of the needed rows the early part reads): the cut that lets most rows arrive
    beside work, as many as the early part has work for and does not read itself."""
    nowhere = np.zeros(4, dtype=np.int64), np.zeros(len(needed.source), dtype=np.bool_)
    if not needed.remote.any():
        return np.array([-1, 0, 0, 0]), nowhere[1]
    queries, keys = (np.diff(tables[name]).astype(np.int64) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    if (tables["pieces"][:, 6] > 0).any() or len(queries) < 2:
        return nowhere
    entry = np.repeat(np.arange(len(keys)), keys)[members]
    first, last = np.minimum.reduceat(entry, needed.start), np.maximum.reduceat(entry, needed.start)
    total = int(needed.remote.sum())
    # With n = 1, 2, … entries before the cut: work there, rows that they read, rows that nobody else reads.
    work = np.cumsum(queries * keys - queries**2 / 2) * _ROWS_PER_PAIR
    read, own = (np.bincount(ends[needed.remote], minlength=len(keys)).cumsum()[:-1] for ends in (first, last))
    beside = np.stack([np.minimum(work[:-1], total - read), np.minimum(work[-1] - work[:-1], own)])
    early, n = divmod(int(beside.argmax()), len(keys) - 1)
    if beside[early, n] < _WORTH:
        return nowhere
    n += 1
    stages = np.array([n, queries[:n].sum(), keys[:n].sum(), early])
    return stages, last >= n if early else first < n


def _jobs(needed: _Needed, members: Int, rows: int, stage: Int) -> tuple[Int, Int, Int]:
    """(source, ptr, expanded rows) of the needed rows by stage. In each, every peer's are spread evenly so that all
    links work all the time and no peer is read by everyone at once."""
    owner = needed.source // rows
    group = stage * (int(owner.max(initial=0)) + 1) + owner
    by_group = np.argsort(group, kind="stable")
    sizes = np.bincount(group, minlength=1)
    position = np.empty(len(group))
    position[by_group] = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group[by_group]]
    order = np.lexsort(((position + 0.5) / sizes[group], stage))
    lengths = needed.count[order]
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    member = np.repeat(needed.start[order] - ptr[:-1], lengths) + np.arange(int(ptr[-1]))
    return needed.source[order], ptr, members[member]


def _index(rows: Int, last: bool = False) -> NDArray[np.int32]:
    """int32, filled up to 2 entries: by the last one (3 for a ptr array, so that it has 2 ranges) or by row 0."""
    missing = (3 if last else 2) - len(rows)
    filling = rows[-1] if last else 0
    return np.concatenate([rows, np.full(max(missing, 0), filling)]).astype(np.int32)
