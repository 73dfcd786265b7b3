"""The transpose of a push: each rank sums the gradients of its rows that lie in all ranks' memory. See
`csrc/return_rows.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda

from .channel import CALL_BEFORE, LEFT, WRITTEN, LaunchShape, channel, chunks

SHAPE = LaunchShape(0, 16, remote_warps=4)
BESIDE = LaunchShape(24, 16, remote_warps=8)
"""To run while a kernel runs that fills every multiprocessor it gets."""


def gradient_rows(expanded_EC: Tensor, capacity: Tensor, group: str, stream: torch.cuda.Stream | None = None) -> Tensor:
    """(E, C): where `return_rows` reads the gradients of expanded rows. The caller writes them there once it waits for
    `stream`: until then peers may read what the call before returned. All ranks call both functions, in turns."""
    rows, columns = expanded_EC.shape
    memory = channel(group, "return", int(capacity) * chunks(expanded_EC) * 16, expanded_EC.device)
    memory.signal_and_wait(stream, LEFT, CALL_BEFORE)
    return memory.rows(rows, expanded_EC, columns)


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
    heads: tuple[int, int, int] = (0, 1, 1),
    shape: LaunchShape = SHAPE,
    listed: int = -1,
) -> None:
    """Write dk and dv: fp32 sums over all ranks' expanded rows, in a fixed order. All ranks call it, in one order.

    Args:
        grad_EC: (E, C), of `gradient_rows`, written.
        partners, capacity, holder_ptr, holders: of `push_route`, with capacity > 0.
        here: these rows of dk and dv hold a gradient already, which is added.
        dk_RHD, dv_RHV: contiguous, in the gradient's dtype. stream: as of `Push.to_peers`.
        mxint15: what is summed is MXINT15 (`csrc/rows.cuh`).
        heads: (first, stop, of how many): only the gradients of these; then one call for each stage. shape: SHAPE or
            BESIDE.
        listed: the lists of rows `here` hold this rank's own copies, expanded rows from this one on, which are not
            read: what dk and dv hold is added in their place. -1: the lists don't.
    """
    width = chunks(grad_EC)
    memory = channel(group, "return", int(capacity) * width * 16, grad_EC.device)
    memory.signal_and_wait(stream, WRITTEN, signal=WRITTEN, ranks=partners[1:])
    dtypes = ((cuda.DTYPES[grad_EC.dtype], "1"), *cuda.MXINT15 * mxint15)
    memory.launch(
        cuda.kernel("return_rows", memory.device, (*dtypes, *shape.macros)),
        shape,
        stream,
        holder_ptr.data_ptr(),
        holders.data_ptr(),
        dk_RHD.shape[0],
        dk_RHD.data_ptr(),
        dv_RHV.data_ptr(),
        chunks(dk_RHD),
        width,
        here.start,
        here.stop - here.start,
        (memory.rank << 32 | listed) if listed >= 0 else -1,
        *(heads[i] for i in (2, 0, 1)),
        waits=False,
    )
