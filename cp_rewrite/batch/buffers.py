"""Tensors that keep their addresses while batches come and go, for steps that replay as one CUDA graph."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cp_rewrite.capacity import Capacity
from cp_rewrite.packing import CuSeqlens, packing_args
from cp_rewrite.sharding import Sharding

from .padding import PaddingReaders

OVERWRITTEN = (
    "with capacity, batches share their tensors, and the next `sharding.shard(...)` wrote over what this backward reads"
    ": call backward before it, once for each batch, and clone what of a batch is read later"
)


class Buffers:
    """The tensors of one annotation, by key, and the plain values that its batches share."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}
        self._values: dict[str, Any] = {}
        self.batch = -1
        """Number of the batch that they hold."""
        self.padding_readers: set[PaddingReaders] = set()
        """Readers of padding in the graphs that ran: a captured step runs on in batches that it can't check."""

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()  # an annotation is copied and pickled without them

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
        known.copy_(tensor.pin_memory() if known.is_cuda and not tensor.is_cuda else tensor, non_blocking=True)
        return known.detach()  # a tensor of its own for each batch: what is asked of one (gradients) ends with it

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
        """The tensors that are held, in the order in which they came."""
        return tuple(self._tensors)


_buffers: WeakValueDictionary[Hashable, Buffers] = WeakValueDictionary()
"""By all fields of an annotation."""


def buffers_of(sharding: Sharding) -> Buffers:
    """The buffers of an annotation with a capacity; equal annotations share them.

    Every annotation that asks for them holds them. A captured step knows only addresses; but the model that it was
    compiled from holds its annotation, and so does who replays it: `with sharding.shard(batch): graph.replay()`.
    """
    key = tuple(getattr(sharding, f.name) for f in fields(sharding))
    buffers = _buffers.setdefault(key, Buffers())
    object.__setattr__(sharding, "_buffers", buffers)
    return buffers


def fill_cu_seqlens(cu_seqlens: Tensor, name: str, capacity: Capacity) -> Tensor:
    """(documents + 1,): cu_seqlens with its last entry repeated.

    Raises:
        ValueError: more documents than the capacity has.
    """
    missing = capacity.documents + 1 - cu_seqlens.shape[0]
    if missing < 0:
        raise ValueError(f"capacity.documents is {capacity.documents}, {name} has {cu_seqlens.shape[0] - 1}: raise it")
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])


def fixed_values(
    sharding: Sharding, capacity: Capacity, values: Mapping[str, Any], masks: Collection[str]
) -> dict[str, Any]:
    """The values with all tensors in buffers that keep their addresses; what is no tensor must not change. What stands
    in for masks is read by nothing."""
    buffers, packing, fixed = buffers_of(sharding), sharding.packing, dict(values)
    sums = packing_args(packing) if isinstance(packing, CuSeqlens) else ()
    for name, value in values.items():
        if name in masks:
            continue
        if isinstance(value, Tensor):
            filled = fill_cu_seqlens(value, name, capacity) if name in sums else value
            fixed[name] = buffers.fill(name, filled, value.device)
            if name in sums:  # a fixed number of entries would be a plain constant where a model counts documents
                torch._dynamo.maybe_mark_dynamic(fixed[name], 0)
        else:
            buffers.keep(name, value)
    return fixed
