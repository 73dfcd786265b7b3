"""Rows exchanged through memory that all GPUs of one NVLink domain map: one kernel per direction, no messages.

Each direction has a `Channel`: symmetric memory with the ranks' flags and two slots that calls take in turn (see
`csrc/symm.cuh`), reused by all layers. Its size follows from numbers that are equal on all ranks, so all ranks grow it
in the same call. NVLink multicast is never used.

Shapes: R local rows, E expanded rows, C = Hkv * (D + V) columns, P ranks.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from . import cuda

_HEADER = 1024
_MAX_RANKS = 32
OWN, EARLY, LATE = 1, 2, 4
ALL = OWN | EARLY | LATE
"""Parts of a pull, in their order: own rows, to where peers read them and to where the kernel does; rows of peers for
early entries; those for late ones."""


@dataclass(frozen=True)
class Crew:
    """Args: blocks: 0 for one per multiprocessor. warps: of a block. remote: those of them that read peers."""

    blocks: int
    warps: int
    remote: int


_FULL, _LOCAL, _BESIDE = Crew(0, 16, 4), Crew(0, 16, 0), Crew(16, 24, 24)
"""All at once; own rows; peers' rows while a kernel runs that fills every multiprocessor it gets."""
_IN_FLIGHT = 4
"""16-byte loads in flight per lane."""
_ROOM = 1.25
"""A channel grows with room to spare: growing stops all ranks."""
_DTYPES = {torch.bfloat16: "DTYPE_BF16", torch.float16: "DTYPE_FP16", torch.float32: "DTYPE_FP32"}


@cache
def reasons(group: str) -> tuple[str, ...]:
    """Why rows of this group can't travel through symmetric memory; empty: they can. The same on all ranks.

    A collective call of all ranks of the group, the first time.
    """
    process_group = _resolve_process_group(group)
    mine = _own_reasons(process_group)
    everyone: list[Any] = [None] * process_group.size()
    dist.all_gather_object(everyone, (mine, socket.gethostname()), group=process_group)
    found = {reason for why, _ in everyone for reason in why}
    if len({host for _, host in everyone}) > 1:
        found.add("the ranks are on several hosts")
    return tuple(sorted(found))


def row_reasons(dtype: torch.dtype, *columns: int) -> list[str]:
    """Why rows of these many elements (of k, and of v) can't travel so; empty: they can."""
    found: list[str] = []
    if dtype not in _DTYPES:
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


@dataclass(eq=False)
class Channel:
    """Symmetric memory of one direction: flags, then two slots of `slot_bytes`. `state` counts the calls."""

    buffer: Tensor
    state: Tensor
    peers: int
    slot_bytes: int
    handle: Any


_channels: dict[tuple[str, str], Channel] = {}
_captured: set[Channel] = set()
"""Channels that CUDA graphs use, for good: replays read and write their memory, also after a larger one took over."""


