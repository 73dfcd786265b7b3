"""Routes: the tensors that the ops of one exchange read, and the functions that make them of a schedule, in the sizes
of the batch or of a `Capacity`.

`Route` is what an exchange registers, with its `Cost`. `fixed_tables` makes kernel tables in the sizes of a `Capacity`,
for steps that replay as one CUDA graph; `Route.fixed` makes routes so.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.capacity import Capacity
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.names import SIZES_ARE_BOUNDS, LaunchRow
from cp_rewrite.planning.plan_input import PlanTensor
from cp_rewrite.planning.schedule import Schedule, at_least

Arrays = dict[str, NDArray[np.integer[Any]]]


@dataclass(frozen=True)
class Cost:
    """Cost of attention with an exchange, for `auto` to choose by.

    Args:
        seconds: of one layer, forward and backward, by load, device, model and the ranks that share a node.
        copies: beyond what tells layouts apart, how often local rows are read or written: keys and values are packed,
            rows to be sent are put behind each other, gradients are rounded.
        in_one_node: only there can the exchange run.
    """

    seconds: Callable[[Load, Device, Model, int], float]
    copies: int = 0
    in_one_node: bool = False


@dataclass(frozen=True)
class Route:
    """How rows travel under one exchange.

    Args:
        tensors: of one rank, in the order in which ops take them.
        arrays: makes them, by name, of a schedule and a rank.
        fixed: makes them in the sizes of a capacity; None: the host must know how many rows travel.
        in_steps: other ranks' rows pass by a rank, step after step, inside of an attention op. `arrays` makes kernel
            tables for these steps too, and no rows can be kept for the backward.
        cost: None: `auto` does not choose it.
    """

    tensors: tuple[PlanTensor, ...]
    arrays: Callable[[Schedule, int], Arrays]
    fixed: Callable[[Schedule, int, Capacity], Arrays] | None = None
    in_steps: bool = False
    cost: Cost | None = None

    _named: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_named", namedtuple("_named", self.names))  # pyright: ignore[reportUntypedNamedTuple]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    def bind(self, tensors: Sequence[Any]) -> Any:
        """A route's tensors, or graph proxies of them, by name: a namedtuple, for Dynamo knows those."""
        return self._named(*tensors)


def row_index(rows: Int) -> NDArray[np.int32]:
    """Row numbers as ops take them: int32, at least 2 of them, for compilers specialise lengths 0 and 1."""
    return at_least(rows.astype(np.int32), 2, 0)


def filled(array: NDArray[Any], size: int, value: Any) -> NDArray[Any]:
    """`array` with its leading dim filled up to `size`, which is not less, with `value`."""
    tail = np.full((size - len(array), *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate([array, tail])


def fits(mask: PackedMask) -> bool:
    """True if one window serves all pieces of all batches: not where documents' ends clip windows on the right, nor
    where spans have one of their own."""
    return not mask.looks_ahead or mask.left is mask.right is None


def fixed_tables(schedule: Schedule, rank: int, mask: PackedMask, capacity: Capacity) -> Arrays:
    """`Schedule.attention` in the sizes of `capacity`. Its second launch says so.

    Raises:
        ValueError: on all ranks alike, when the batch needs more on some rank.
    """
    everyone = [schedule.attention(each) for each in range(schedule.world_size)]
    _check(max(len(tables["cu_seqlens_q"]) - 1 for tables in everyone), schedule, capacity)
    tables = everyone[rank]
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    launches = LaunchRow(left, right, schedule.local_rows, capacity.rows), LaunchRow(0, 0, SIZES_ARE_BOUNDS, 0)
    return {
        "cu_seqlens_q": filled(tables["cu_seqlens_q"], capacity.pieces + 1, tables["cu_seqlens_q"][-1]),
        "cu_seqlens_k": filled(tables["cu_seqlens_k"], capacity.pieces + 1, tables["cu_seqlens_k"][-1]),
        "pieces": filled(tables["pieces"], capacity.pieces, 0),
        "launches": np.array(launches, dtype=np.int64),
    }


def _check(entries: int, schedule: Schedule, capacity: Capacity) -> None:
    """The same on all ranks: `entries` of kernel tables are those of the rank that has most, as are expanded rows."""
    expanded = int(schedule.expanded.max(initial=0))
    for name, needed in (("rows", expanded), ("pieces", entries)):
        if needed > getattr(capacity, name):
            raise ValueError(
                f"capacity.{name} is {getattr(capacity, name)}, but this batch needs {needed} on some rank: raise it"
            )
