"""The plan of a batch, as tensors that graphs read."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.arguments import IGNORE_INDEX
from cp_rewrite.batch.buffers import buffers_of
from cp_rewrite.batch.masks.argument import MaskArgument, mask_argument
from cp_rewrite.batch.padding import PaddingReaders
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import BatchPlan
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
from cp_rewrite.planning.routes import grid
from cp_rewrite.planning.routes.by_exchange import ROUTES
from cp_rewrite.planning.routes.fixed import fixed_tables
from cp_rewrite.planning.routes.route import Arrays
from cp_rewrite.planning.token_reads.neighbours import neighbours_route
from cp_rewrite.planning.token_reads.scans import scan_tables
from cp_rewrite.planning.token_reads.states import state_tables
from cp_rewrite.sharding import Sharding

from .marks import batch_number, version_of
from .packing_values import PackingValues, packing_names
from .take_tokens import beside, with_valid_fill

Place = tuple[PackedMask, str | None, int]
"""Key of arrays: a mask, an exchange (None: the kernel tables that exchanges share), and a rank."""


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
    """The batch's number in this process."""
    counted: str | None = None
    """The argument whose targets were counted, once shifted, for `num_items_in_batch`; None: they were not."""
    masks: Collection[str] = ()
    """The arguments that are masks of whole rows."""
    labels: Collection[str] = ()
    """The arguments in which IGNORE_INDEX says that a token is no target."""
    ran: bool = False
    """True if a graph asked for it."""
    sites: list[Any] = field(default_factory=list[Any])
    """The `Traffic` of graphs that ran, as often as they did."""
    fill: Mapping[str, float] = field(default_factory=dict[str, float])
    """By argument: what it holds in rows without a token, where the caller said so."""
    spares: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By argument: the row of which fill is a copy where this rank has no such row itself."""
    packed: PackingValues | None = None
    """What documents were read from."""
    handed: Mapping[int, tuple[Tensor, int]] = field(default_factory=dict[int, tuple[Tensor, int]])
    """By `id`: the tensors that `shard` handed over and that all ranks have compared, and their versions then."""
    _tensors: dict[PlanInput, Tensor] = field(default_factory=dict[PlanInput, Tensor])
    arrays: dict[Place, Arrays] = field(default_factory=dict[Any, Arrays])
    """Those made so far."""
    _reads: dict[tuple[Neighbours | Scan | States, int], Arrays] = field(default_factory=dict[Any, Arrays])
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

    def check_full(self, sums: Sequence[str]) -> None:
        """Raise where a rank has rows without a token while the model sums over rows whatever they hold."""
        if self.plan.fill:
            raise ValueError(
                f"{sums[0]} sums over tokens, and the {self.plan.fill} rows that fill up this batch's ranks would be "
                f"counted: pad rows to a multiple of {self.sharding.world_size * self.sharding.pad_to_multiple} "
                "tokens, or mask the sum"
            )

    def check_padding(self, readers: PaddingReaders) -> None:
        """Raise where a line of the model reads this batch's tokens of no document."""
        if self.sharding.capacity is not None:
            buffers_of(self.sharding).padding_readers.add(readers)  # a step that is replayed checks nothing
        readers.check(self.sharding, self.plan, self.batch)

    def as_read(self, name: str, value: Tensor, dim: int) -> Tensor:
        """A call's argument as the compiled model reads it: fill holds copies of other rows, so that what is computed
        of it is as valid as of those; of labels it is no target. What `shard` handed over holds 0 there, so that it
        counts in no sum that the caller masks."""
        if name not in self.tokens or not self._fills:
            return value
        has_token = self.tensor(HAS_TOKEN)
        if name in self.labels and not value.is_floating_point():
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

    def check_unread(self, read: Collection[str]) -> None:
        """Raise where a batch has whole numbers per token that a model without a loss does not read, and nobody said
        what they hold in rows without a token: 0 would be a class to a loss outside."""
        if not self.plan.fill and self.sharding.capacity is None:
            return
        known = {*read, *self.labels, *self.fill, *packing_names(self.sharding)}
        for name in self.tokens:
            given: Any = self.batch.get(name)
            whole = given is not None and not given.is_floating_point() and given.dtype != torch.bool
            if whole and name not in known:
                raise ValueError(
                    f"batch[{name!r}] holds whole numbers, which the model does not read, and rows that fill up a rank "
                    f"hold 0 in it: a class, to a loss of what the model returns. Say what they are to hold: "
                    f"shard(batch, fill={{{name!r}: {IGNORE_INDEX}}}) for targets, {{{name!r}: 0}} where 0 counts "
                    "nothing, as in a mask"
                )

    def is_as_handed(self, name: str, value: Any) -> bool:
        """True if a call's argument is what `shard` handed over, and compared, and was not written to since."""
        if not isinstance(value, Tensor):
            given = self.batch.get(name)
            return isinstance(given, int | float) and given == value
        known = self.handed.get(id(value))
        return known is not None and known[1] == version_of(value) != -1

    @cached_property
    def _fills(self) -> bool:
        """True if this rank has rows without a token, or may have some when this step is replayed."""
        fixed = self.sharding.capacity is not None
        return fixed or bool((self.plan.local_indices(self.sharding.rank) < 0).any())

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

    def check_packing(self, name: str, value: Tensor, of: str) -> None:
        """Raise unless an argument of a call says of documents what argument `of` of the batch did."""
        # Writes by other ways than torch's ops leave the version as it is; the host sees them at no cost.
        if self.packed is not None and not (value.is_cuda and name == of and self.is_as_handed(of, value)):
            self.packed.check(name, value, of)

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
                "different orders: pass position_ids per row, or use one row per batch, or layout='head_tail'"
            )
        return self.plan.filled_indices(self.sharding.rank)[0]


_TABLES: dict[type, Any] = {Neighbours: neighbours_route, Scan: scan_tables, States: state_tables}
"""What makes the tables of a read of other tokens."""


def arrays_of(sharding: Sharding, plan: BatchPlan, place: Place) -> Arrays:
    """What graphs read of a batch's plan. Numpy only: any thread may make it."""
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
    """What `packed_attention` reads: its tables, then its route."""
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