def channel(group: str, direction: str, slot_bytes: int, device: torch.device) -> Channel:
    """The channel of a group and direction, with slots of at least `slot_bytes`: the same number on all ranks.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is being captured.
    """
    known = _channels.get((group, direction))
    capturing = torch.cuda.is_current_stream_capturing()
    if known is not None and known.slot_bytes >= slot_bytes:
        if capturing:
            _captured.add(known)
        return known
    if capturing:
        raise RuntimeError(
            f"the {direction} channel needs {slot_bytes} bytes per slot and a CUDA graph is being captured: "
            "run one step of full capacity before the capture"
        )
    process_group = _resolve_process_group(group)
    # Peers may still read the memory that is about to go.
    torch.cuda.synchronize(device)
    dist.barrier(process_group, device_ids=[device.index])
    _channels.pop((group, direction), None)
    grown = int(slot_bytes * (_ROOM if known is not None else 1.0))
    made = _channels[group, direction] = _make_channel(process_group, -(-grown // 4096) * 4096, device)
    return made


def _make_channel(group: dist.ProcessGroup, slot_bytes: int, device: torch.device) -> Channel:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(_HEADER + 2 * slot_bytes, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(buffer, group.group_name)
    buffer[:_HEADER].zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])
    state = torch.zeros(4, dtype=torch.int32, device=device)
    return Channel(buffer, state, handle.buffer_ptrs_dev, slot_bytes, handle)


def pull_rows(
    k_RHD: Tensor,
    v_RHV: Tensor,
    publish_rows: Tensor,
    job_source: Tensor,
    job_ptr: Tensor,
    job_rows: Tensor,
    remote_jobs: Tensor,
    early_jobs: Tensor,
    group: str,
    out: Tensor | None = None,
    parts: int = ALL,
    stream: torch.cuda.Stream | None = None,
) -> Tensor:
    """(E, C): the expanded rows, from all ranks' k and v. All ranks call it, in the same order.

    Args:
        publish_rows, job_source, job_ptr, job_rows, remote_jobs, early_jobs: of `pull.pull_route`, int32.
        out: the result's memory. parts: OWN, EARLY, LATE, or ALL.
        stream: where the kernel runs, after all that the current stream is told so far; None: the current one. On
            another, the caller keeps what the kernel reads until it is waited for, `dense_rows` of k and v where OWN
            is among the parts: memory given back is the current stream's to write at once.
    """
    process_group = _resolve_process_group(group)
    k, v = (dense_rows(k_RHD), dense_rows(v_RHV)) if parts & OWN else (k_RHD, v_RHV)
    device, size = k.device, k.element_size()
    k_width, v_width = _chunks(k), _chunks(v)
    width = k_width + v_width
    expanded: Tensor = k.new_empty(job_rows.shape[0], width * 16 // size) if out is None else out
    way = channel(group, "pull", k.shape[0] * width * 16, device)
    crew = _FULL if parts == ALL else _LOCAL if parts == OWN else _BESIDE
    _launch(
        cuda.kernel("pull_rows", device, _macros(crew)),
        crew,
        stream,
        device,
        k.data_ptr(),
        v.data_ptr(),
        cuda.u64(k.stride(0) * size // 16),
        cuda.u64(v.stride(0) * size // 16),
        cuda.u32(k_width),
        cuda.u32(width),
        publish_rows.data_ptr(),
        cuda.u32(publish_rows.shape[0]),
        job_source.data_ptr(),
        job_ptr.data_ptr(),
        job_rows.data_ptr(),
        cuda.u32(job_source.shape[0]),
        remote_jobs.data_ptr(),
        early_jobs.data_ptr(),
        cuda.u32(parts),
        cuda.u32(k.shape[0]),
        expanded.data_ptr(),
        *_meeting(way, process_group),
    )
    return expanded


def return_rows(
    grad_EC: Tensor,
    return_rows: Tensor,
    pull_ptr: Tensor,
    pull_rows: Tensor,
    capacity: int,
    heads: int,
    dims: tuple[int, int],
    group: str,
    stream: torch.cuda.Stream | None = None,
) -> tuple[Tensor, Tensor]:
    """dk (R, Hkv, D) and dv (R, Hkv, V) in the gradient's dtype: fp32 sums, in a fixed order, over all ranks' expanded
    rows. The transpose of `pull_rows`; all ranks call it, in the same order.

    Args:
        grad_EC: (E, C), gradients of this rank's expanded rows.
        return_rows, pull_ptr, pull_rows: of `pull.pull_route`. capacity: E of the rank that has most.
        heads, dims: Hkv and (D, V). stream: as of `pull_rows`; `grad_EC` must be contiguous then.
    """
    process_group = _resolve_process_group(group)
    grad = grad_EC.contiguous()
    device, rows = grad.device, pull_ptr.shape[0] - 1
    dk, dv = (grad.new_empty(rows, heads, dim) for dim in dims)
    width = _chunks(grad)
    way = channel(group, "return", capacity * width * 16, device)
    kernel = cuda.kernel("return_rows", device, ((_DTYPES[grad.dtype], "1"), *_macros(_FULL)))
    for part in (OWN, LATE):
        _launch(
            kernel,
            _FULL,
            stream,
            device,
            grad.data_ptr(),
            cuda.u32(width),
            return_rows.data_ptr(),
            cuda.u32(return_rows.shape[0]),
            pull_ptr.data_ptr(),
            pull_rows.data_ptr(),
            cuda.u32(rows),
            dk.data_ptr(),
            dv.data_ptr(),
            cuda.u32(_chunks(dk)),
            cuda.u32(part),
            *_meeting(way, process_group),
        )
    return dk, dv


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which rows travel beside kernels: its blocks go first."""
    return torch.cuda.Stream(device, priority=-1)


def _launch(kernel: Any, crew: Crew, stream: torch.cuda.Stream | None, device: torch.device, *args: Any) -> None:
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    # At most one block per multiprocessor: a block that waits must not keep out one that publishes.
    with torch.cuda.stream(stream):
        cuda.launch(kernel, crew.blocks or cuda.multiprocessors(device), 32 * crew.warps, device, *args)


def _meeting(way: Channel, group: dist.ProcessGroup) -> tuple[Any, ...]:
    """Where the ranks meet, the last arguments of both kernels."""
    rank, size = cuda.i32(group.rank()), cuda.i32(group.size())
    return way.peers, way.state.data_ptr(), rank, size, cuda.u64(way.slot_bytes)


def _macros(crew: Crew) -> cuda.Macros:
    return (("WARPS", str(crew.warps)), ("REMOTE_WARPS", str(crew.remote)), ("IN_FLIGHT", str(_IN_FLIGHT)))


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
