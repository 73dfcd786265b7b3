"""Each rank writes its rows into the expanded rows of all ranks that read them. See `csrc/push_rows.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda

from .channel import ARRIVED, SENT, SENT_EARLY, SENT_STAGE, STARTED_CALL, LaunchShape, channel, chunks

WHOLE_GPU = LaunchShape(0, 16)
FEW_BLOCKS = LaunchShape(16, 8)
"""To run while a kernel runs that fills every multiprocessor it gets."""


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
