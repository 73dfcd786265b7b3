"""SSD by kernels of fla: linear attention with a decay of each head, of queries C, keys B and values dt x.

Shapes: R rows, H heads of dim P, G groups, N numbers of a state for each of P, E runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fla.ops.common.chunk_h import chunk_bwd_kernel_dh, chunk_fwd_kernel_h
from fla.ops.common.chunk_o import chunk_bwd_dv, chunk_fwd_o
from fla.ops.utils import chunk_local_cumsum, prepare_chunk_offsets
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor
from triton import cdiv

from .gradients import chunk_gradients
from .select import CHUNK, Runs


class Ssd:
    """SSD over packed runs. inputs: x, dt, A, B, C of `ops/states/ops.py`, of (1, R) rows."""

    def __init__(self, inputs: Sequence[Tensor], runs: Runs, *_: object) -> None:
        x, dt, self.rate, write, look = inputs
        self.runs, self.inputs, self.kept = runs, inputs, ()
        self.dt = runs.clean(dt.float())
        heads = x.shape[2]
        self.k, self.q = (t.repeat_interleave(heads // t.shape[2], 2) for t in (write, look))
        self.v = (x * self.dt.unsqueeze(-1)).to(x.dtype)
        self.decay = self.dt * self.rate.float()
        self.g = chunk_local_cumsum(self.decay, scale=RCP_LN2, **runs.packed)

    def summarize(self, move: Tensor, add: Tensor) -> None:
        """Write what pieces do that are cut at their end, in fp32: what decays the state that enters (N, H, 1, 1), and
        what is added (N, H, N, P)."""
        self.h, ends = self._pass(None, self.k.dtype)
        for run, piece in self.runs.left:
            start, stop = self.runs.bounds[run]
            move[piece], add[piece] = self.decay[0, start:stop].sum(0).exp()[:, None, None], ends[run]

    def out(self, states: Tensor | None) -> Tensor:
        """(1, R, H, P). states: (E, H, N, P) fp32, what enters each run; None: 0."""
        self._decayed(self.h, states, self.runs.entered, from_behind=False)
        return chunk_fwd_o(q=self.q, k=self.k, v=self.v, g=self.g, h=self.h, scale=1.0, **self.runs.packed)

    def begin_backward(self, dout: Tensor, states: Tensor | None) -> None:
        """Compute what gradients need of the states that entered the runs."""
        self.do = dout.to(self.v.dtype)
        self.h, _ = self._pass(states, torch.float32)

    def of_entries(self, found: Tensor) -> None:
        """Write (N, H, N, P): gradients of the states that enter cut pieces, of the pieces' own results alone."""
        self.dh, starts = self._back()
        for run, piece in self.runs.entered:
            found[piece] = starts[run]

    def _decayed(self, h: Tensor, states: Tensor | None, runs: list[tuple[int, int]], from_behind: bool) -> None:
        """Add to states of chunks (1, C, H, N, P), in place, what is left there of the states (E, H, N, P) at starts
        of some runs, or at their ends."""
        for run, _ in runs:
            assert states is not None
            first, stop = self.runs.span(run)
            start, end = self.runs.bounds[run]
            whole = self.g[0, start + CHUNK - 1 : end : CHUNK]  # of each chunk, all of its decay
            chunks = torch.cat([whole, self.g[0, end - 1 : end]])[: stop - first]
            between = (chunks.flip(0).cumsum(0).flip(0) if from_behind else chunks.cumsum(0)) - chunks
            h[0, first:stop].addcmul_(between.exp2()[..., None, None].to(h.dtype), states[run].to(h.dtype))

    def _pass(self, states: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """States before chunks (1, C, H, N, P), and those (E, H, N, P) that leave the runs, if any is cut there. fla's
        own function for this waits for the GPU, to learn how many chunks there are."""
        (_, _, heads, state), (values, runs) = self.k.shape, (self.v.shape[-1], len(self.runs.bounds))
        h = self.k.new_empty(1, len(self.runs.chunks), heads, state, values, dtype=dtype)
        ends = h.new_empty(runs, heads, state, values, dtype=torch.float32) if self.runs.left else None
        chunk_fwd_kernel_h[self._grid](
            k=self.k, v=self.v, h=h, g=self.g, h0=states, ht=ends, **self._sizes(), USE_G=True, USE_GK=False,
        )  # fmt: skip
        return h, ends

    def _back(self) -> tuple[Tensor, Any]:
        """Gradients of states behind chunks, and of those that enter the runs, where none leaves."""
        (_, _, heads, state), (values, runs) = self.k.shape, (self.v.shape[-1], len(self.runs.bounds))
        dh = self.h.new_empty(self.h.shape)
        starts = dh.new_empty(runs, heads, state, values) if self.runs.entered else None
        chunk_bwd_kernel_dh[self._grid](
            q=self.q, do=self.do, dh=dh, g=self.g, dht=None, dh0=starts, scale=1.0, HQ=heads, NG=1, **self._sizes(),
            USE_G=True, USE_GK=False,
        )  # fmt: skip
        return dh, starts

    def _grid(self, meta: dict[str, int]) -> tuple[int]:
        blocks = cdiv(self.k.shape[3], meta["BK"]) * cdiv(self.v.shape[3], meta["BV"])
        return (blocks * len(self.runs.bounds) * self.k.shape[2],)

    def _sizes(self) -> dict[str, Any]:
        """Arguments of both kernels."""
        offsets = self.runs.offsets
        none = dict.fromkeys(("g_gamma", "gk", "gv"))
        return none | {
            "cu_seqlens": offsets, "split_offsets": prepare_chunk_offsets(offsets, CHUNK), "T": self.k.shape[1],
            "H": self.k.shape[2], "K": self.k.shape[3], "V": self.v.shape[3], "BT": CHUNK, "BS": CHUNK,
            "USE_G_GAMMA": False, "USE_GV": False, "STATE_V_FIRST": False,
        }  # fmt: skip

    def gradients(self, ends: Tensor | None) -> list[Tensor]:
        """Gradients of the inputs. ends: (E, H, N, P) fp32, gradients of the states that leave the runs; None: 0."""
        dh = self.dh
        self._decayed(dh, ends, self.runs.left, from_behind=True)
        dq, dk, _, dg = chunk_gradients(self.q, self.k, self.v, self.g, self.h, self.do, dh, None, self.runs, 1.0)
        dv = chunk_bwd_dv(q=self.q, k=self.k, g=self.g, do=self.do, dh=dh, scale=1.0, **self.runs.packed)
        dg = self.runs.without_gaps(chunk_local_cumsum(dg, reverse=True, **self.runs.packed))
        x, _, _, write, _ = self.inputs
        d_dt = (dv.float() * x).sum(-1) + dg * self.rate
        dk, dq = (t.unflatten(2, (write.shape[2], -1)).sum(3) for t in (dk, dq))
        found = dv.float() * self.dt.unsqueeze(-1), d_dt, (dg * self.dt).sum((0, 1)), dk, dq
        return [t.to(like.dtype) for t, like in zip(found, self.inputs, strict=True)]
