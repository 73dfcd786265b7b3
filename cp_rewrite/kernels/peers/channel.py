"""Symmetric memory of one direction, and how kernels that use it are launched and wait for peers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_rewrite import torch_internals
from cp_rewrite.kernels import cuda

_HEADER = 1024
ARRIVED, SENT_EARLY, SENT, SENT_STAGE = 0, 1, 2, 3
"""Flags of a push."""
WRITTEN, LEFT = 0, 1
"""Flags of a return."""
THIS_CALL, CALL_BEFORE, STARTED_CALL = (0, 1), (0, 0), (1, 0)
"""(word of `Channel.state`, what is added to it): the number of a call. `STARTED_CALL` is this call, too, on the main
stream, while its end on another stream may not have been counted."""
# All of these are those of `csrc/peers.cuh`.

_ROOM = 1.25
"""A channel grows with room to spare: growing stops all ranks."""


@dataclass(frozen=True)
class LaunchShape:
    """How many threads a kernel gets that reads or writes peers' memory.

    Args: blocks: 0 for one per multiprocessor. warps: of a block. remote_warps: those of them that read peers' memory.
    in_flight: 16-byte loads that a thread has in flight.
    """

    blocks: int
    warps: int
    remote_warps: int = 0
    in_flight: int = 4

    @cached_property
    def macros(self) -> cuda.Macros:
        names = {"WARPS": self.warps, "REMOTE_WARPS": self.remote_warps, "IN_FLIGHT": self.in_flight}
        return tuple((name, str(value)) for name, value in names.items())


_ONE_WARP = LaunchShape(1, 1)


@dataclass(eq=False)
class Channel:
    """Symmetric memory of one direction: flags, then `nbytes` of rows, reused by all layers.

    Args: state: words of this rank alone that count its calls. addresses: on the device, of all ranks' `buffer`.
    handle: keeps the mapping of the peers' memory.
    """

    buffer: Tensor
    state: Tensor
    addresses: int
    nbytes: int
    handle: Any
    rank: int
    size: int
    _rows: tuple[Any, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    def rows(self, count: int, like: Tensor, columns: int) -> Tensor:
        """(count, columns), in the dtype of `like`: the memory of the first rows."""
        key = count, like.dtype, columns
        if self._rows is None or self._rows[0] != key:  # all layers of a batch ask for the same
            taken = self.buffer[_HEADER : _HEADER + count * columns * like.element_size()]
            self._rows = key, taken.view(like.dtype).view(count, columns)
        return self._rows[1]

    @cached_property
    def _ends(self) -> tuple[Any, ...]:
        """The last arguments of every kernel."""
        return self.addresses, self.state.data_ptr(), self.rank, self.size

    def launch(
        self, kernel: Any, shape: LaunchShape, stream: torch.cuda.Stream | None, *args: Any, waits: bool = True
    ) -> None:
        """Enqueue a kernel that uses this channel, which is the last of its arguments.

        Args:
            stream: where it runs, after all that is enqueued on the current stream so far; None: on the current one.
            waits: False where that stream has waited for the current one since.
        """
        if stream is not None and waits:
            stream.wait_stream(cuda.current_stream(self.device))
        blocks = shape.blocks or cuda.multiprocessors(self.device)
        cuda.launch(kernel, blocks, 32 * shape.warps, self.device, *args, *self._ends, stream=stream)

    def signal_and_wait(
        self,
        stream: torch.cuda.Stream | None,
        awaited: int,
        call: tuple[int, int] = THIS_CALL,
        *,
        signal: int = -1,
        ranks: Tensor | None = None,
    ) -> None:
        """Enqueue one thread that sets flag `signal` for all peers, unless it is -1, and then waits for flag `awaited`
        of `ranks`, a bit each (None: all), to reach the number of `call`. See `csrc/signal_wait.cu`."""
        (word, ahead), whom = call, 0 if ranks is None else ranks.data_ptr()
        numbers = signal, awaited, word, ahead, whom
        self.launch(cuda.kernel("signal_wait", self.device), _ONE_WARP, stream, *numbers)


_channels: dict[tuple[str, str], Channel] = {}
_captured: set[Channel] = set()
"""Channels that CUDA graphs use, for good: replays read and write their memory, also after a larger one took over."""
_last: dict[torch.device, cuda.Stream] = {}
"""The stream that used channels last."""


def channel(group: str, direction: str, nbytes: int, device: torch.device) -> Channel:
    """The channel of a group and direction, for rows of at least `nbytes`. All ranks give the same number, so that all
    make a larger channel in the same call. A channel holds one call at a time: calls on several streams take turns.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is being captured.
    """
    known = _channels.get((group, direction))
    capturing = torch.cuda.is_current_stream_capturing()
    stream = cuda.current_stream(device)
    last, _last[device] = _last.get(device, stream), stream
    if last != stream and not capturing:  # a capture begins with a synchronized device
        stream.wait_stream(last)
    if known is not None and known.nbytes >= nbytes:
        if capturing:
            _captured.add(known)
        return known
    if capturing:
        raise RuntimeError(
            f"the {direction} channel needs {nbytes} bytes and a CUDA graph is being captured: "
            "run one step of full capacity before the capture"
        )
    process_group = torch_internals.process_group(group)
    # Peers may still read the memory that is about to go.
    torch.cuda.synchronize(device)
    dist.barrier(process_group, device_ids=[device.index])
    _channels.pop((group, direction), None)
    grown = int(nbytes * (_ROOM if known is not None else 1.0))
    made = _channels[group, direction] = _make_channel(process_group, -(-grown // 4096) * 4096, device)
    return made


def _make_channel(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Channel:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric  # private to torch: where GPUs need it

    buffer = symmetric.empty(_HEADER + nbytes, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(buffer, group.group_name)
    buffer.zero_()  # flags; and kernels may load rows that nobody has written yet
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])
    state = torch.zeros(8, dtype=torch.int32, device=device)
    return Channel(buffer, state, handle.buffer_ptrs_dev, nbytes, handle, group.rank(), group.size())


@cache
def side_stream(device: torch.device) -> cuda.Stream:
    """The stream of exchanges that overlap with kernels: its blocks go first."""
    return cuda.Stream(device, priority=-1)


@cache
def lane(device: torch.device) -> cuda.Stream:
    """A stream for every other stage's kernel: its blocks fill the GPU up as those of the stage before end."""
    return cuda.Stream(device)


@cache
def first_lane(device: torch.device) -> cuda.Stream:
    """A stream for a kernel whose blocks go before those of the current stream's."""
    return cuda.Stream(device, priority=-1)


def chunks(x: Tensor) -> int:
    """16-byte chunks of a row."""
    row_bytes = x.shape[1:].numel() * x.element_size()
    if row_bytes % 16:
        raise ValueError(f"rows must be whole 16-byte chunks, got {row_bytes} bytes for shape {tuple(x.shape)}")
    return row_bytes // 16
