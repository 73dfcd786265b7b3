"""A global batch, cut: this rank's tokens, and the plan that the compiled graph's extra inputs come from."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from . import agree
from .documents import Documents
from .grid import outer_schedule, row_order
from .masks import PackedMask
from .ops.exchange import ROUTES
from .plan import BatchPlan, plan_batch
from .pull import pull_route
from .ring_schedule import ring_tables
from .sharding import CuSeqlens, PositionIds, Sharding, split_exchange

IGNORE_INDEX = -100
"""Label of a token that is no target (torch's cross_entropy default)."""


@dataclass(frozen=True)
class PlanInput:
    """One extra input of a rewritten graph: tensor `name` of the schedule of `mask`, as `exchange` needs it.

    `row_index` is the (T_l,) int64 index in the global row of each local token; it belongs to no mask or exchange.
    """

    name: str
    mask: PackedMask | None = None
    exchange: str | None = None

    @property
    def on_host(self) -> bool:
        """Read by ops on the host; all others live on the device."""
        return self.name in ("pieces", "launches", "splits", "capacity", "rounds")

    @property
    def is_static(self) -> bool:
        """The size follows from the world size alone."""
        return self.name in ("splits", "capacity")

    @staticmethod
    def of_site(mask: PackedMask, exchange: str) -> tuple[PlanInput, ...]:
        """What `packed_attention` reads: its tables, then its route."""
        tables = ("cu_seqlens_q", "cu_seqlens_k", "pieces", "launches")
        scattered, outer = split_exchange(exchange)
        # A ring has tables for each of its steps, a grid of ranks those of its outer places.
        whose = exchange if scattered or outer == "p2p" else None
        route = ROUTES[outer] + (("row_order", "row_inverse") if scattered else ())
        return tuple(PlanInput(name, mask, whose) for name in tables) + tuple(
            PlanInput(name, mask, exchange) for name in route
        )


@dataclass(eq=False)
class ActivePlan:
    """The plan of one batch on one rank, with its tensors made once and shared by all layers."""

    sharding: Sharding
    plan: BatchPlan
    device: torch.device
    batch: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The global batch, when the annotation asks to verify on it."""
    _tensors: dict[PlanInput, Tensor] = field(default_factory=dict[PlanInput, Tensor])

    def tensor(self, key: PlanInput) -> Tensor:
        """The tensor of one extra input, on the device unless the host reads it."""
        if key not in self._tensors:
            if key.name == "row_index":
                self._keep(key, self._row_index())
            else:
                for name, array in self._arrays(key, self.sharding.rank).items():
                    self._keep(PlanInput(name, key.mask, key.exchange), array)
        return self._tensors[key]

    def example(self, key: PlanInput) -> Tensor:
        """A tensor like `tensor(key)` but with rank 0's sizes: compilers decide by an example's sizes (what to keep
        for the backward, in which order to run), and must decide the same on all ranks."""
        if key.mask is None:
            return self.tensor(key)
        array = self._arrays(key, 0)[key.name]
        device = torch.device("cpu") if key.on_host else self.device
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    def check_full(self, sums: Sequence[str]) -> None:
        """Raise where a rank has rows without a token while the model sums over rows whatever they hold."""
        missing = self.plan.local_size * self.sharding.world_size - self.plan.rows[0].total
        if missing:
            raise ValueError(
                f"{sums[0]} sums over tokens, and the {missing} rows that fill up this batch's ranks would be counted: "
                f"pad rows to a multiple of {self.sharding.world_size} tokens, or mask the sum"
            )

    def indices(self) -> NDArray[np.int64]:
        """(B, T_l): index in the global row of each local token, -1 where there is none."""
        return self.plan.local_indices(self.sharding.rank)

    def _arrays(self, key: PlanInput, rank: int) -> dict[str, NDArray[Any]]:
        assert key.mask is not None
        if key.exchange is None:
            return self.plan.schedule(key.mask).attention(rank)
        scattered, outer = split_exchange(key.exchange)
        inner = self.sharding.grid[1] if scattered else 1
        place = rank // inner
        schedule = outer_schedule(self.plan, key.mask, inner) if scattered else self.plan.schedule(key.mask)
        order = row_order(self.plan, place, inner) if scattered else {}
        if outer == "p2p":
            return {**ring_tables(schedule, place), **order}
        route = pull_route(schedule, place) if outer == "pull" else schedule.route(outer, place)
        return {**(schedule.attention(place) if scattered else {}), **route, **order}

    def _keep(self, key: PlanInput, array: NDArray[Any]) -> None:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        self._tensors[key] = tensor if key.on_host else to_device(tensor, self.device)

    def _row_index(self) -> NDArray[np.int64]:
        indices = self.indices()
        if (indices != indices[:1]).any():
            raise ValueError(
                "the model makes positions for all rows of the batch at once, but this batch's rows are cut in "
                "different orders: pass position_ids per row, or use one row per batch, or layout='head_tail'"
            )
        return np.maximum(indices[0], 0)


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


class LocalBatch(dict[str, Any]):
    """This rank's part of a batch: pass it on as `model(**local)`. `plan` is the BatchPlan it was cut by."""

    def __init__(self, values: Mapping[str, Any], plan: BatchPlan) -> None:
        super().__init__(values)
        self.plan = plan


@contextmanager
def shard(
    sharding: Sharding,
    batch: Mapping[str, Any],
    *,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
    shift_labels: bool = False,
    label_arg: str = "labels",
) -> Generator[LocalBatch]:
    """Cut a global batch and make its plan active for the calls inside.

    Token tensors are cut along their token dim in the layout's order; where a rank has fewer tokens than another its
    part is filled up at the end with 0 (labels: -100). Everything else is handed over as it is.

    Args:
        sharding: the annotation.
        batch: argument name -> value, the same on every rank of the group.
        lengths: documents' lengths, (N,) or one list per row, when the packing argument is on a GPU: reading it there
            would stall the GPU. Rows may be longer than their lengths' sum; the rest is padding.
        shift_labels: shift labels by one token over the global row before the cut, as a causal language model's loss
            does, and hand over `shift_labels` and `num_items_in_batch` (targets in the whole batch).
        label_arg: name of the labels.
    Raises:
        KeyError, ValueError: a missing argument, token dims of different lengths, lengths that do not fit.
        RuntimeError: on every rank, when ranks were given different batches or layouts.
    """
    try:
        plan = plan_of(sharding, batch, lengths)
    except Exception as error:
        agree.on_failure(sharding, error)
        raise
    agree.on_batch(sharding, plan)
    values = dict(batch)
    tokens = dict(sharding.tokens)
    if shift_labels:
        values |= _shifted(batch, tokens, label_arg)
        tokens["shift_labels"] = tokens[label_arg]
    indices = plan.local_indices(sharding.rank)
    for name, dim in tokens.items():
        fill = IGNORE_INDEX if name in (label_arg, "labels", "shift_labels") else 0
        values[name] = cut_tokens(values[name], dim, indices, fill)
        # A number made from a fixed token count would be a plain constant in the graph, and wrong on a shard unseen.
        torch._dynamo.maybe_mark_dynamic(values[name], dim)
    first, kept = values[next(iter(tokens))], dict(batch) if sharding.verify != "never" else {}
    token = _current.set((ActivePlan(sharding, plan, first.device, kept), True))
    try:
        yield LocalBatch(values, plan)
    finally:
        done = _current.get()
        _current.reset(token)
        # Remembered, no longer active: unshard() of the outputs comes after the block.
        _current.set(None if done is None else (done[0], False))


def plan_of(
    sharding: Sharding, batch: Mapping[str, Any], lengths: Sequence[int] | Sequence[Sequence[int]] | None = None
) -> BatchPlan:
    """The plan of a global batch: its documents, read on the host, in the layout's order. Checks the batch's shapes."""
    rows, total = _shape(sharding, batch)
    documents = _documents(sharding, batch, rows, total, lengths)
    return plan_batch(documents, sharding.world_size, sharding.layout, sharding.balance_for or sharding.assume_mask)


def cut_tokens(x: Tensor, dim: int, indices: NDArray[np.int64], fill: int) -> Tensor:
    """Local tokens of `x`: along `dim` the tokens at `indices` (B, T_l), row b of the batch (dim - 1) by indices[b].

    Indices of -1 give `fill`. Inverse: `_join_tokens` over all ranks.
    """
    index = to_device(torch.from_numpy(np.maximum(indices, 0)), x.device)
    hole = to_device(torch.from_numpy(indices < 0), x.device)
    if len(indices) == 1:
        cut = x.index_select(dim, index[0])
        return cut.masked_fill(_along(hole[0], cut.ndim, dim), fill) if (indices < 0).any() else cut
    shape = [1] * x.ndim
    shape[dim - 1], shape[dim] = indices.shape
    sizes = [*x.shape[:dim], indices.shape[1], *x.shape[dim + 1 :]]
    cut = x.gather(dim, index.view(shape).expand(sizes))
    return cut.masked_fill(hole.view(shape), fill) if (indices < 0).any() else cut


def unshard(sharding: Sharding, x: Tensor, dim: int) -> Tensor:
    """Local tokens of all ranks in the order of the global row.

    Args:
        x: this rank's tensor, T_l tokens at `dim`, batch rows (if several) at `dim - 1`; from the last sharded batch.
        dim: token dim.
    Returns:
        The global tensor, on every rank. Its gradient is cut to this rank's tokens and not summed over ranks: a loss
        computed from it counts once, and parameter gradients are summed over the group as for local losses.
    """
    current = _current.get()
    if current is None or current[0].sharding.graph_key != sharding.graph_key:
        raise RuntimeError("unshard() needs the plan of a batch: call it inside or after `with sharding.shard(batch)`")
    plan = current[0].plan
    dim = dim % x.ndim
    if x.shape[dim] != plan.local_size:
        raise ValueError(f"dim {dim} of x has {x.shape[dim]} tokens, but a rank's part has {plan.local_size}")
    return cast(Tensor, _Unshard.apply(x, dim, sharding, plan))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sharding: Sharding, plan: BatchPlan) -> Tensor:
        ctx.dim, ctx.indices = dim, plan.local_indices(sharding.rank)
        if sharding.world_size == 1:
            parts = [x]
        else:
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(sharding.world_size)]
            dist.all_gather(parts, x.contiguous(), group=sharding.group)
        return _join_tokens(torch.cat(parts, dim), dim, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return cut_tokens(grads[0], ctx.dim, ctx.indices, 0), None, None, None


def _join_tokens(x: Tensor, dim: int, plan: BatchPlan) -> Tensor:
    """Ranks' parts one after another along `dim` -> tokens of the global row."""
    sources = np.empty((len(plan.rows), plan.rows[0].total), dtype=np.int64)
    for rank in range(plan.world_size):
        for row, local in enumerate(plan.local_indices(rank)):
            sources[row, local[local >= 0]] = rank * plan.local_size + np.flatnonzero(local >= 0)
    return cut_tokens(x, dim, sources, 0)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _along(x: Tensor, ndim: int, dim: int) -> Tensor:
    return x.view([-1 if d == dim else 1 for d in range(ndim)])


def _shape(sharding: Sharding, batch: Mapping[str, Any]) -> tuple[int, int]:
    """(B, T) of the batch."""
    missing = [name for name in sharding.tokens if not isinstance(batch.get(name), Tensor)]
    if missing:
        raise KeyError(f"tokens names {missing}, but the batch has no such tensor; it has {sorted(batch)}")
    for name, dim in sharding.tokens.items():
        if dim >= batch[name].ndim:
            raise ValueError(f"tokens[{name!r}] is dim {dim}, but batch[{name!r}] has shape {tuple(batch[name].shape)}")
    totals = {name: batch[name].shape[dim] for name, dim in sharding.tokens.items()}
    if len(set(totals.values())) > 1:
        raise ValueError(f"token dims must have one length, got {totals}: check the dims in tokens")
    first, dim = next(iter(sharding.tokens.items()))
    rows = batch[first].shape[dim - 1] if dim else 1
    other = [n for n, d in sharding.tokens.items() if rows > 1 and (d == 0 or batch[n].shape[d - 1] != rows)]
    if other:
        shapes = {name: tuple(batch[name].shape) for name in other}
        raise ValueError(f"batch[{first!r}] has {rows} rows, but {shapes} differ: expand them to ({rows}, T)")
    return rows, next(iter(totals.values()))


def _documents(
    sharding: Sharding,
    batch: Mapping[str, Any],
    rows: int,
    total: int,
    lengths: Sequence[int] | Sequence[Sequence[int]] | None,
) -> list[Documents]:
    packing = sharding.packing
    if lengths is not None:
        nested = [lengths] if not len(lengths) or isinstance(lengths[0], int | np.integer) else lengths
        if len(nested) != rows:
            raise ValueError(f"lengths holds {len(nested)} rows, the batch {rows}: pass one list of lengths per row")
        given = [Documents.from_lengths(cast(Sequence[int], row), total) for row in nested]
        value: Any = batch.get(packing.arg)
        if isinstance(value, Tensor) and value.device.type == "cpu":
            _check_lengths(given, _read(sharding, batch, rows, total))
        return given
    return _read(sharding, batch, rows, total)


def _check_lengths(given: Sequence[Documents], read: Sequence[Documents]) -> None:
    for row, (mine, theirs) in enumerate(zip(given, read, strict=True)):
        starts, used = mine.starts[mine.lengths > 0], int(mine.lengths.sum())
        found = theirs.starts[(theirs.lengths > 0) & (theirs.starts < used)]
        if starts.shape != found.shape or (starts != found).any():
            raise ValueError(
                f"lengths say that row {row} has documents at {starts[:8].tolist()}…, "
                f"its packing argument says {found[:8].tolist()}…"
            )


def _read(sharding: Sharding, batch: Mapping[str, Any], rows: int, total: int) -> list[Documents]:
    packing = sharding.packing
    values = _host_array(batch, packing.arg)
    if isinstance(packing, CuSeqlens):
        if rows > 1:
            raise ValueError(f"cu_seqlens pack one row, but the batch has {rows}: use PositionIds or DocumentIds")
        padded = None if packing.padded_arg is None else _host_array(batch, packing.padded_arg)
        return [Documents.from_cu_seqlens(values, total, padded)]
    read = Documents.from_position_ids if isinstance(packing, PositionIds) else Documents.from_document_ids
    table = np.moveaxis(values, sharding.tokens[packing.arg], -1).reshape(-1, total)
    if len(table) != rows:
        raise ValueError(f"batch[{packing.arg!r}] has shape {values.shape}, not {rows} rows of {total} tokens")
    return [read(row) for row in table]


def _host_array(batch: Mapping[str, Any], name: str) -> NDArray[Any]:
    value = batch.get(name)
    if value is None:
        raise KeyError(f"packing reads {name!r}, which the batch lacks; it has {sorted(batch)}; or pass lengths=")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ValueError(
            f"batch[{name!r}] is on {value.device}, and reading documents there would stall it: "
            "shard the batch before moving it, or pass lengths="
        )
    return np.asarray(value)


def _shifted(batch: Mapping[str, Any], tokens: Mapping[str, int], label_arg: str) -> dict[str, Tensor]:
    if label_arg not in tokens:
        raise ValueError(f"shift_labels=True shifts {label_arg!r}: name it in tokens, or pass label_arg=")
    labels, dim = batch[label_arg], tokens[label_arg]
    last = torch.full_like(labels.narrow(dim, 0, 1), IGNORE_INDEX)
    shifted = torch.cat([labels.narrow(dim, 1, labels.shape[dim] - 1), last], dim)
    return {"shift_labels": shifted, "num_items_in_batch": (shifted != IGNORE_INDEX).sum()}
