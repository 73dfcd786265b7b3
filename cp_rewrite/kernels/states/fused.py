"""Gated delta rules by kernels of FlashQLA, which do at once what fla does in steps, for head dims of 128.

FlashQLA compiles a kernel for each set of arguments that are given or not, in half a minute. So states are always
given, and zeros where there are none.

Shapes: R rows, Hk heads of queries and keys, H heads, K = V = 128 channels, E runs.
"""

from __future__ import annotations

from typing import Any

from flash_qla.ops.gated_delta_rule import chunk as qla
from torch import Tensor

from .delta import Delta
from .select import CHUNK


class Fused(Delta):
    """As `Delta`, by kernels that pass states and compute what chunks give of them at once."""

    per_log = None

    def factor(self) -> None:
        self.offsets = self._known(self.runs.offsets, self.runs.spans, self.runs.chunks)
        if not self.solved:
            self.solved = (qla.kkt_solve(self.k, self.beta, CHUNK, self.offsets),)
        self.keys: dict[str, Any] = {"k": self.k, "a": self.solved[0], "g": self.g, "b": self.beta}

    def summarize(self, move: Tensor, add: Tensor) -> None:
        first, middle = self.runs.cut_at_ends
        for runs in filter(None, (first, middle)):
            _, ends, moves = qla.fused_gdr_h(
                v=self.v, **self.keys, output_h=False, cu_seqlens=self._apart(runs),
                num_warmup_chunks=self._chunks(runs) if runs is middle else None,
            )  # fmt: skip
            for (_, piece), end, moved in zip(reversed(runs), ends[::2], moves[::2], strict=True):
                add[piece] = end
                if runs is middle:
                    move[piece] = moved

    def _chunks(self, runs: list[tuple[int, int]]) -> Tensor:
        """(…, H): of how many chunks, at its end, FlashQLA tells what moves the state that enters a sequence."""
        spans = [self.runs.span(run) for run, _ in reversed(runs)]
        counts = [count for first, behind in spans for count in (behind - first, 0)]
        return self.runs.numbers([[count] * self.v.shape[2] for count in counts[:-1]])

    def out(self, states: Tensor | None) -> Tensor:
        out, _, _ = qla.fused_gdr_fwd(
            q=self.q, v=self.v, **self.keys, scale=self.scale, initial_state=self._given(states),
            output_final_state=False, cu_seqlens=self.offsets,
        )  # fmt: skip
        return out

    def begin_backward(self, dout: Tensor, states: Tensor | None) -> None:
        self.do = dout
        self.h, _, _ = qla.fused_gdr_h(
            v=self.v, **self.keys, initial_state=self._given(states), output_final_state=False, cu_seqlens=self.offsets
        )

    def of_entries(self, found: Tensor) -> None:
        if self.runs.entered:
            offsets = self._apart(self.runs.entered)
            _, starts = qla.fused_gdr_dh(
                q=self.q, **self.keys, do=self.do, output_dh=False, scale=self.scale, cu_seqlens=offsets
            )
            for (_, piece), start in zip(reversed(self.runs.entered), starts[::2], strict=True):
                found[piece] = start

    def gradients(self, ends: Tensor | None) -> list[Tensor]:
        dq, dk, dv, dg, db, _ = qla.fused_gdr_bwd(
            q=self.q, v=self.v, **self.keys, do=self.do, dht=self._given(ends), h=self.h, scale=self.scale,
            cu_seqlens=self.offsets,
        )  # fmt: skip
        return self.of_inputs(dq, dk, dv, dg, db)

    def _given(self, states: Tensor | None) -> Tensor:
        """(E, H, K, V) in fp32."""
        shape = len(self.runs.bounds), *self.v.shape[2:], self.v.shape[-1]
        return self.g.new_zeros(shape) if states is None else states

    def _apart(self, runs: list[tuple[int, int]]) -> Tensor:
        offsets = self.runs.apart([run for run, _ in runs])
        return self._known(offsets, [0] * len(offsets), None)

    def _known(self, offsets: Tensor, spans: list[int], chunks: Tensor | None) -> Tensor:
        """`offsets` with what FlashQLA keeps with them; without it, it waits for the GPU to learn how many chunks there
        are. Where no state of a chunk is asked for, it needs nothing of them."""
        at: Any = offsets
        at._flash_qla_prepared_varlen = (CHUNK, self.runs.numbers(spans), spans[-1], chunks)
        return offsets
