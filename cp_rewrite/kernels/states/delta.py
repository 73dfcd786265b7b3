"""Delta rules by kernels of fla: a decay of each head (`gated_delta_rule`) or of each channel (`kimi_delta`).

Shapes: R rows, Hk heads of queries and keys, H heads, K and V head dims, E runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
from fla.ops.kda.wy_fast import recompute_w_u_fwd as recompute_kda_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from .gradients import add_gradients_of_weights, chunk_gradients
from .select import CHUNK, Runs


class Delta:
    """A gated delta rule over packed runs.

    Args:
        inputs: q, k, v, g, beta of `ops/states/ops.py`, of (1, R) rows. scale, l2norm: as there.
        kept: of one with the same inputs; none: computed anew.
    """

    per_log: float | None = RCP_LN2
    """Factor of decays: kernels of fla take powers of 2."""

    def __init__(
        self, inputs: Sequence[Tensor], runs: Runs, scale: float, l2norm: bool, kept: Sequence[Tensor] = ()
    ) -> None:
        q, k, v, g, beta = (x.contiguous() for x in inputs)
        self.runs, self.scale, self.inputs = runs, scale, inputs
        self.normed: Sequence[Tensor] = ()
        self.passed: tuple[Tensor, Tensor] | None = None
        self.passed_back: tuple[Tensor, Tensor] | None = None
        if l2norm:
            self.normed, kept = kept[:4] or (*l2norm_fwd(q), *l2norm_fwd(k)), kept[4:]
            q, _, k, _ = self.normed
        self.solved = kept
        self.q, self.k, self.v, self.beta = q, k, v, beta.float()
        self.g = chunk_local_cumsum(g.float(), scale=self.per_log, **runs.packed)
        self.factor()

    @property
    def kept(self) -> Sequence[Tensor]:
        """For a backward: with `l2norm` queries and keys (1, R, Hk, K), behind each its factors (1, R, Hk) in fp32; and
        what is solved in chunks (1, R, H, 64)."""
        return *self.normed, *self.solved

    def factor(self) -> None:
        """The WY form of all chunks, as arguments of the kernels that pass states."""
        given = {"k": self.k, "v": self.v, "g": self.g, "beta": self.beta}
        if self.solved:
            w, u = recompute_w_u_fwd(**given, A=self.solved[0], **self.runs.solved)
        else:
            w, u, inverse = chunk_gated_delta_rule_fwd_intra(**given, **self.runs.packed)
            self.solved = (inverse,)
        self.moved: dict[str, Any] = {"k": self.k, "w": w, "g": self.g}
        self.u, self.asked = u, self.q

    def summarize(self, move: Tensor, add: Tensor) -> None:
        """Write the summaries of pieces that continue elsewhere, in fp32: what moves the state that enters (N, H, K,
        K), and what is added (N, H, K, V). Nothing enters the first piece of a sequence: there that is the state that
        leaves.
        """
        first, middle = self.runs.cut_at_ends
        if self.runs.all_at_once(first, self.runs.entered):
            h, v, ends = self._pass(None, **self.runs.packed, output_final_state=True)
            self.passed = None if self.runs.entered else (h, v)
        else:
            ends = {run: self._pass(None, **self.runs.alone(run), output_final_state=True)[2][0] for run, _ in first}
        for run, piece in first:
            add[piece] = ends[run]
        if middle:
            self._map(middle, move, add)

    def _map(self, runs: list[tuple[int, int]], move: Tensor, add: Tensor) -> None:
        heads, values = self.v.shape[2:]
        channels = self.k.shape[-1]
        found = self.k.new_empty(2 * len(runs) - 1, heads, channels, values + channels, dtype=torch.float32)
        apart = self.runs.apart([run for run, _ in runs])
        chunk_cp_fwd_h(**self.moved, u=self.u, cu_seqlens=apart, chunk_size=CHUNK, hm=found, multi_seqs=True)
        for (_, piece), both in zip(reversed(runs), found[::2], strict=True):
            add[piece], move[piece] = both.split([values, channels], -1)

    def _pass(self, states: Tensor | None, **how: Any) -> tuple[Tensor, Tensor, Any]:
        """States before chunks (1, C, H, K, V), corrected values (1, R, H, V), and what leaves runs, if asked for."""
        return chunk_gated_delta_rule_fwd_h(**self.moved, u=self.u, initial_state=states, **how)

    def out(self, states: Tensor | None) -> Tensor:
        """(1, R, H, V). states: (E, H, K, V) fp32, what enters each run; None: 0."""
        return self.read(*(self.passed or self._pass(states, **self.runs.packed)[:2]))

    def read(self, h: Tensor, v: Tensor) -> Tensor:
        """Results, from states before chunks and corrected values."""
        return chunk_fwd_o(q=self.q, k=self.k, v=v, h=h, g=self.g, scale=self.scale, **self.runs.packed)

    def begin_backward(self, dout: Tensor, states: Tensor | None) -> None:
        """Compute what gradients need of the states that entered the runs."""
        self.do = dout
        self.h, self.v_new, _ = self._pass(states, **self.runs.packed)
        self.dv = self.inside()

    def inside(self) -> Tensor:
        """(1, R, H, V): gradients of corrected values, of results in the same chunk."""
        return chunk_bwd_dv_local(q=self.q, k=self.k, g=self.g, do=self.do, scale=self.scale, **self.runs.packed)

    def of_entries(self, found: Tensor) -> None:
        """Write (N, H, K, V): gradients of the states that enter cut pieces, of the pieces' own results alone."""
        runs, state = self.runs, found.shape[1:]
        if runs.all_at_once(runs.entered, runs.left):
            dh, starts, dv = self._back(None, found.new_empty(len(runs.bounds), *state), **runs.packed)
            self.passed_back = None if runs.left else (dh, dv)
        else:
            one = found.new_empty(1, *state)
            starts = {run: self._back(None, one, **runs.alone(run))[1][0] for run, _ in runs.entered}
        for run, piece in runs.entered:
            found[piece] = starts[run]

    def _back(self, ends: Tensor | None, starts: Tensor | None, **how: Any) -> tuple[Tensor, Any, Tensor]:
        """Gradients of states behind chunks, of those that enter runs, if `starts` has their shape, and of corrected
        values."""
        return chunk_gated_delta_rule_bwd_dhu(
            **self.moved, q=self.asked, do=self.do, dv=self.dv, h0=starts, dht=ends, scale=self.scale, **how
        )

    def gradients(self, ends: Tensor | None) -> list[Tensor]:
        """Gradients of the inputs. ends: (E, H, K, V) fp32, gradients of the states that leave the runs; None: 0."""
        dh, dv = self.passed_back or self._back(ends, None, **self.runs.packed)[::2]
        dq, dk, dv, db, dg = self.of_chunks(dh, dv)
        return self.of_inputs(dq, dk, dv, dg, db)

    def of_inputs(self, dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, db: Tensor) -> list[Tensor]:
        """Gradients of the inputs, from those of q and k with Hk or H heads, after their norms, and of the sums of
        decays."""
        dq, dk = _summed(dq, self.q), _summed(dk, self.k)
        dg = chunk_local_cumsum(dg, reverse=True, **self.runs.packed)
        if self.normed:
            dq, dk = l2norm_bwd(*self.normed[:2], dq), l2norm_bwd(*self.normed[2:], dk)
        return [x.to(like.dtype) for x, like in zip((dq, dk, dv, dg, db), self.inputs, strict=True)]

    def of_chunks(self, dh: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q and k with Hk or H heads, of v, beta and of the sums of decays, from those of states and
        corrected values."""
        dq, dk, dw, dg = chunk_gradients(
            self.q, self.k, self.v_new, self.g, self.h, self.do, dh, dv, self.runs, self.scale
        )
        wy_dk, dv, db, wy_dg = prepare_wy_repr_bwd(
            k=self.k, v=self.v, beta=self.beta, g=self.g, A=self.solved[0], dw=dw, du=dv, **self.runs.solved
        )
        return dq, _summed(dk, self.k).add_(wy_dk), dv, db, dg.add_(wy_dg)


class Kimi(Delta):
    """The same with a decay of each channel."""

    def __init__(self, inputs: Sequence[Tensor], runs: Runs, *how: Any) -> None:
        # Kernels of fla multiply rows behind a run by 0, which leaves NaN of padding NaN.
        super().__init__([runs.clean(x) for x in inputs], runs, *how)

    def begin_backward(self, dout: Tensor, states: Tensor | None) -> None:
        super().begin_backward(self.runs.clean(dout), states)

    def factor(self) -> None:
        given = {"q": self.q, "k": self.k, "v": self.v, "gk": self.g, "beta": self.beta}
        if self.solved:
            w, u, asked, k = recompute_kda_fwd(**given, A=self.solved[1], **self.runs.solved)
        else:
            w, u, asked, k, *self.solved = chunk_kda_fwd_intra(
                **given, scale=self.scale, disable_recompute=True, **self.runs.packed
            )
        self.moved = {"k": k, "w": w, "gk": self.g}
        self.u, self.asked = u, asked

    def read(self, h: Tensor, v: Tensor) -> Tensor:
        return chunk_gla_fwd_o_gk(q=self.q, v=v, g=self.g, A=self.solved[0], h=h, scale=self.scale, **self.runs.packed)

    def inside(self) -> Tensor:
        self.d_weights, dv = chunk_kda_bwd_dAv(
            q=self.q, k=self.k, v=self.v_new, do=self.do, A=self.solved[0], scale=self.scale, **self.runs.packed
        )
        return dv

    def of_chunks(self, dh: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv, db, dg, dA = chunk_kda_bwd_wy_dqkg_fused(
            q=self.q, k=self.k, v=self.v, v_new=self.v_new, g=self.g, beta=self.beta, A=self.solved[1], h=self.h,
            do=self.do, dh=dh, dv=dv, scale=self.scale, **self.runs.packed,
        )  # fmt: skip
        add_gradients_of_weights(self.q, self.k, self.g, self.beta, self.d_weights, dA, dq, dk, dg, db, self.runs)
        return dq, dk, dv, db, dg


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """Sums (1, R, Hk, K) over the heads of x (1, R, H, K) that share one of `like`; x itself where none do."""
    return x if x.shape[2] == like.shape[2] else x.unflatten(2, (like.shape[2], -1)).sum(3)
