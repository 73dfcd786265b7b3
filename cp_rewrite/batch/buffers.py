"""Tensors that keep their addresses while batches come and go, for steps that replay as one CUDA graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.capacity import Capacity
from cp_rewrite.sharding import Sharding


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
