"""Rows exchanged through memory that all GPUs of one NVLink domain map: no messages.

Each direction has a `Channel`: symmetric memory with the ranks' flags (see `csrc/symm.cuh`) and expanded rows, or their
gradients, reused by all layers. Owners write rows where peers' kernels read them, and read gradients where peers'
kernels write them. A channel's size follows from numbers that are equal on all ranks, so all ranks grow it in the same
call. NVLink multicast is never used.

Shapes: R local rows, E expanded rows, C = Hkv * (D + V) columns, P ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from cp_rewrite.kernels import cuda

_HEADER = 1024
_CALLS, _SEEN = 0, 3
_ARRIVED, _SENT_EARLY, _WRITTEN, _LEFT = 0, 1, 0, 1
"""Words and flags of `csrc/symm.cuh`."""


@dataclass(frozen=True)
class Crew:
    """Args: blocks: 0 for one per multiprocessor. warps: of a block. remote: those of them that read peers. flying:
    16-byte loads in flight per lane."""

    blocks: int
    warps: int
    remote: int = 0
    flying: int = 4


FULL, BESIDE = Crew(0, 16), Crew(16, 8)
"""For rows; and for peers' while a kernel runs that fills every multiprocessor it gets."""
_SUM, _ONE = Crew(0, 16, remote=4), Crew(1, 1)
_ROOM = 1.25
"""A channel grows with room to spare: growing stops all ranks."""


@dataclass(eq=False)
class Channel:
    """Symmetric memory of one direction: flags, then rows of `nbytes` in all. `state` counts the calls."""

    buffer: Tensor
    state: Tensor
    peers: int
    nbytes: int
    handle: Any
    rank: int
    size: int

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def meeting(self) -> tuple[Any, ...]:
        """Where the ranks meet, the last arguments of all these kernels."""
        return self.peers, self.state.data_ptr(), cuda.i32(self.rank), cuda.i32(self.size)

    def rows(self, count: int, like: Tensor, columns: int) -> Tensor:
        """(count, columns), in the dtype of `like`: the memory of the first rows."""
        taken = self.buffer[_HEADER : _HEADER + count * columns * like.element_size()]
        return taken.view(like.dtype).view(count, columns)


_channels: dict[tuple[str, str], Channel] = {}
_captured: set[Channel] = set()
"""Channels that CUDA graphs use, for good: replays read and write their memory, also after a larger one took over."""
_last: dict[torch.device, torch.cuda.Stream] = {}
"""The stream that used channels last."""


