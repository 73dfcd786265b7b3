"""The plan of a batch, as tensors that graphs read, and which one is active: that of the batch whose block is open.

note_sites, site_now     the attention that plans are made for
ActivePlan, arrays_of    a batch's plan on one rank, and its tensors
active_plan, activate    the plan of the batch whose block is open, or was last
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.arguments import IGNORE_INDEX
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.local_rows import beside, with_valid_fill
from cp_rewrite.ops.max_logits import watch_batch
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.cost.devices import SiteKind
from cp_rewrite.planning.names import split_exchange
from cp_rewrite.planning.plan_input import (
    COPIED_ROWS,
    HAS_TOKEN,
    IN_DOCUMENT,
    KERNEL_TABLES,
    ROW_TOKENS,
    TOKEN_INDEX,
    TOKEN_ROWS,
    Neighbours,
    PlanInput,
    Scan,
    States,
)
from cp_rewrite.planning.reads import neighbours_route, scan_tables
from cp_rewrite.planning.routes import grid
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.route import Arrays, fixed_tables
from cp_rewrite.planning.states import state_tables
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import is_compiled_around

from .buffers import buffers_of
from .handed import Handed


class _Noted(threading.local):
    """For each training thread: graph key -> (how most attention runs, its query columns)."""

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
    """The attention that a batch is planned for, if its plan is asked for now by the thread that trains: that of graphs
    that all ranks of the group have compiled and compared. None: unknown.

        first batch      planned for what the annotation names, else for usual sizes
        its model call   compiled; all ranks have found their graphs alike, and note how attention runs there
        later batches    planned for that

    All ranks must plan a batch for the same attention: it is read in the thread that trains, at places of the loop,
    however far ahead a batch is planned. The ranks of a plain world size compare no graphs.
    """
    if isinstance(sharding.mesh, int):
        return None
    known = _noted.sites.get(sharding.graph_key)
    return None if known is None else known[0]


Place = tuple[PackedMask, str | None, int]
"""Key of arrays: a mask, an exchange (None: the kernel tables that exchanges share), and a rank."""


@dataclass(eq=False)
class ActivePlan:
    """The plan of one batch on one rank, with its tensors made once and shared by all layers."""

    handed: Handed
    """The batch's arguments, with which the model is called."""
    device: torch.device
    ran: bool = False
    """True if a graph asked for it."""
    sites: list[Any] = field(default_factory=list[Any])
    """The `Traffic` of graphs that ran, as often as they did."""
    spares: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By argument: the row of which fill is a copy where this rank has no such row itself."""
    _tensors: dict[PlanInput, Tensor] = field(default_factory=dict[PlanInput, Tensor])
    arrays: dict[Place, Arrays] = field(default_factory=dict[Any, Arrays])
    """Arrays made so far, by mask, exchange and rank."""
    _reads: dict[tuple[Neighbours | Scan | States, int], Arrays] = field(default_factory=dict[Any, Arrays])
    """By what is read, and rank."""

    @property
    def sharding(self) -> Sharding:
        return self.handed.sharding

    @property
    def plan(self) -> BatchPlan:
        return self.handed.plan

    def tensor(self, key: PlanInput) -> Tensor:
        """The tensor of one extra input, on the device unless the host reads it."""
        if key not in self._tensors:
            array = self._array(key, self.sharding.rank)
            tensor, device = torch.from_numpy(np.ascontiguousarray(array)), self._device_of(key)
            fixed = self.sharding.capacity is not None
            made = buffers_of(self.sharding).fill(key, tensor, device) if fixed else to_device(tensor, device)
            self._tensors[key] = made
        return self._tensors[key]

    def refill(self) -> None:
        """With a capacity: put this batch into every tensor that graphs already read."""
        for key in buffers_of(self.sharding).keys:
            if isinstance(key, PlanInput):
                self.tensor(key)

    def example(self, key: PlanInput) -> Tensor:
        """A tensor like `tensor(key)` but with rank 0's sizes: compilers decide by an example's sizes (what to keep
        for the backward, in which order to run), and must decide the same on all ranks."""
        if key.mask is None and key.read is None:
            return self.tensor(key)
        array = self._array(key, 0)
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self._device_of(key))

    def as_read(self, name: str, value: Tensor, dim: int) -> Tensor:
        """A call's argument as the compiled model reads it: fill holds copies of other rows, so that what is computed
        of it is as valid as of those; of labels it is no target. What `shard` handed over holds 0 there, so that it
        counts in no sum that the caller masks."""
        if name not in self.handed.tokens or not self._fills:
            return value
        has_token = self.tensor(HAS_TOKEN)
        if name in self.handed.labels and not value.is_floating_point():
            return value.masked_fill(~beside(has_token, value, dim), IGNORE_INDEX)
        spare = self.spares.get(name)
        fits = spare is not None and spare.dtype == value.dtype and _others(spare, dim) == _others(value, dim)
        return with_valid_fill(value, dim, has_token, self.tensor(COPIED_ROWS), spare if fits else None)

    def without_fill_gradient(self, value: Tensor, dim: int) -> Tensor:
        """A result whose rows without a token give the model no gradient: they are copies, and a loss outside of the
        model that counts them would count a token twice."""
        if not self._fills or not value.requires_grad:
            return value
        return torch.where(beside(self.tensor(HAS_TOKEN), value, dim), value, value.detach())

    @cached_property
    def _fills(self) -> bool:
        """True if this rank has rows without a token, or may have some when this step is replayed."""
        fixed = self.sharding.capacity is not None
        return fixed or bool((self.plan.local_indices(self.sharding.rank) < 0).any())

    def most_received(self, read: Neighbours | States) -> int:
        """Rows, or summaries of states, that come from other ranks, of the rank that gets most."""
        keys = PlanInput.of_states(read) if isinstance(read, States) else PlanInput.of_neighbours(read)
        splits = next(key for key in keys if key.name == "splits")
        return max(int(self._array(splits, rank)[1].sum()) for rank in range(self.sharding.world_size))

    def most_cut(self, states: States) -> int:
        """Pieces, cut from others of their sequence, that a rank keeps states of, of the rank with most."""
        key = next(key for key in PlanInput.of_states(states) if key.name == "cut_pieces")
        return max(len(self._array(key, rank)) for rank in range(self.sharding.world_size))

    def _array(self, key: PlanInput, rank: int) -> NDArray[Any]:
        if key.read is not None:
            if (key.read, rank) not in self._reads:
                make = _TABLES[type(key.read)]
                self._reads[key.read, rank] = make(self.plan, key.read, rank, self.sharding.capacity)
            return self._reads[key.read, rank][key.name]
        return self._rows(key) if key.mask is None else self._arrays_of(key.mask, key.exchange, rank)[key.name]

    def _arrays_of(self, mask: PackedMask, exchange: str | None, rank: int) -> Arrays:
        """A rank's arrays of an exchange; for None, the kernel tables that exchanges share."""
        place = mask, exchange, rank
        if place not in self.arrays:
            self.arrays[place] = arrays_of(self.sharding, self.plan, place)
        return self.arrays[place]

    def _device_of(self, key: PlanInput) -> torch.device:
        return torch.device("cpu") if key.tensor.on_host else self.device

    def _rows(self, key: PlanInput) -> NDArray[Any]:
        """The array of what belongs to no mask."""
        if key == ROW_TOKENS:
            return np.array([self.plan.rows[0].total])
        if key == IN_DOCUMENT:
            return np.stack([row.document_ids() >= 0 for row in self.plan.rows], axis=1)
        if key == TOKEN_ROWS:
            return self.plan.local_rows(self.sharding.rank).T
        if key == TOKEN_INDEX:
            return self.plan.filled_indices(self.sharding.rank)
        indices = self.plan.local_indices(self.sharding.rank)
        if key == HAS_TOKEN:
            return indices >= 0
        if key == COPIED_ROWS:
            return self.plan.copied_rows(self.sharding.rank)
        if (indices != indices[:1]).any():
            raise ValueError(
                "the model makes positions for all rows of the batch at once, but this batch's rows are cut in "
                "different orders: pass position_ids per row, or use one row per batch, or "
                "Sharding(layout='head_tail'), which cuts all rows alike. (Each row gets its own where nothing made of "
                "them, as cos and sin, goes into checkpointed blocks)"
            )
        return self.plan.filled_indices(self.sharding.rank)[0]


