"""Plan tensors of fixed sizes at fixed addresses, so that a CUDA graph of a whole step replays on other documents.

sharding = cp.Sharding(..., capacity=cp.Capacity(documents=256, pieces=128, rows=40_000))
for batch in warm_up:                        # compiles, grows every buffer
    with sharding.shard(batch) as local:
        step(local)
with sharding.shard(batch) as local, torch.cuda.graph(graph):
    step(local)
for batch in batches:                        # refills the buffers that the graph reads
    with sharding.shard(batch):
        graph.replay()
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes.push import push_route
from cp_rewrite.planning.schedule import Schedule

if TYPE_CHECKING:
    from cp_rewrite.sharding import Sharding

Array = NDArray[np.integer[Any]]
EXCHANGES = ("local", "all_gather", "push")
"""Ways of moving rows whose sizes the host need not know."""
_TILE = 256
"""Rows past the last expanded one that a kernel may load with it: they must hold numbers."""


@dataclass(frozen=True)
class Capacity:
    """The most that a batch may need; entries of zero length fill up what it does not.

    Args:
        documents: documents of a row: `cu_seqlens` arguments are filled up to documents + 1 entries.
        pieces: pieces of a rank, and runs of rows between them that belong to no document.
        rows: expanded rows of a rank: keys of all its pieces, one piece after another.
    Raises:
        TypeError, ValueError: a number that is no int of at least 2.
    """

    documents: int
    pieces: int
    rows: int

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"capacity.{f.name} must be an int, got {value!r}")
            if value < 2:
                raise ValueError(f"capacity.{f.name} must be at least 2, got {value}")


def fits(mask: PackedMask) -> bool:
    """Does one window serve all pieces of all batches? Not where documents' ends clip windows on the right."""
    return mask.right == 0 or mask.left is mask.right is None


def fixed_tables(schedule: Schedule, rank: int, mask: PackedMask, capacity: Capacity) -> dict[str, Array]:
    """`Schedule.attention` in the sizes of `capacity`. Its second launch says so: max_q is -1.

    Raises:
        ValueError: on all ranks alike, when the batch needs more on some rank.
    """
    everyone = [schedule.attention(each) for each in range(schedule.world_size)]
    _check(max(len(tables["cu_seqlens_q"]) - 1 for tables in everyone), schedule, capacity)
    tables = everyone[rank]
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return {
        "cu_seqlens_q": _filled(tables["cu_seqlens_q"], capacity.pieces + 1, tables["cu_seqlens_q"][-1]),
        "cu_seqlens_k": _filled(tables["cu_seqlens_k"], capacity.pieces + 1, tables["cu_seqlens_k"][-1]),
        "pieces": _filled(tables["pieces"], capacity.pieces, 0),
        "launches": np.array([[left, right, schedule.rows, capacity.rows], [0, 0, -1, 0]], dtype=np.int64),
    }


def fixed_route(schedule: Schedule, rank: int, exchange: str, capacity: Capacity) -> dict[str, Array]:
    """A route of `EXCHANGES` in the sizes of `capacity`. Rows after the rank's expanded ones repeat some."""
    if exchange == "push":
        return _fixed_push(schedule, rank, capacity)
    route, used = schedule.route(exchange, rank), int(schedule.expanded[rank])
    kv_rows = route["kv_rows"][:used]
    return {
        "kv_rows": _filled(kv_rows, capacity.rows, kv_rows[0] if used else 0),
        "sum_ptr": route["sum_ptr"],
        "sum_rows": _filled(route["sum_rows"], 2 * (len(route["sum_ptr"]) - 1) + capacity.rows, 0),
    }


def _fixed_push(schedule: Schedule, rank: int, capacity: Capacity) -> dict[str, Array]:
    rows = capacity.rows
    # The host can't tell a captured step where to cut.
    filling = min(_TILE, rows - int(schedule.expanded[rank]))
    route = push_route(schedule, rank, cut=False, filling=filling)
    most = schedule.world_size * rows
    return {
        **route,
        "sends": _filled(route["sends"], most, 0),
        "targets": _filled(route["targets"], most, 0),
        "expanded": np.zeros(rows, dtype=np.int8),
        "copied": np.zeros(rows, dtype=np.int8),
        "capacity": np.array([rows], dtype=np.int64),
        "holders": _filled(route["holders"], most, 0),
        "rest_cu_seqlens_q": np.zeros(2, dtype=np.int32),
        "rest_cu_seqlens_k": np.zeros(2, dtype=np.int32),
    }


def _check(entries: int, schedule: Schedule, capacity: Capacity) -> None:
    """The same on all ranks: `entries` of kernel tables are those of the rank that has most, as are expanded rows."""
    expanded = int(schedule.expanded.max(initial=0))
    for name, needed in (("rows", expanded), ("pieces", entries)):
        if needed > getattr(capacity, name):
            raise ValueError(
                f"capacity.{name} is {getattr(capacity, name)}, but this batch needs {needed} on some rank: raise it"
            )


def _filled(array: Array, size: int, value: Any) -> Array:
    tail = np.full((size - len(array), *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate([array, tail])


class Buffers:
    """Tensors of one Sharding that keep their addresses while batches come and go."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}
        self._values: dict[str, Any] = {}

    def fill(self, key: Hashable, tensor: Tensor, device: torch.device) -> Tensor:
        """The buffer of `key`, on `device`, holding `tensor` now. The host does not wait for the device.

        Raises:
            ValueError: it has another shape or dtype than the first one, or needs a gradient.
        """
        if tensor.requires_grad:
            raise ValueError(f"with capacity, {key} is copied to a buffer, so it can't require a gradient")
        known = self._tensors.get(key)
        if known is None:
            known = self._tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if known.shape != tensor.shape or known.dtype != tensor.dtype:
            raise ValueError(
                f"with capacity, {key} keeps its shape and dtype, {tuple(known.shape)} {known.dtype}; "
                f"this batch's is {tuple(tensor.shape)} {tensor.dtype}"
            )
        return known.copy_(tensor.pin_memory() if known.is_cuda and not tensor.is_cuda else tensor, non_blocking=True)

    def keep(self, name: str, value: Any) -> None:
        """Raise unless `value` is that of the first batch: a captured step can't know another."""
        first = self._values.setdefault(name, value)
        plain = isinstance(value, bool | int | float | str) and type(first) is type(value)
        if first is not value and not (plain and first == value):
            raise ValueError(
                f"with capacity, {name} must not change from batch to batch: it was {first!r}, is {value!r}"
            )

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What is held, in the order in which it came."""
        return tuple(self._tensors)


# Held for good: a captured step reads their addresses, whoever still knows the Sharding.
_buffers: dict[Sharding, Buffers] = {}


def buffers_of(sharding: Sharding) -> Buffers:
    """The buffers of an annotation with a capacity."""
    return _buffers.setdefault(sharding, Buffers())


def fill_cu_seqlens(cu_seqlens: Tensor, name: str, capacity: Capacity) -> Tensor:
    """(documents + 1,): cu_seqlens with its last entry repeated.

    Raises:
        ValueError: more documents than the capacity has.
    """
    missing = capacity.documents + 1 - cu_seqlens.shape[0]
    if missing < 0:
        raise ValueError(f"capacity.documents is {capacity.documents}, {name} has {cu_seqlens.shape[0] - 1}: raise it")
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])
