"""Python front of the row kernels in `csrc/`. On the CPU, and where cuda-core is missing, plain torch does the same.

Shapes: rows are 2-D, (rows, C) and contiguous; R rows of (H, D) heads in THD tensors; S steps.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import cuda, reference

# Measured best on an H200, see examples/bench/RESULTS.md.
_GATHER, _SUM, _SUM_FP32 = (128, 2), (64, 3), (64, 2)
"""Threads of a block, and chunks of each thread."""
_THREADS = 256
"""Threads of a block of the kernels that are not unrolled."""


@cache
def _compiled() -> bool:
    return not cuda.reasons()


def gather_rows(src_NC: Tensor, rows_E: Tensor) -> Tensor:
    """(E, C): row `rows_E[i]` of `src_NC`; `rows_E` (E,) int32. `src_NC` may have gaps between its rows."""
    size, columns = rows_E.shape[0], src_NC.shape[1]
    if not (src_NC.is_cuda and _compiled()):
        return src_NC.index_select(0, rows_E)
    src_NC = src_NC if src_NC.stride(1) == 1 else src_NC.contiguous()
    out = src_NC.new_empty(size, columns)
    access = _access(columns * src_NC.element_size(), src_NC.stride(0) * src_NC.element_size(), src_NC.data_ptr())
    if out.numel() == 0 or access == 0:
        return src_NC.index_select(0, rows_E)
    row_bytes, stride = columns * src_NC.element_size(), src_NC.stride(0) * src_NC.element_size()
    pointers = src_NC.data_ptr(), out.data_ptr(), rows_E.data_ptr(), cuda.u32(size)
    device = src_NC.device
    width = row_bytes // access
    kernel = cuda.kernel("gather_rows", device, _macros(access, *_GATHER))
    block, unroll = _GATHER
    grid = -(-size * width // (block * unroll))
    cuda.launch(kernel, grid, block, device, *pointers, cuda.u32(width), cuda.u64(stride // access))
    return out


def sum_rows(x_EC: Tensor, ptr: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(n, C): row i is the sum of `x_EC` at `rows[2 i]` and `rows[2 i + 1]`, where these are not negative, and at
    `rows[ptr[i]:ptr[i + 1]]`, in that order, in fp32 (fp64 for fp64).

    Args:
        ptr: (n + 1,) int32. rows: (at least 2 n,) int32.
        dtype: of the result; fp32 (fp64 for fp64) by default. x's own dtype rounds each sum once.
    """
    wide = torch.promote_types(x_EC.dtype, torch.float32)
    dtype = wide if dtype is None else dtype
    ready = x_EC.is_cuda and _compiled() and x_EC.dtype in cuda.DTYPES and dtype in (x_EC.dtype, torch.float32)
    x_EC = x_EC.contiguous()
    columns = x_EC.shape[1]
    access = _access(columns * x_EC.element_size(), x_EC.data_ptr())
    if not ready or access < x_EC.element_size():
        return reference.sum_rows(x_EC, ptr, rows).to(dtype)
    # Vectors of fewer than 16 bytes are stored element by element: one element at a time then.
    access = access if access == 16 else x_EC.element_size()
    size, width = ptr.shape[0] - 1, columns * x_EC.element_size() // access
    out = x_EC.new_empty(size, columns, dtype=dtype)
    if out.numel() == 0:
        return out
    # Pairs are loaded together, and lists may begin anywhere.
    rows = rows if rows.data_ptr() % 8 == 0 else rows.clone()
    block, unroll = _SUM_FP32 if dtype == torch.float32 else _SUM
    wider: cuda.Macros = (("OUT_FP32", "1"),) if dtype == torch.float32 else ()
    macros = ((cuda.DTYPES[x_EC.dtype], "1"), *_macros(access, block, unroll), *wider)
    cuda.launch(
        cuda.kernel("sum_rows", x_EC.device, macros),
        -(-size * width // (block * unroll)),
        block,
        x_EC.device,
        x_EC.data_ptr(),
        out.data_ptr(),
        ptr.data_ptr(),
        rows.data_ptr(),
        cuda.u32(size),
        cuda.u32(width),
    )
    return out


def zero_gaps(out_RHD: Tensor, lse_HR: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """In place: rows of entries without a key become exact zeros, and -inf in lse (Hq, R) when it is given."""
    entries = cu_seqlens_q.shape[0] - 1
    row_bytes = out_RHD[0].numel() * out_RHD.element_size() if out_RHD.shape[0] else 0
    access = _access(row_bytes, out_RHD.data_ptr())
    if out_RHD.numel() == 0:
        return
    if not (out_RHD.is_cuda and _compiled()) or access == 0 or not out_RHD.is_contiguous():
        lengths = cu_seqlens_q.diff().long()
        gap = torch.repeat_interleave(cu_seqlens_k.diff() == 0, lengths, output_size=out_RHD.shape[0])
        out_RHD.masked_fill_(gap.view(-1, *[1] * (out_RHD.ndim - 1)), 0)
        if lse_HR is not None:
            lse_HR.masked_fill_(gap, -torch.inf)
        return
    cuda.launch(
        cuda.kernel("zero_gaps", out_RHD.device, (("ACCESS", str(access)),)),
        (min(entries, 65535), 16),
        _THREADS,
        out_RHD.device,
        out_RHD.data_ptr(),
        0 if lse_HR is None else lse_HR.data_ptr(),
        cu_seqlens_q.data_ptr(),
        cu_seqlens_k.data_ptr(),
        cuda.u32(entries),
        cuda.u32(row_bytes // access),
        cuda.u32(0 if lse_HR is None else lse_HR.shape[0]),
        cuda.u32(out_RHD.shape[0]),
    )


def merge_steps(outs_SRHD: Tensor, lses_SHR: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """One attention output from steps over disjoint keys: out = Σ exp(lse_s - lse) out_s, lse = log Σ exp(lse_s).

    Args:
        outs_SRHD: (S, R, H, D). lses_SHR: (S, H, R) fp32; ±inf where a step saw no key: weight 0, its out is not read.
        dtype: of the output; that of `outs_SRHD` by default, or fp32.
    Returns:
        out (R, H, D), exact zeros where no step saw a key; lse (H, R) fp32, -inf there.
    """
    dtype = outs_SRHD.dtype if dtype is None else dtype
    steps, rows, heads, dim = outs_SRHD.shape
    outs_SRHD, lses_SHR = outs_SRHD.contiguous(), lses_SHR.contiguous()
    access = _access(dim * outs_SRHD.element_size(), outs_SRHD.data_ptr())
    ready = (
        outs_SRHD.is_cuda
        and _compiled()
        and outs_SRHD.dtype in cuda.DTYPES
        and dtype in (outs_SRHD.dtype, torch.float32)
    )
    if not ready or access < outs_SRHD.element_size() or outs_SRHD.numel() == 0:
        return _merge_steps_torch(outs_SRHD, lses_SHR, dtype)
    access = access if access == 16 else outs_SRHD.element_size()
    out = outs_SRHD.new_empty(rows, heads, dim, dtype=dtype)
    lse = lses_SHR.new_empty(heads, rows)
    macros = [(cuda.DTYPES[outs_SRHD.dtype], "1"), ("ACCESS", str(access))]
    macros += [("OUT_FP32", "1")] if dtype == torch.float32 else []
    width = dim * outs_SRHD.element_size() // access
    device = outs_SRHD.device
    cuda.launch(
        cuda.kernel("merge_steps", device, tuple(macros)),
        min(-(-rows * heads * width // _THREADS), cuda.multiprocessors(device) * 32),
        _THREADS,
        device,
        outs_SRHD.data_ptr(),
        lses_SHR.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        *(cuda.u32(n) for n in (steps, rows, heads, width)),
    )
    return out, lse


def dual_chunk_rank(
    cu_seqlens_padded: Tensor, cu_seqlens: Tensor, local_rows: int, world_size: int, rank: int
) -> tuple[Tensor, Tensor]:
    """The `dual_chunk` order of one rank, computed on the tensors' device without any copy to the host.

        world size 2, one document of 8    tokens 0 1 2 3 4 5 6 7    rank 0: 0 1 6 7    rank 1: 2 3 4 5

    Args:
        cu_seqlens_padded: (N + 1,) int32 physical offsets, lengths divisible by 2 · world_size.
        cu_seqlens: (N + 1,) int32 real lengths. local_rows: rows per rank, at least cu_seqlens_padded[-1] / world_size.
    Returns:
        tokens (local_rows,) int32, the global token of each local row, -1 past the last document;
        valid (N,) int32, real tokens of each document on this rank.
    """
    documents = cu_seqlens.shape[0] - 1
    if not (cu_seqlens.is_cuda and _compiled()):
        return _dual_chunk_rank_torch(cu_seqlens_padded, cu_seqlens, local_rows, world_size, rank)
    tokens, valid = cu_seqlens.new_empty(local_rows), cu_seqlens.new_empty(documents)
    cuda.launch(
        cuda.kernel("dual_chunk_rank", cu_seqlens.device, file="dual_chunk.cu"),
        max(1, -(-max(local_rows, documents) // _THREADS)),
        _THREADS,
        cu_seqlens.device,
        cu_seqlens_padded.data_ptr(),
        cu_seqlens.data_ptr(),
        tokens.data_ptr(),
        valid.data_ptr(),
        cuda.u32(documents),
        cuda.u32(local_rows),
        cuda.i32(world_size),
        cuda.i32(rank),
    )
    return tokens, valid


def dual_chunk_gathered(cu_seqlens_padded: Tensor, local_rows: int, world_size: int) -> Tensor:
    """(world_size · local_rows,) int32: where each global token lies in the all-gathered buffer (rank after rank).

    `gather_rows(gathered, this)` puts gathered rows back in their original order; the inverse of `dual_chunk_rank`
    on all ranks. Rows past the last document keep their place.
    """
    documents = cu_seqlens_padded.shape[0] - 1
    if not (cu_seqlens_padded.is_cuda and _compiled()):
        slots = torch.arange(local_rows * world_size, dtype=torch.int32, device=cu_seqlens_padded.device)
        for rank in range(world_size):
            tokens, _ = _dual_chunk_rank_torch(cu_seqlens_padded, cu_seqlens_padded, local_rows, world_size, rank)
            real = tokens >= 0
            slots[tokens[real].long()] = (torch.arange(local_rows, device=slots.device)[real] + rank * local_rows).int()
        return slots
    slots = cu_seqlens_padded.new_empty(local_rows * world_size)
    cuda.launch(
        cuda.kernel("dual_chunk_gathered", slots.device, file="dual_chunk.cu"),
        max(1, -(-slots.shape[0] // _THREADS)),
        _THREADS,
        slots.device,
        cu_seqlens_padded.data_ptr(),
        slots.data_ptr(),
        cuda.u32(documents),
        cuda.u32(local_rows),
        cuda.i32(world_size),
    )
    return slots


def _access(*sizes: int) -> int:
    """The widest access, in bytes, that divides all sizes and addresses; 0: not even 2 bytes."""
    return next((n for n in (16, 8, 4, 2) if all(size % n == 0 for size in sizes)), 0)


def _macros(access: int, block: int, unroll: int) -> cuda.Macros:
    return ("ACCESS", str(access)), ("BLOCK", str(block)), ("UNROLL", str(unroll))


def _merge_steps_torch(outs_SRHD: Tensor, lses_SHR: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(outs_SRHD.dtype, torch.float32)
    lses = lses_SHR.to(wide).masked_fill(lses_SHR == torch.inf, -torch.inf)
    lse = lses.logsumexp(0)
    weight = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)).transpose(1, 2)[..., None]
    out = torch.where(weight > 0, outs_SRHD.to(wide) * weight, 0.0).sum(0)
    return out.to(dtype), lse.to(lses_SHR.dtype)


def _dual_chunk_rank_torch(
    cu_padded: Tensor, cu: Tensor, local_rows: int, world_size: int, rank: int
) -> tuple[Tensor, Tensor]:
    starts, sizes = cu_padded[:-1], cu_padded.diff()
    t = torch.arange(local_rows, dtype=torch.int32, device=cu.device)
    document = torch.searchsorted(cu_padded, t * world_size, right=True).sub_(1)
    real = (document >= 0) & (document < sizes.shape[0])
    document = document.clamp(0, max(sizes.shape[0] - 1, 0))
    chunk = sizes // (2 * world_size)
    valid = torch.zeros_like(chunk)
    for part in (rank, 2 * world_size - 1 - rank):
        valid += (cu.diff() - part * chunk).clamp(min=0).minimum(chunk)
    if sizes.shape[0] == 0:
        return torch.full_like(t, -1), valid
    half, at = chunk[document], t - starts[document] // world_size
    shift = torch.where(at < half, rank, 2 * (world_size - 1) - rank)
    return torch.where(real, starts[document] + at + half * shift, -1).int(), valid