_TABLES: dict[type, Any] = {Neighbours: neighbours_route, Scan: scan_tables, States: state_tables}
"""Makes the tables of a read of other tokens."""


def arrays_of(sharding: Sharding, plan: BatchPlan, place: Place) -> Arrays:
    """Arrays that graphs read of a batch's plan. Numpy only: any thread may make them."""
    mask, exchange, rank = place
    capacity = sharding.capacity
    if exchange is None:
        schedule = plan.schedule(mask)
        return schedule.attention(rank) if capacity is None else fixed_tables(schedule, rank, mask, capacity)
    scattered, kind = split_exchange(exchange)
    route = ROUTES[kind]
    if scattered:
        return grid.grid_route(plan, mask, route, rank, sharding.grid_size(exchange)[1])
    schedule = plan.schedule(mask)
    if capacity is None:
        return route.arrays(schedule, rank)
    assert route.fixed is not None, f"{kind} has no route of fixed sizes: `exchange_reasons` refuses it"
    return route.fixed(schedule, rank, capacity)


def site_inputs(mask: PackedMask, exchange: str) -> tuple[PlanInput, ...]:
    """Tables of `packed_attention`, then those of its route."""
    scattered, kind = split_exchange(exchange)
    route = ROUTES[kind]
    # A ring has tables for each of its steps, a grid of ranks those of its outer places.
    whose = exchange if scattered or route.in_steps else None
    return (
        *(PlanInput(tensor, mask, whose) for tensor in KERNEL_TABLES),
        *(PlanInput(tensor, mask, exchange) for tensor in route.tensors + grid.ORDER * scattered),
    )


