"""The active plan: the batch in flight, and the tensors that a rewritten graph reads as its extra inputs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.routes import grid
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.fixed import fixed_tables
from cp_rewrite.planning.routes.neighbours import NEIGHBOURS, OUT_ROWS, Neighbours, neighbours_route
from cp_rewrite.planning.routes.route import KERNEL_TABLES, Arrays, PlanTensor
from cp_rewrite.planning.routes.scans.tables import SCAN, Scan, scan_tables
from cp_rewrite.sharding import Sharding, split_exchange

from .buffers import buffers_of
from .masks.argument import MaskArgument, mask_argument
from .padding import PaddingReaders


@dataclass(frozen=True)
class PlanInput:
    """One extra input of a rewritten graph: a tensor of the schedule of `mask`, as `exchange` needs it; or of the route
    of `read`, what is read of other tokens."""

    tensor: PlanTensor
    mask: PackedMask | None = None
    exchange: str | None = None
    read: Neighbours | Scan | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_per_token(self) -> bool:
        """Whether it has an entry for each of this rank's tokens, of one row of the batch or of all."""
        if isinstance(self.read, Scan):
            return self.tensor in SCAN[:3]
        narrow = self.read is not None and self.read.span == 1
        return (
            self in (ROW_INDEX, HAS_TOKEN, TOKEN_INDEX) or self.tensor == OUT_ROWS or (narrow and self.name == "rows")
        )

    @staticmethod
    def of_scan(scan: Scan) -> tuple[PlanInput, ...]:
        """What a running operation reads."""
        return tuple(PlanInput(x, read=scan) for x in SCAN)

    @staticmethod
    def of_neighbours(read: Neighbours) -> tuple[PlanInput, ...]:
        """What `neighbour_rows` reads; where a token reads several rows, `out_rows` too."""
        return tuple(PlanInput(x, read=read) for x in NEIGHBOURS + (OUT_ROWS,) * (read.span > 1))

    @staticmethod
    def of_site(mask: PackedMask, exchange: str) -> tuple[PlanInput, ...]:
        """What `packed_attention` reads: its tables, then its route."""
        scattered, kind = split_exchange(exchange)
        route = ROUTES[kind]
        # A ring has tables for each of its steps, a grid of ranks those of its outer places.
        whose = exchange if scattered or route.in_steps else None
        return (
            *(PlanInput(tensor, mask, whose) for tensor in KERNEL_TABLES),
            *(PlanInput(tensor, mask, exchange) for tensor in route.tensors + grid.ORDER * scattered),
        )


ROW_INDEX = PlanInput(PlanTensor("row_index"))
"""(T_l,) int64: index in the global row of each local token. It belongs to no mask or exchange."""
HAS_TOKEN = PlanInput(PlanTensor("has_token"))
"""(B, T_l) bool: whether a local row holds a token or fills the rank up. It belongs to no mask or exchange."""
TOKEN_INDEX = PlanInput(PlanTensor("token_index"))
"""(B, T_l) int64: as `row_index`, for each row of the batch its own."""
TOKEN_ROWS = PlanInput(PlanTensor("token_rows"))
"""(T, B) int64: the local row of each token of the global rows, -1 of another rank's. It belongs to no mask."""
IN_DOCUMENT = PlanInput(PlanTensor("in_document"))
"""(T, B) bool: whether each token of the global rows belongs to a document. It belongs to no mask or exchange."""
ROW_TOKENS = PlanInput(PlanTensor("row_tokens", static=True))
"""(1,) int64: the tokens of a row, of all ranks together. It belongs to no mask or exchange."""


