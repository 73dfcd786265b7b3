"""Python front of the row kernels in `csrc/`. On the CPU, and where cuda-core is missing, plain torch does the same.

Shapes: rows are 2-D, (rows, C) and contiguous; R rows of (H, D) heads in THD tensors; S steps.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import cuda, reference

# Measured best on an H200, see examples/bench/RESULTS.md.
_GATHER, _SUM = (128, 2), (64, 2)
"""Threads of a block, and chunks that each thread moves."""
_THREADS = 256
"""Threads of a block of the other kernels."""


@cache
def compiled() -> bool:
    """True if the kernels of `csrc/` run here."""
    return not cuda.reasons()


def gather_rows(src_NC: Tensor, rows_E: Tensor) -> Tensor:
    """(E, C): row `rows_E[i]` of `src_NC`; `rows_E` (E,) int32. `src_NC` may have gaps between its rows."""
    if not (src_NC.is_cuda and compiled()):
        return src_NC.index_select(0, rows_E)
    src_NC = src_NC if src_NC.stride(1) == 1 else src_NC.contiguous()
    size, columns = rows_E.shape[0], src_NC.shape[1]
    row_bytes, stride = columns * src_NC.element_size(), src_NC.stride(0) * src_NC.element_size()
    access = widest_access(row_bytes, stride, src_NC.data_ptr())
    out = src_NC.new_empty(size, columns)
    if out.numel() == 0 or access == 0:
        return src_NC.index_select(0, rows_E)
    width, (block, unroll) = row_bytes // access, _GATHER
    cuda.launch(
        cuda.kernel("gather_rows", src_NC.device, _macros(access, block, unroll)),
        -(-size * width // (block * unroll)),
        block,
        src_NC.device,
        src_NC.data_ptr(),
        out.data_ptr(),
        rows_E.data_ptr(),
        size,
        width,
        stride // access,
    )
    return out


def sum_rows(x_EC: Tensor, ptr: Tensor, rows: Tensor) -> Tensor:
    """(n, C) in fp32 (fp64 for fp64): row i is the sum of `x_EC` at `rows[2 i]` and `rows[2 i + 1]`, where these are
    not negative, and at `rows[ptr[i]:ptr[i + 1]]`, in that order.

    Args:
        ptr: (n + 1,) int32. rows: (at least 2 n,) int32.
    """
    x_EC = x_EC.contiguous()
    columns = x_EC.shape[1]
    access = widest_access(columns * x_EC.element_size(), x_EC.data_ptr())
    if not (x_EC.is_cuda and compiled()) or x_EC.dtype not in cuda.DTYPES or access < x_EC.element_size():
        return reference.sum_rows(x_EC, ptr, rows)
    # Vectors of fewer than 16 bytes are stored element by element: one element at a time then.
    access = access if access == 16 else x_EC.element_size()
    size, width = ptr.shape[0] - 1, columns * x_EC.element_size() // access
    out = x_EC.new_empty(size, columns, dtype=torch.float32)
    if out.numel() == 0:
        return out
    # The kernel loads pairs by 8 bytes.
    rows = rows if rows.data_ptr() % 8 == 0 else rows.clone()
    block, unroll = _SUM
    cuda.launch(
        cuda.kernel("sum_rows", x_EC.device, ((cuda.DTYPES[x_EC.dtype], "1"), *_macros(access, block, unroll))),
        -(-size * width // (block * unroll)),
        block,
        x_EC.device,
        x_EC.data_ptr(),
        out.data_ptr(),
        ptr.data_ptr(),
        rows.data_ptr(),
        size,
        width,
    )
    return out


def zero_gaps(out_RHD: Tensor, lse_HR: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """In place: rows of entries without a key become exact zeros, and -inf in lse (Hq, R) when it is given."""
    entries = cu_seqlens_q.shape[0] - 1
    row_bytes = out_RHD.shape[1:].numel() * out_RHD.element_size()
    access = widest_access(row_bytes, out_RHD.data_ptr())
    if out_RHD.numel() == 0:
        return
    if not (out_RHD.is_cuda and compiled()) or access == 0 or not out_RHD.is_contiguous():
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
        entries,
        row_bytes // access,
        0 if lse_HR is None else lse_HR.shape[0],
        out_RHD.shape[0],
    )


def merge_steps(outs_SRHD: Tensor, lses_SHR: Tensor) -> tuple[Tensor, Tensor]:
    """One attention output from steps over disjoint keys: out = Σ exp(lse_s - lse) out_s, lse = log Σ exp(lse_s).

    Args:
        outs_SRHD: (S, R, H, D) fp32 or fp64.
        lses_SHR: (S, H, R), the same; ±inf where a step saw no key: its weight is 0 and its output is not read.
    Returns:
        out (R, H, D), exact zeros where no step saw a key; lse (H, R), -inf there.
    """
    steps, rows, heads, dim = outs_SRHD.shape
    outs_SRHD, lses_SHR = outs_SRHD.contiguous(), lses_SHR.contiguous()
    access = 16 if widest_access(dim * outs_SRHD.element_size(), outs_SRHD.data_ptr()) == 16 else 4
    ready = outs_SRHD.is_cuda and compiled() and outs_SRHD.dtype == torch.float32
    if not ready or outs_SRHD.numel() == 0:
        return _merge_steps_torch(outs_SRHD, lses_SHR)
    out = outs_SRHD.new_empty(rows, heads, dim)
    lse = lses_SHR.new_empty(heads, rows)
    width = dim * outs_SRHD.element_size() // access
    device = outs_SRHD.device
    cuda.launch(
        cuda.kernel("merge_steps", device, (("DTYPE_FP32", "1"), ("ACCESS", str(access)))),
        min(-(-rows * heads * width // _THREADS), cuda.multiprocessors(device) * 32),
        _THREADS,
        device,
        outs_SRHD.data_ptr(),
        lses_SHR.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        steps,
        rows,
        heads,
        width,
    )
    return out, lse


def widest_access(*sizes: int) -> int:
    """The widest load and store, in bytes, that divides all sizes and addresses; 0: not even 2 bytes."""
    return next((n for n in (16, 8, 4, 2) if all(size % n == 0 for size in sizes)), 0)


def _macros(access: int, block: int, unroll: int) -> cuda.Macros:
    return ("ACCESS", str(access)), ("BLOCK", str(block)), ("UNROLL", str(unroll))


def _merge_steps_torch(outs_SRHD: Tensor, lses_SHR: Tensor) -> tuple[Tensor, Tensor]:
    lses = lses_SHR.masked_fill(lses_SHR == torch.inf, -torch.inf)
    lse = lses.logsumexp(0)
    weight = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)).transpose(1, 2)[..., None]
    return torch.where(weight > 0, outs_SRHD * weight, 0.0).sum(0), lse
