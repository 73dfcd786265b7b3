"""SSD by kernels of fla: linear attention with a decay of each head, of queries C, keys B and values dt x.

Shapes: R rows, H heads of dim P, G groups, N numbers of a state for each of P, E runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dv, chunk_fwd_o
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from .chunk_gradients import chunk_gradients
from .runs import CHUNK, Runs


class Ssd:
    """SSD over packed runs. inputs: x, dt, A, B, C of `ops/states/whole.py`, of (1, R) rows."""

    def __init__(self, inputs: Sequence[Tensor], runs: Runs, *_: object) -> None:
        x, dt, self.rate, write, look = inputs
        self.runs, self.inputs = runs, inputs
        self.dt = runs.without_gaps(dt.float().clone()) if runs.gaps else dt.float()
        heads = x.shape[2]
        self.k, self.q = (t.repeat_interleave(heads // t.shape[2], 2) for t in (write, look))
        self.v = (x * self.dt.unsqueeze(-1)).to(x.dtype)
        self.decay = self.dt * self.rate.float()
        self.g = chunk_local_cumsum(self.decay, scale=RCP_LN2, **runs.packed)

    def summary(self, run: int) -> tuple[Tensor, Tensor]:
        """(H, 1, 1) what decays the state that enters a run, and (H, N, P) what the run adds, in fp32."""
        alone = {"cu_seqlens": self.runs.alone(run), "chunk_size": CHUNK}
        _, add = chunk_fwd_h(k=self.k, v=self.v, g=self.g, output_final_state=True, **alone)
        start, stop = self.runs.bounds[run]
        return self.decay[0, start:stop].sum(0).exp()[:, None, None], add[0]

    def out(self, states: Tensor | None) -> Tensor:
        """(1, R, H, P). states: (E, H, N, P) fp32, what enters each run; None: 0."""
        packed = {"cu_seqlens": self.runs.offsets, "chunk_size": CHUNK}
        h, _ = chunk_fwd_h(k=self.k, v=self.v, g=self.g, h0=states, **packed)
        return chunk_fwd_o(q=self.q, k=self.k, v=self.v, g=self.g, h=h, scale=1.0, **self.runs.packed)

    def begin_backward(self, dout: Tensor, states: Tensor | None) -> None:
        """What gradients need of what entered the runs."""
        self.do = dout.to(self.v.dtype)
        packed = {"cu_seqlens": self.runs.offsets, "chunk_size": CHUNK}
        self.h, _ = chunk_fwd_h(k=self.k, v=self.v, g=self.g, h0=states, states_in_fp32=True, **packed)

    def of_entry(self, run: int) -> Tensor:
        """(H, N, P): the gradient of the state that enters a run, of its own results alone."""
        zero = self.k.new_zeros(1, *self.k.shape[2:], self.v.shape[-1], dtype=torch.float32)
        return self._behind(self.runs.alone(run), zero, None)[1][0]

    def _behind(self, offsets: Tensor, states: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        return chunk_bwd_dh(
            q=self.q, k=self.k, v=self.v, g=self.g, do=self.do, h0=states, dht=ends, scale=1.0, cu_seqlens=offsets,
            chunk_size=CHUNK, states_in_fp32=True,
        )  # fmt: skip

    def gradients(self, ends: Tensor | None) -> list[Tensor]:
        """Of the inputs. ends: (E, H, N, P) fp32, gradients of the states that leave the runs; None: 0."""
        dh, _ = self._behind(self.runs.offsets, None, ends)
        dq, dk, _, dg = chunk_gradients(self.q, self.k, self.v, self.g, self.h, self.do, dh, None, self.runs, 1.0)
        dv = chunk_bwd_dv(q=self.q, k=self.k, g=self.g, do=self.do, dh=dh, scale=1.0, **self.runs.packed)
        dg = self.runs.without_gaps(chunk_local_cumsum(dg, reverse=True, **self.runs.packed))
        x, _, _, write, _ = self.inputs
        d_dt = (dv.float() * x).sum(-1) + dg * self.rate
        dk, dq = (t.unflatten(2, (write.shape[2], -1)).sum(3) for t in (dk, dq))
        found = dv.float() * self.dt.unsqueeze(-1), d_dt, (dg * self.dt).sum((0, 1)), dk, dq
        return [t.to(like.dtype) for t, like in zip(found, self.inputs, strict=True)]