@dataclass(eq=False)
class ActivePlan:
    """The plan of one batch on one rank, with its tensors made once and shared by all layers."""

    sharding: Sharding
    plan: BatchPlan
    device: torch.device
    batch: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The global batch, for masks that are compared on it; empty once the batch's block has ended."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """The token dim of each argument that was cut, of those that `shard` made too."""
    number: int = field(default_factory=itertools.count().__next__)
    """Of the batch, in this process."""
    counted: str | None = None
    """The argument whose targets were counted, once shifted, for `num_items_in_batch`; None: they were not."""
    masks: Collection[str] = ()
    """The arguments that are masks of whole rows."""
    offsets: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """What `shard` handed over of the arguments that tell documents apart for the whole row."""
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])
    """By `id`: what `shard` handed over, and what the compiled model reads instead. Rows without a token hold 0 in the
    one, so that they count in no sum that the caller masks, and copies of other rows in the other, so that what the
    model computes of them is as valid as of those."""
    _tensors: dict[PlanInput, Tensor] = field(default_factory=dict[PlanInput, Tensor])
    _arrays: dict[tuple[PackedMask, str | None, int], Arrays] = field(default_factory=dict[Any, Arrays])
    """By mask, exchange and rank."""
    _reads: dict[tuple[Neighbours | Scan, int], Arrays] = field(default_factory=dict[Any, Arrays])
    """By what is read, and rank."""

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

    @property
    def missing(self) -> int:
        """Rows without a token that fill up the ranks, of one row of the batch."""
        return self.plan.local_size * self.sharding.world_size - self.plan.rows[0].total

    def check_full(self, sums: Sequence[str]) -> None:
        """Raise where a rank has rows without a token while the model sums over rows whatever they hold."""
        if self.missing:
            raise ValueError(
                f"{sums[0]} sums over tokens, and the {self.missing} rows that fill up this batch's ranks would be "
                f"counted: pad rows to a multiple of {self.sharding.world_size * self.sharding.pad_to_multiple} "
                "tokens, or mask the sum"
            )

    def check_padding(self, readers: PaddingReaders) -> None:
        """Raise where a line of the model reads this batch's tokens of no document."""
        if self.sharding.capacity is not None:
            buffers_of(self.sharding).padding_readers.add(readers)  # a step that is replayed checks nothing
        readers.check(self.sharding, self.plan, self.batch)

    def with_copies(self, args: Sequence[Any]) -> list[Any]:
        """A call's arguments, those that `shard` handed over as the compiled model reads them."""
        return [self.copies[id(value)][1] if id(value) in self.copies else value for value in args]

    def check_tokens(self, name: str, value: Tensor, dim: int, size: int) -> None:
        """Raise unless a call's argument, of `size` tokens at `dim`, can be this rank's part of this batch."""
        number = batch_number(value)
        if size == self.plan.local_size and number in (None, self.number):
            return
        found = "is of another batch" if size == self.plan.local_size else f"has {size} tokens at dim {dim}"
        raise ValueError(
            f"{name} {found}, but the model is called inside a batch whose parts have {self.plan.local_size} tokens a "
            "rank: call it with what `with sharding.shard(batch) as local:` gives, model(**local)"
        )

    def check_mask(self, argument: MaskArgument, value: Any) -> None:
        """Raise unless a call's mask is what `shard` put in the place of this batch's."""
        found = mask_argument(value)
        if found != argument or batch_number(value) != self.number:
            raise ValueError(
                f"the model was compiled for {argument}, and is called with {found or 'another tensor'}, or another "
                "batch's: call it with what `with sharding.shard(batch) as local:` gives, model(**local)"
            )

    def check_offsets(self, name: str, value: Tensor, of: str) -> None:
        """Raise unless an argument of a call holds what documents were read from, argument `of`. On a GPU, which the
        host does not wait for, an assertion there."""
        given = self.offsets.get(of, value)
        if value is given:
            return
        wrong = f"{name} of this call are not those of the batch: its documents were read from batch[{of!r}]"
        if value.device.type == "cpu" != given.device.type:  # `shard` moved what it knows to tell documents apart
            given = torch.as_tensor(self.batch[of])
        if value.shape != given.shape or value.device != given.device:
            raise ValueError(wrong)
        if value.is_cuda:
            torch._assert_async((value == given).all(), wrong)
        elif not torch.equal(value, given.to(value.dtype)):
            raise ValueError(wrong)

    def indices(self) -> NDArray[np.int64]:
        """(B, T_l): index in the global row of each local token, -1 where there is none."""
        return self.plan.local_indices(self.sharding.rank)

    def most_received(self, read: Neighbours) -> int:
        """Rows that come from other ranks, of the rank that gets most."""
        splits = next(key for key in PlanInput.of_neighbours(read) if key.name == "splits")
        return max(int(self._array(splits, rank)[1].sum()) for rank in range(self.sharding.world_size))

    def _array(self, key: PlanInput, rank: int) -> NDArray[Any]:
        if key.read is not None:
            if (key.read, rank) not in self._reads:
                make: Any = scan_tables if isinstance(key.read, Scan) else neighbours_route
                self._reads[key.read, rank] = make(self.plan, key.read, rank, self.sharding.capacity)
            return self._reads[key.read, rank][key.name]
        return self._rows(key) if key.mask is None else self._arrays_of(key.mask, key.exchange, rank)[key.name]

    def _arrays_of(self, mask: PackedMask, exchange: str | None, rank: int) -> Arrays:
        """A rank's arrays of an exchange; for None, the kernel tables that exchanges share."""
        place = mask, exchange, rank
        if place not in self._arrays:
            self._arrays[place] = self._make_arrays(*place)
        return self._arrays[place]

    def _make_arrays(self, mask: PackedMask, exchange: str | None, rank: int) -> Arrays:
        capacity = self.sharding.capacity
        if exchange is None:
            schedule = self.plan.schedule(mask)
            return schedule.attention(rank) if capacity is None else fixed_tables(schedule, rank, mask, capacity)
        scattered, kind = split_exchange(exchange)
        route = ROUTES[kind]
        if scattered:
            return grid.grid_route(self.plan, mask, route, rank, self.sharding.grid(exchange)[0][1])
        schedule = self.plan.schedule(mask)
        if capacity is None:
            return route.arrays(schedule, rank)
        assert route.fixed is not None, f"{kind} has no route of fixed sizes: `exchange_reasons` refuses it"
        return route.fixed(schedule, rank, capacity)

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
        indices = self.indices()
        if key == HAS_TOKEN:
            return indices >= 0
        if (indices != indices[:1]).any():
            raise ValueError(
                "the model makes positions for all rows of the batch at once, but this batch's rows are cut in "
                "different orders: pass position_ids per row, or use one row per batch, or layout='head_tail'"
            )
        return self.plan.filled_indices(self.sharding.rank)[0]


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
    return current[0]


