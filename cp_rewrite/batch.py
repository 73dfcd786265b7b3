"""A global batch, cut: its documents read, its plan made, this rank's tokens handed over; and rows put together."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from . import agree
from .active import ActivePlan, activate, last_plan, to_device
from .capacity import Capacity, buffers_of, fill_cu_seqlens
from .documents import Documents
from .plan import BatchPlan, plan_batch
from .sharding import CuSeqlens, PositionIds, Sharding

IGNORE_INDEX = -100
"""Label of a token that is no target (torch's cross_entropy default)."""


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
    part is filled up at the end with 0 (labels: -100). Everything else is handed over as it is. With a capacity, all
    tensors are handed over in buffers that every batch shares.

    Args:
        sharding: the annotation.
        batch: argument name -> value, the same on every rank of the group.
        lengths: documents' lengths, (N,) or one list per row, when the packing argument is on a GPU: reading it there
            would stall the GPU. Rows may be longer than their lengths' sum; the rest is padding.
        shift_labels: shift labels by one token over the global row before the cut, as a causal language model's loss
            does, and hand over `shift_labels` and `num_items_in_batch` (targets in the whole batch).
        label_arg: name of the labels.
    Raises:
        KeyError, ValueError: a missing argument, token dims of different lengths, lengths that do not fit, documents
            that can't be cut into whole chunks.
        RuntimeError: on every rank, when ranks were given different batches or layouts.
    """
    try:
        plan = plan_of(sharding, batch, lengths)
    except Exception as error:
        agree.on_failure(sharding, error)
        raise
    agree.on_batch(sharding, plan)
    tokens = dict(sharding.tokens) | ({"shift_labels": sharding.tokens.get(label_arg, 0)} if shift_labels else {})
    values = dict(batch) | (_shifted(batch, sharding.tokens, label_arg) if shift_labels else {})
    values = _cut(values, tokens, (label_arg, "labels", "shift_labels"), plan.local_indices(sharding.rank))
    # Masks may be compared on the global batch, flex_attention's always are: it is kept while the block runs.
    active = ActivePlan(sharding, plan, values[next(iter(tokens))].device, dict(batch))
    if sharding.capacity is not None:
        values = _fixed_values(sharding, sharding.capacity, values)
        active.refill()
    for name, dim in tokens.items():
        # A number made from a fixed token count would be a plain constant in the graph, and wrong on a shard unseen.
        torch._dynamo.maybe_mark_dynamic(values[name], dim)
    with activate(active):
        yield LocalBatch(values, plan)


def _cut(
    values: dict[str, Any], tokens: Mapping[str, int], labels: Sequence[str], indices: NDArray[np.int64]
) -> dict[str, Any]:
    """This rank's tokens of the token tensors; the other values as they are."""
    fills = {name: IGNORE_INDEX if name in labels else 0 for name in tokens}
    return values | {name: cut_tokens(values[name], dim, indices, fills[name]) for name, dim in tokens.items()}


def plan_of(
    sharding: Sharding, batch: Mapping[str, Any], lengths: Sequence[int] | Sequence[Sequence[int]] | None = None
) -> BatchPlan:
    """The plan of a global batch: its documents, read on the host, in the layout's order. Checks the batch's shapes."""
    rows, total = _shape(sharding, batch)
    documents = _documents(sharding, batch, rows, total, lengths)
    return plan_batch(
        documents,
        sharding.world_size,
        sharding.layout,
        sharding.balance_for or sharding.assume_mask,
        chunk_size=sharding.chunk_size,
        pad_to_multiple=sharding.pad_to_multiple,
        ranks_per_node=sharding.node_size,
        device=sharding.device_speeds,
    )


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
    last = last_plan(sharding)
    if last is None:
        raise RuntimeError("unshard() needs the plan of a batch: call it inside or after `with sharding.shard(batch)`")
    plan = last.plan
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


def _along(x: Tensor, ndim: int, dim: int) -> Tensor:
    return x.view([-1 if d == dim else 1 for d in range(ndim)])


def _fixed_values(sharding: Sharding, capacity: Capacity, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in buffers that keep their addresses; what is no tensor must not change."""
    buffers, packing, fixed = buffers_of(sharding), sharding.packing, dict(values)
    sums = (packing.arg, packing.padded_arg) if isinstance(packing, CuSeqlens) else ()
    for name, value in values.items():
        if isinstance(value, Tensor):
            filled = fill_cu_seqlens(value, name, capacity) if name in sums else value
            fixed[name] = buffers.fill(name, filled, value.device)
        else:
            buffers.keep(name, value)
    return fixed


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
