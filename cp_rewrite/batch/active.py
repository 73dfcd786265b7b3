"""The plan of a batch, as tensors that graphs read.

The arguments that tell documents apart, as `shard` was given them: a call must bring the same.

Tokens of a tensor, taken by their places.

Which plan is active: that of the batch whose block is open.

Which attention plans are made for: that of graphs that all ranks of a group have compiled and compared.

    first batch      planned for what the annotation names, else for usual sizes
    its model call   compiled; all ranks have found their graphs alike, and note how attention runs there
    later batches    planned for that

What a batch is planned for must be the same on all ranks: it is read in the thread that trains, at places of the loop,
however far ahead a batch is planned.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
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
from cp_rewrite.ops.max_logits import watch_batch
from cp_rewrite.packing import EndOfDocument, PaddingMask, PositionIds, StartOfDocument, packing_args
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
from .marks import batch_number, version_of
from .masks import MaskArgument, mask_argument
from .padding import PaddingReaders


def take_tokens(x: Tensor, dim: int, index_BT: Tensor) -> Tensor:
    """x with the entries `index_BT` of `dim`, for each row of the batch its own.

    Args:
        x: tokens at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        index_BT: (B, N) int64.
    Returns:
        x with N entries at `dim`.
    """
    if len(index_BT) == 1:
        return x.index_select(dim, index_BT[0])
    sizes = [*x.shape[:dim], index_BT.shape[1], *x.shape[dim + 1 :]]
    return x.gather(dim, beside(index_BT, x, dim).expand(sizes))


def beside(x_BT: Tensor, like: Tensor, dim: int) -> Tensor:
    """A value per token, as it stands beside those of `like`, whose tokens are at `dim`, by broadcasting."""
    shape = [1] * like.ndim
    shape[dim] = x_BT.shape[1]
    if len(x_BT) > 1:
        shape[dim - 1] = len(x_BT)
    return x_BT.view(shape)


def with_valid_fill(x: Tensor, dim: int, has_token_BT: Tensor, source_BT: Tensor, spare: Tensor | None) -> Tensor:
    """A tensor of a rank's tokens with copies of its own rows in those that hold no token, and with its strides.

        x            a b c 0 0
        has_token    1 1 1 0 0
        source       0 1 2 1 1
        result       a b c b b

    What a model computes of fill is then as valid as of tokens, whatever has made the tensor. No gradient goes there.

    Args:
        x: T_l rows at `dim`; the rows of the batch, where there are several, at `dim - 1`.
        has_token_BT: (B, T_l) bool. source_BT: (B, T_l) int64, the row that each is a copy of; T_l: `spare`.
        spare: one row, for those of which this rank has nothing to copy; None: they stay as they are.
    """
    several = len(source_BT) > 1
    alike = [d for d in range(x.ndim) if x.stride(d) == 0 and d != dim and not (several and d == dim - 1)]
    one = x
    for d in alike:  # expanded: one number for many places, as the compiled graph was promised
        one = one.narrow(d, 0, 1)
    rows = one.detach()
    if spare is None:
        own = torch.arange(source_BT.shape[1], device=source_BT.device)
        rows = take_tokens(rows, dim, torch.where(source_BT < len(own), source_BT, own))
    else:
        rows = take_tokens(torch.cat([rows, spare], dim), dim, source_BT)
    found = torch.where(beside(has_token_BT, one, dim), one, rows)
    if found.stride() != one.stride():
        found = torch.empty_strided(one.shape, one.stride(), dtype=x.dtype, device=x.device).copy_(found)
    return found.expand(x.shape)


def packing_names(sharding: Sharding) -> tuple[str, ...]:
    """The arguments of which the plan of a batch is made."""
    return (*packing_args(sharding.packing), *([] if sharding.spans is None else [sharding.spans.arg]))


class PackingValues:
    """Those of one batch, as a rank's model gets them, in memory of their own."""

    def __init__(self, sharding: Sharding, values: Mapping[str, Any], has_token_BT: Tensor) -> None:
        given = [name for name in packing_names(sharding) if isinstance(values.get(name), Tensor)]
        self._values: dict[str, Tensor] = {name: values[name].clone() for name in given}
        self._sharding, self._has_token = sharding, has_token_BT

    def check(self, name: str, value: Tensor, of: str | None = None) -> None:
        """Raise unless a call's argument says what argument `of` of the batch, by default `name`, said of documents.
        On a GPU, which the host does not wait for, an assertion there.

        Raises:
            ValueError: it names the argument.
        """
        of = of or name
        given = self._values.get(of)
        if given is None:  # documents were read from `lengths`, and the batch lacks it
            return
        wrong = (
            f"{name} of this call are not those of the batch: its documents were read from batch[{of!r}]. Call the "
            f"model with local[{of!r}] as it is, and change documents before `shard`"
        )
        if value.shape != given.shape:
            raise ValueError(f"{wrong} (their shape is {tuple(given.shape)}, that of the call's {tuple(value.shape)})")
        given = given.to(value.device, non_blocking=True)
        same = self._read(of, value) == self._read(of, given)
        dim = self._sharding.tokens.get(of)
        if dim is not None:
            has_token = self._has_token.to(value.device, non_blocking=True)
            same = same | ~beside(has_token, same, min(dim, same.ndim - 1))
        if value.is_cuda:
            torch._assert_async(same.all(), wrong)
        elif not same.all():
            raise ValueError(wrong)

    def _read(self, name: str, value: Tensor) -> Tensor:
        """The part of an argument that tells documents apart."""
        packing = self._sharding.packing
        if name not in packing_args(packing):
            return value
        if isinstance(packing, EndOfDocument | StartOfDocument):
            return value == packing.token_id
        if isinstance(packing, PositionIds):
            for _ in range(self._sharding.tokens[name] - 1):  # planes, of which the first is text's
                value = value[0]
        return value != 0 if isinstance(packing, PaddingMask) else value


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
    """The attention that a batch is planned for, if its plan is asked for now by the thread that trains. None: unknown.

    The ranks of a plain world size compare no graphs.
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
    """The arguments that documents were read from."""
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
        done, plan.batch = _current.get(), {}
        _current.reset(token)
        _current.set(None if done is None else (done[0], False))
