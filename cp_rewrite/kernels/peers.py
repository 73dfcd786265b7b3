"""Rows exchanged through memory that all GPUs of one NVLink domain map: no messages.

Owners write rows where the readers' kernels read them (`Push`), and read gradients where the readers' kernels write
them (`Return`). Each direction has a `Channel`: symmetric memory that holds expanded rows, or their gradients, behind
the flags by which the ranks' kernels wait for each other (`csrc/peers.cuh`). NVLink multicast is never used.

    LaunchShape, Channel            how kernels that use such memory are launched, and wait for peers
    side_stream, lane, first_lane   the streams of exchanges and kernels that overlap
    Push, Return                    rows of k and v to their readers; gradients home: the transpose
    group_reasons, row_reasons      why rows can't travel so, of a group of ranks and of the rows themselves

Shapes: R local rows, E expanded rows, C = Hkv * (D + V) columns, P ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_rewrite import torch_internals

from . import cuda

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


WHOLE_GPU = LaunchShape(0, 16)
FEW_BLOCKS = LaunchShape(16, 8)
"""To push while a kernel runs that fills every multiprocessor it gets."""
SHAPE = LaunchShape(0, 16, remote_warps=4)
BESIDE = LaunchShape(24, 16, remote_warps=8)
"""To return gradients while such a kernel runs."""


class Push:
    """One call of the exchange, from all ranks' k and v to everyone's expanded rows: `to_peers` and `own_rows`, in any
    order. All ranks make it, in the same order. Each rank writes its rows into the expanded rows of all ranks that read
    them (`csrc/push_rows.cu`).

    Args:
        k_RHD, v_RHV: `dense_rows`.
        sends, targets, ends, copied, partners, capacity: of `push_route`; capacity is not 0.
        stages: rows travel in so many, of so many heads each, all heads together; the same on all ranks. (1,): at once.
    Attributes:
        rows: (E, C), the expanded rows, in memory that the next call overwrites.
    """

    def __init__(
        self, k_RHD: Tensor, v_RHV: Tensor, sends: Tensor, targets: Tensor, ends: Tensor,
        copied: Tensor, partners: Tensor, capacity: Tensor, group: str, stages: Sequence[int] = (1,),
    ) -> None:  # fmt: skip
        k_width, size = chunks(k_RHD), k_RHD.element_size()
        width = k_width + chunks(v_RHV)
        self._channel = channel(group, "push", int(capacity) * width * 16, k_RHD.device)
        self.rows = self._channel.rows(copied.shape[0], k_RHD, width * 16 // size)
        self._senders, self._receivers = partners, partners[1:]
        self._stages = len(stages)
        bounds = sum(bound << 8 * i for i, bound in enumerate(accumulate(stages)))
        self._arguments = (
            k_RHD.data_ptr(),
            v_RHV.data_ptr(),
            k_RHD.stride(0) * size // 16,
            v_RHV.stride(0) * size // 16,
            k_width,
            width,
            sends.data_ptr(),
            targets.data_ptr(),
            ends.data_ptr(),
            partners.data_ptr(),
            sum(stages),
            bounds,
        )

    def to_peers(self, shape: LaunchShape, stream: torch.cuda.Stream | None = None) -> None:
        """Write rows of this rank to all others, those that ranks need at once first. When it is done, all rows for
        this rank have arrived.

        Args:
            shape: WHOLE_GPU or FEW_BLOCKS.
            stream: where it runs, after all that is enqueued on the current stream so far; None: on the current one.
                With another stream the caller keeps k and v until the current one waits for it: memory that is freed
                is reused on the current stream at once.
        """
        if shape.blocks == 0:
            # Many blocks that wait for peers could keep out the kernels that the peers wait for.
            self._channel.signal_and_wait(stream, ARRIVED, signal=ARRIVED, ranks=self._receivers)
        self._launch(shape, stream, slice(self._stages), to_peers=True, waits=shape.blocks != 0)

    def own_rows(self, skip: int = 0, stages: slice | None = None) -> None:
        """Write rows of this rank to itself but for the first `skip`, on the current stream; only these stages. Stage 0
        is written on the main stream, before `wait_for_stage`."""
        self._launch(WHOLE_GPU, None, stages or slice(self._stages), to_peers=False, skip=skip)

    def wait_for_early_rows(self) -> None:
        """Wait, on the current stream, for the rows that this rank needs at once; after `own_rows`."""
        self._channel.signal_and_wait(None, SENT_EARLY, STARTED_CALL, ranks=self._senders)

    def wait_for_stage(self, stage: int) -> None:
        """Wait, on the current stream, for the heads of a stage; after `own_rows`."""
        flag = SENT if stage + 1 == self._stages else SENT_STAGE + stage
        self._channel.signal_and_wait(None, flag, STARTED_CALL, ranks=self._senders)

    def _launch(
        self,
        shape: LaunchShape,
        stream: torch.cuda.Stream | None,
        stages: slice,
        *,
        to_peers: bool,
        skip: int = 0,
        waits: bool = True,
    ) -> None:
        kernel = cuda.kernel("push_rows", self._channel.device, shape.macros)
        numbers = stages.start or 0, stages.stop, to_peers, skip
        self._channel.launch(kernel, shape, stream, *self._arguments, *numbers, waits=waits)


def dense_rows(x_RHD: Tensor) -> Tensor:
    """x with rows of 16-byte chunks without holes; rows themselves may lie apart."""
    row = x_RHD.stride(1) == x_RHD.shape[2] and x_RHD.stride(2) == 1
    aligned = x_RHD.stride(0) * x_RHD.element_size() % 16 == 0 and x_RHD.data_ptr() % 16 == 0
    return x_RHD if row and aligned else x_RHD.contiguous()


class Return:
    """Gradients of expanded rows on their way home: the caller writes `rows`, then calls `written` and `sum_up`, once,
    or once for each stage of heads. All ranks do it, in the same order. Each rank sums its rows' gradients, which lie
    in all ranks' memory (`csrc/return_rows.cu`).

    Args:
        expanded_EC: rows of the shape and dtype of the gradients.
        partners, capacity, holder_ptr, holders: of `push_route`; capacity is not 0.
        mxint15: what is summed is MXINT15 (`csrc/rows.cuh`).
        stream: as of `Push.to_peers`.
    Attributes:
        rows: (E, C). The caller writes there once it has waited for `stream`: until then peers may read what the call
            before returned.
    """

    def __init__(
        self, expanded_EC: Tensor, partners: Tensor, capacity: Tensor,
        holder_ptr: Tensor, holders: Tensor, group: str, mxint15: bool = False, stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        self._width, self._receivers = chunks(expanded_EC), partners[1:]
        self._lists = holder_ptr.data_ptr(), holders.data_ptr()
        self._capacity, self._slots = int(capacity), (0, 0)
        self._macros = ((cuda.DTYPES[expanded_EC.dtype], "1"), *cuda.MXINT15 * mxint15)
        self._channel = channel(group, "return", self._capacity * self._width * 16, expanded_EC.device)
        self._channel.signal_and_wait(stream, LEFT, CALL_BEFORE)
        self.rows = self._channel.rows(expanded_EC.shape[0], expanded_EC, expanded_EC.shape[1])

    def written(self, stream: torch.cuda.Stream | None = None) -> None:
        """Tell peers that `rows` are written, by what is enqueued on the current stream so far, and wait, on `stream`,
        for those ranks to write theirs that hold rows of this one."""
        self._channel.signal_and_wait(stream, WRITTEN, signal=WRITTEN, ranks=self._receivers)

    def pull(self, dk_RHD: Tensor, dv_RHV: Tensor, here: slice, stream: torch.cuda.Stream, *, listed: int = -1) -> None:
        """For each row in `here`, fetch the gradient of its first holder, while a kernel still works on dk and dv.
        Arguments as of `sum_up`, which comes later; `written` came before, on the same stream. The memory of own copies
        is used; where there are none, that of `rows`, which a rank without other keys does not write."""
        count = here.stop - here.start
        self._slots = (listed, count) if listed >= 0 else (0, min(count, self._capacity))
        self._launch(dk_RHD, dv_RHV, here, listed, (0, 1, 1), BESIDE, stream, pull=True)

    def sum_up(
        self,
        dk_RHD: Tensor,
        dv_RHV: Tensor,
        here: slice,
        stream: torch.cuda.Stream | None = None,
        *,
        listed: int = -1,
        heads: tuple[int, int, int] = (0, 1, 1),
        shape: LaunchShape = SHAPE,
    ) -> None:
        """Write dk and dv: fp32 sums over all ranks' `rows`, in a fixed order.

        Args:
            dk_RHD, dv_RHV: contiguous, in the gradient's dtype.
            here: these rows of dk and dv hold a gradient already, which is added.
            stream: as of `Push.to_peers`, and after `written` there.
            listed: the lists of rows `here` hold this rank's own copies, expanded rows from this one on, which are not
                read: what dk and dv hold is added in their place. -1: the lists don't.
            heads: (first, stop, of how many): only the gradients of these.
            shape: SHAPE or BESIDE.
        """
        self._launch(dk_RHD, dv_RHV, here, listed, heads, shape, stream)

    def _launch(
        self,
        dk_RHD: Tensor,
        dv_RHV: Tensor,
        here: slice,
        listed: int,
        heads: tuple[int, int, int],
        shape: LaunchShape,
        stream: torch.cuda.Stream | None,
        *,
        pull: bool = False,
    ) -> None:
        self._channel.launch(
            cuda.kernel("return_rows", self._channel.device, (*self._macros, *shape.macros)),
            shape,
            stream,
            *self._lists,
            dk_RHD.shape[0],
            dk_RHD.data_ptr(),
            dv_RHV.data_ptr(),
            chunks(dk_RHD),
            self._width,
            here.start,
            here.stop - here.start,
            (self._channel.rank << 32 | listed) if listed >= 0 else -1,
            *self._slots,
            pull,
            heads[2],
            heads[0],
            heads[1],
            waits=not pull,
        )


_MAX_RANKS = 32
"""The same in `csrc/peers.cuh`."""


@cache
def group_reasons(group: str) -> tuple[str, ...]:
    """Why rows of this group can't travel through symmetric memory; empty: they can. The same on all ranks.

    A collective call of all ranks of the group, the first time.
    """
    process_group = torch_internals.process_group(group)
    mine = _own_reasons(process_group)
    everyone: list[Any] = [None] * process_group.size()
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    dist.all_gather_object(everyone, (mine, socket.gethostname(), kind), group=process_group)
    return tuple(sorted(_joint_reasons(everyone)))


def _joint_reasons(everyone: Sequence[tuple[list[str], str, str]]) -> set[str]:
    """All ranks' own reasons, hosts and kinds of GPU."""
    whys, hosts, kinds = zip(*everyone, strict=True)
    found = {reason for why in whys for reason in why}
    if len(set(hosts)) > 1:
        found.add("the ranks are on several hosts")
    if len(set(kinds)) > 1:  # what gradients are rounded to on their way depends on it
        found.add(f"the ranks' GPUs are of several kinds: {', '.join(sorted(set(kinds)))}")
    return found


def row_reasons(dtype: torch.dtype, *columns: int) -> list[str]:
    """Why rows of these many elements (of k, and of v) can't travel so; empty: they can."""
    found: list[str] = []
    if dtype not in cuda.DTYPES:
        found.append(f"gradients are summed in bfloat16, float16 and float32 only, got {str(dtype)[6:]}")
    if any(count * dtype.itemsize % 16 for count in columns):
        found.append(f"rows must be whole 16-byte chunks, got {columns} elements of {dtype.itemsize} bytes")
    return found


def _own_reasons(group: dist.ProcessGroup) -> list[str]:
    if group.size() > _MAX_RANKS:
        return [f"more than {_MAX_RANKS} ranks"]
    found = cuda.reasons()
    if found:
        return found
    here = torch.cuda.current_device()
    peers = [i for i in range(torch.cuda.device_count()) if i != here]
    # With one visible device per process nothing is known about the others; mapping them tells.
    if not all(torch.cuda.can_device_access_peer(here, peer) for peer in peers):
        found.append("a GPU can't map another one's memory")
    return found