def channel(group: str, direction: str, nbytes: int, device: torch.device) -> Channel:
    """The channel of a group and direction, for rows of at least `nbytes`: the same number on all ranks. It holds one
    call at a time: calls on several streams wait for each other.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is being captured.
    """
    known = _channels.get((group, direction))
    capturing = torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device)
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
    process_group = _resolve_process_group(group)
    # Peers may still read the memory that is about to go.
    torch.cuda.synchronize(device)
    dist.barrier(process_group, device_ids=[device.index])
    _channels.pop((group, direction), None)
    grown = int(nbytes * (_ROOM if known is not None else 1.0))
    made = _channels[group, direction] = _make_channel(process_group, -(-grown // 4096) * 4096, device)
    return made


def _make_channel(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Channel:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(_HEADER + nbytes, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(buffer, group.group_name)
    buffer.zero_()  # flags; and kernels may load rows that nobody has written yet
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])
    state = torch.zeros(8, dtype=torch.int32, device=device)
    return Channel(buffer, state, handle.buffer_ptrs_dev, nbytes, handle, group.rank(), group.size())


class Push:
    """One call of the exchange, from all ranks' k and v to everyone's expanded rows: `to_peers` and `own_rows`, in any
    order. All ranks make it, in the same order.

    Args:
        k_RHD, v_RHV: `dense_rows`. sends, targets, ends, copied, partners, capacity: of `push.push_route`; capacity
            is not 0.
    Attributes:
        rows: (E, C), the expanded rows, in memory that the next call overwrites.
    """

    def __init__(
        self,
        k_RHD: Tensor,
        v_RHV: Tensor,
        sends: Tensor,
        targets: Tensor,
        ends: Tensor,
        copied: Tensor,
        partners: Tensor,
        capacity: Tensor,
        group: str,
    ) -> None:
        k_width, size = _chunks(k_RHD), k_RHD.element_size()
        width = k_width + _chunks(v_RHV)
        self._way = channel(group, "push", int(capacity) * width * 16, k_RHD.device)
        self.rows = self._way.rows(copied.shape[0], k_RHD, width * 16 // size)
        self._senders, self._receivers = partners, partners[1:]
        self._arguments = (
            k_RHD.data_ptr(),
            v_RHV.data_ptr(),
            cuda.u64(k_RHD.stride(0) * size // 16),
            cuda.u64(v_RHV.stride(0) * size // 16),
            cuda.u32(k_width),
            cuda.u32(width),
            sends.data_ptr(),
            targets.data_ptr(),
            ends.data_ptr(),
            partners.data_ptr(),
        )

    def to_peers(self, crew: Crew, stream: torch.cuda.Stream | None = None) -> None:
        """Rows of this rank to all others; when it is done, theirs are here. Those that ranks need at once go first.

        Args:
            crew: FULL or BESIDE.
            stream: where it runs, after all that the current stream is told so far; None: the current one. On another,
                the caller keeps what it reads until it is waited for: memory given back is the current stream's to
                write at once.
        """
        if crew.blocks == 0:
            # Many blocks that wait for peers could keep out what the peers wait for.
            _meet(self._way, stream, _ARRIVED, told=_ARRIVED, ranks=self._receivers)
        self._launch(crew, stream, to_peers=True)

    def own_rows(self, skip: int = 0) -> None:
        """Rows of this rank to itself but for the first `skip`, on the current stream."""
        self._launch(FULL, None, to_peers=False, skip=skip)

    def early_rows(self) -> None:
        """Wait, on the current stream, for what this rank needs at once; after `own_rows`."""
        _meet(self._way, None, _SENT_EARLY, ranks=self._senders, beside=True)

    def _launch(self, crew: Crew, stream: torch.cuda.Stream | None, *, to_peers: bool, skip: int = 0) -> None:
        kernel = cuda.kernel("push_rows", self._way.device, _macros(crew))
        _launch(kernel, crew, stream, self._way, *self._arguments, cuda.u32(to_peers), cuda.u32(skip))


def gradient_rows(expanded_EC: Tensor, capacity: Tensor, group: str, stream: torch.cuda.Stream | None = None) -> Tensor:
    """(E, C): where `return_rows` reads the gradients of expanded rows. It may be written once `stream` is waited for:
    peers read there what the call before returned. All ranks call both, in turns."""
    rows, columns = expanded_EC.shape
    way = channel(group, "return", int(capacity) * _chunks(expanded_EC) * 16, expanded_EC.device)
    _meet(way, stream, _LEFT, back=1)
    return way.rows(rows, expanded_EC, columns)


def return_rows(
    grad_EC: Tensor,
    partners: Tensor,
    capacity: Tensor,
    here: slice,
    holder_ptr: Tensor,
    holders: Tensor,
    dk_RHD: Tensor,
    dv_RHV: Tensor,
    group: str,
    stream: torch.cuda.Stream | None = None,
    mxint15: bool = False,
) -> None:
    """Write dk and dv: fp32 sums, in a fixed order, over all ranks' expanded rows. The transpose of a `Push`; all ranks
    call it, in the same order.

    Args:
        grad_EC: (E, C), of `gradient_rows`, written.
        partners, capacity, holder_ptr, holders: of `push.push_route`, whose capacity is not 0.
        here: these rows of dk and dv hold a gradient, which is added.
        dk_RHD, dv_RHV: contiguous, in the gradient's dtype. stream: as of `Push.to_peers`.
        mxint15: what is summed is MXINT15 (`csrc/rows.cuh`).
    """
    width = _chunks(grad_EC)
    way = channel(group, "return", int(capacity) * width * 16, grad_EC.device)
    _meet(way, stream, _WRITTEN, told=_WRITTEN, ranks=partners[1:])
    dtypes = ((cuda.DTYPES[grad_EC.dtype], "1"), *cuda.MXINT15 * mxint15)
    _launch(
        cuda.kernel("return_rows", way.device, (*dtypes, *_macros(_SUM))),
        _SUM,
        stream,
        way,
        holder_ptr.data_ptr(),
        holders.data_ptr(),
        cuda.u32(dk_RHD.shape[0]),
        dk_RHD.data_ptr(),
        dv_RHV.data_ptr(),
        cuda.u32(_chunks(dk_RHD)),
        cuda.u32(width),
        cuda.u32(here.start),
        cuda.u32(here.stop - here.start),
    )


def _meet(
    way: Channel,
    stream: torch.cuda.Stream | None,
    awaited: int,
    *,
    told: int = -1,
    ranks: Tensor | None = None,
    back: int = 0,
    beside: bool = False,
) -> None:
    """One thread waits for `ranks`, a bit each, of the call `back` calls before this one; `beside`: on another stream
    than the call's. See `csrc/meet.cu`."""
    whom = 0 if ranks is None else ranks.data_ptr()
    word, ahead = (_SEEN, 0) if beside else (_CALLS, 1 - back)
    numbers = cuda.i32(told), cuda.i32(awaited), cuda.u32(word), cuda.u32(ahead), whom
    _launch(cuda.kernel("meet", way.device), _ONE, stream, way, *numbers)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which rows travel beside kernels: its blocks go first."""
    return torch.cuda.Stream(device, priority=-1)


def _launch(kernel: Any, crew: Crew, stream: torch.cuda.Stream | None, way: Channel, *args: Any) -> None:
    device = way.device
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        blocks = crew.blocks or cuda.multiprocessors(device)
        cuda.launch(kernel, blocks, 32 * crew.warps, device, *args, *way.meeting)


def _macros(crew: Crew) -> cuda.Macros:
    return (("WARPS", str(crew.warps)), ("REMOTE_WARPS", str(crew.remote)), ("IN_FLIGHT", str(crew.flying)))


def dense_rows(x_RHD: Tensor) -> Tensor:
    """x with rows of 16-byte chunks without holes; rows themselves may lie apart."""
    row = x_RHD.stride(1) == x_RHD.shape[2] and x_RHD.stride(2) == 1
    aligned = x_RHD.stride(0) * x_RHD.element_size() % 16 == 0 and x_RHD.data_ptr() % 16 == 0
    return x_RHD if row and aligned else x_RHD.contiguous()


def _chunks(x: Tensor) -> int:
    """16-byte chunks of a row."""
    row_bytes = x[0].numel() * x.element_size()
    if row_bytes % 16:
        raise ValueError(f"rows must be whole 16-byte chunks, got {row_bytes} bytes for shape {tuple(x.shape)}")
    return row_bytes // 16