def _others(x: Tensor, dim: int) -> list[int]:
    """The sizes of all dims but one."""
    return [size for i, size in enumerate(x.shape) if i != dim]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


_current: ContextVar[tuple[ActivePlan, bool] | None] = ContextVar("cp_rewrite_plan", default=None)


def active_plan(sharding: Sharding) -> ActivePlan:
    """The plan of the batch in flight.

    Raises:
        RuntimeError: outside `with sharding.shard(batch)`, or inside another Sharding's.
    """
    current = _current.get()
    if current is None or not current[1]:
        raise RuntimeError("a model rewritten by cp_rewrite runs inside `with sharding.shard(batch) as local:`")
    if current[0].sharding.graph_key != sharding.graph_key:
        raise RuntimeError("the active batch was cut by another Sharding than the one the model was compiled with")
    current[0].ran = True
    return current[0]


def check_no_batch() -> None:
    """Raise inside a batch's block: two batches can't be in flight."""
    if in_batch():
        raise RuntimeError("shard() was called inside of another `with sharding.shard(batch):`; end that block first")


def check_not_traced() -> None:
    """Raise under torch.export: a program of a sharded model would hold one batch's plan. Raise under torch.compile, of
    the model or of what calls it: it would compile what another backend must."""
    if torch.compiler.is_exporting():
        raise RuntimeError("torch.export was given a model that runs sharded: export the plain model, on whole rows")
    if torch.compiler.is_compiling() or is_compiled_around():
        raise RuntimeError("torch.compile was given a model that runs sharded, compiled already: call it as it is")


def in_batch() -> bool:
    """True if a batch's block is open, of whatever annotation."""
    current = _current.get()
    return current is not None and current[1]


def last_batch() -> ActivePlan | None:
    """The plan of the batch that was cut last, of whatever annotation."""
    current = _current.get()
    return None if current is None else current[0]


def is_captured() -> bool:
    """True if a CUDA graph captures what runs now: its replays run no Python."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def last_plan(sharding: Sharding) -> ActivePlan | None:
    """The plan of the last batch that was cut, whether its block has ended or not; None: of another Sharding."""
    current = _current.get()
    return None if current is None or current[0].sharding.graph_key != sharding.graph_key else current[0]


@contextmanager
def activate(plan: ActivePlan) -> Generator[None]:
    """Make `plan` the active one. It is remembered afterwards: unshard() of the outputs comes after the block."""
    token = _current.set((plan, True))
    try:
        with watch_batch(plan.sharding):
            yield
    finally:
        done, plan.handed.batch = _current.get(), {}
        _current.reset(token)
        _current.set(None if done is None else (done[0], False))
