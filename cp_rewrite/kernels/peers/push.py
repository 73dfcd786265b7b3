"""Each rank writes its rows into the expanded rows of all ranks that read them (`csrc/push_rows.cu`). The transpose:
each rank sums its rows' gradients, which lie in all ranks' memory (`csrc/return_rows.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda

from .channel import (
    ARRIVED,
    CALL_BEFORE,
    LEFT,
    SENT,
    SENT_EARLY,
    SENT_STAGE,
    STARTED_CALL,
    WRITTEN,
    LaunchShape,
    channel,
    chunks,
)

WHOLE_GPU = LaunchShape(0, 16)
FEW_BLOCKS = LaunchShape(16, 8)
"""To push while a kernel runs that fills every multiprocessor it gets."""
SHAPE = LaunchShape(0, 16, remote_warps=4)
BESIDE = LaunchShape(24, 16, remote_warps=8)
"""To return gradients while such a kernel runs."""


class Push:
    """One call of the exchange, from all ranks' k and v to everyone's expanded rows: `to_peers` and `own_rows`, in any
    order. All ranks make it, in the same order.

    Args:
        k_RHD, v_RHV: `dense_rows`.
        sends, targets, ends, copied, partners, capacity: of `push_route`; capacity is not 0.
        stages: rows travel in so many, of so many heads each, all heads together; the same on all ranks. (1,): at once.
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
        stages: Sequence[int] = (1,),
    ) -> None:
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