def check_no_batch() -> None:
    """Raise inside a batch's block: two batches can't be in flight."""
    if in_batch():
        raise RuntimeError("shard() was called inside of another `with sharding.shard(batch):`; end that block first")


def check_not_exported() -> None:
    """Raise under torch.export: a program of a sharded model would hold one batch's plan."""
    if torch.compiler.is_exporting():
        raise RuntimeError("torch.export was given a model that runs sharded: export the plain model, on whole rows")


def mark_token_dim(value: Tensor, dim: int) -> None:
    """Note which dim of a tensor counts this rank's tokens, and that its rows are in this rank's order."""
    value._cp_rewrite_token_dim = dim  # type: ignore[attr-defined]


def token_dim_of(value: Tensor) -> int | None:
    """The dim that `mark_token_dim` noted; None: of none."""
    return getattr(value, "_cp_rewrite_token_dim", None)


def mark_part(value: Tensor) -> None:
    """Note that a tensor is this rank's part of a sum over the group."""
    value._cp_rewrite_part = True  # type: ignore[attr-defined]


def is_part(value: Tensor) -> bool:
    """Whether `mark_part` noted it."""
    return getattr(value, "_cp_rewrite_part", False)


def number_tokens(value: Tensor, plan: ActivePlan) -> None:
    """Mark a tensor of a rank's part with its batch. Ops lose the mark: it shows on what is handed over as it is."""
    value._cp_rewrite_batch = plan.number  # type: ignore[attr-defined]


def batch_number(value: Tensor) -> int | None:
    """The batch that a tensor was cut from; None: unknown."""
    return getattr(value, "_cp_rewrite_batch", None)


def in_batch() -> bool:
    """Whether a batch's block is open, of whatever annotation."""
    current = _current.get()
    return current is not None and current[1]


def last_plan(sharding: Sharding) -> ActivePlan | None:
    """The plan of the last batch that was cut, whether its block has ended or not; None: of another Sharding."""
    current = _current.get()
    return None if current is None or current[0].sharding.graph_key != sharding.graph_key else current[0]


@contextmanager
def activate(plan: ActivePlan) -> Generator[None]:
    """Make `plan` the active one. It is remembered afterwards: unshard() of the outputs comes after the block."""
    token = _current.set((plan, True))
    try:
        yield
    finally:
        done, plan.batch = _current.get(), {}
        _current.reset(token)
        _current.set(None if done is None else (done[0], False))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
