"""Inputs that segments keep for the backward lie on the host in between: checkpoints of blocks.

    compute   block 0   block 1   block 2  …       block 2'       block 1'       block 0'
    copies              0 ─> host 1 ─> host        host ─> 1      host ─> 0

Copies run on a stream of their own: out beside the next block's forward, back beside the backward of the block behind
it. On a CPU they are copies in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALL = 1 << 20
"""Bytes up to which a tensor stays where it is."""


@dataclass(eq=False)
class _OnHost:
    """A tensor that went to the host. `before`: the one that went before it, which the backward reads next. `back`: its
    copy on the device, on the way or there. `read`: the backward had it."""

    host: Tensor
    device: torch.device
    before: weakref.ref[_OnHost] | None
    back: Tensor | None = None
    read: bool = False


@dataclass(eq=False)
class HostStore:
    """Moves what hooks of saved tensors are given to the host and back.

    Args:
        small: bytes up to which a tensor stays. moved: bytes that went to the host, of all calls.
    """

    small: int = SMALL
    moved: int = 0
    _streams: dict[torch.device, Any] = field(default_factory=dict[torch.device, Any])
    _on_the_way: list[tuple[Tensor, Any]] = field(default_factory=list[tuple[Tensor, Any]])
    _last: weakref.ref[_OnHost] | None = None

    @contextmanager
    def holding(self, inputs: Sequence[Any]) -> Generator[None]:
        """Inside, those of `inputs` that gradients reach go to the host where autograd saves them."""
        self._settle()
        wide = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad and x.nbytes > self.small]
        ready = {_memory(x): _event(x.device) for x in wide}
        packed: dict[Any, _OnHost] = {}

        def pack(x: Tensor) -> Tensor | _OnHost:
            if _memory(x) not in ready or not _is_dense(x):
                return x
            known = _memory(x), x.storage_offset(), x.shape, x.stride(), x.dtype
            if known not in packed:
                packed[known] = self._send(x, ready[_memory(x)])
            return packed[known]

        with saved_tensors_hooks(pack, self._receive):
            yield

    def _send(self, x: Tensor, ready: Any) -> _OnHost:
        x = x.detach()
        host = torch.empty_like(x, device="cpu", pin_memory=x.device.type != "cpu")
        self._copy(host, x, x, ready)
        self.moved += x.nbytes
        sent = _OnHost(host, x.device, self._last)
        self._last = weakref.ref(sent)
        return sent

    def _receive(self, packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        found = self._fetch(packed)
        self._settle()
        packed.back, packed.read = None, True
        following = packed.before and packed.before()
        if following is not None and not following.read:
            self._fetch(following)
        return found

    def _fetch(self, packed: _OnHost) -> Tensor:
        """Begin the way back. Memory comes from the stream that computes: what it ran there before must end first."""
        if packed.back is None:
            packed.back = torch.empty_like(packed.host, device=packed.device)
            self._copy(packed.back, packed.host, packed.back, _event(packed.device))
        return packed.back

    def _copy(self, into: Tensor, x: Tensor, on_device: Tensor, ready: Any) -> None:
        """Copy on the stream for copies, behind `ready`. What is on the device stays until `_settle`."""
        device = on_device.device
        if device.type == "cpu":
            into.copy_(x)
            return
        module = torch.get_device_module(device)
        stream = self._streams[device] = self._streams.get(device) or module.Stream(device)
        stream.wait_event(ready)
        with module.stream(stream):
            into.copy_(x, non_blocking=True)
        self._on_the_way.append((on_device, stream.record_event()))

    def _settle(self) -> None:
        """Let go of what is copied. The stream that computes waits for it first: it may write to that memory next."""
        for x, done in self._on_the_way:
            torch.get_device_module(x.device).current_stream(x.device).wait_event(done)
        self._on_the_way.clear()


def _event(device: torch.device) -> Any:
    """Behind all that computes so far; None on a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()


def _is_dense(x: Tensor) -> bool:
    """True if a copy has its strides."""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
