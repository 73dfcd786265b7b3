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


class Return:
    """Gradients of expanded rows on their way home: the caller writes `rows`, then calls `written` and `sum_up`, once,
    or once for each stage of heads. All ranks do it, in the same order.

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
        self,
        expanded_EC: Tensor,
        partners: Tensor,
        capacity: Tensor,
        holder_ptr: Tensor,
        holders: Tensor,
        group: str,
        mxint15: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
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
        """Fetch a peer's gradient, the first, of each row of `here`, while a kernel still works on dk and dv. Arguments
        as of `sum_up`, which comes later; `written` came before, on the same stream. The memory of own copies is used;
        where there are none, that of `rows`, which a rank without other keys does not write."""
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
