"""Packed attention whose rows travel through symmetric memory while the kernel works on what needs none of them.
It reads them, and writes their gradients, where they travel to and from: nothing is copied. Keys that lie side by side
in the local rows are not even sent (`push.py`).

    forward     own rows      | early entries' kernel   | late entries' kernel, as the GPU empties
                rows for them | rows of the late entries

    backward    own rows, sums of out * dout | kernel | rounding of dq
                rows of peers                |        | gradients go home

Where all of a rank's keys are read in place its kernels wait for nothing, and gradients of them are written in place.

Only for kernels whose `Capabilities` say `overlaps_exchange`; others exchange first (`packed_attention`). Results are
the same bit for bit, for the same kernels read the same rows. The exception is `unrounded_gradients` of keys: parts of
them travel as MXINT15 (`csrc/rows.cuh`) and come out nearer to those of one GPU.

Shapes: R local rows, E expanded rows, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import peers
from cp_rewrite.kernels.flash.overlap import BackwardOverlap, ForwardOverlap
from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import capabilities, load
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.planning.routes.push import NAMES

from .merge import add_sinks, sinks_gradient
from .push_rows import PUSHED, RETURNED, STAGES, zero_others
from .rows import split_kv
from .saved import Saved, fake_results, no_gradients

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::pushed_attention", mutates_args=())
def pushed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    route: Sequence[Tensor],
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    keep_kv: bool,
    group: str,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`packed_attention` with its exchange: (out, lse, kv). `route` is in the order of `push.NAMES`; kv (E, C) are the
    expanded rows with `keep_kv` (not where all is in place), else (0, C): they are pushed again in the backward."""

    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    cut, *rest = route[STAGES]
    *where, early, awaited = cut.tolist()
    copied, _, capacity, place, *_ = route[RETURNED]
    source, some, whole = place.tolist()
    main, side = torch.cuda.current_stream(q.device), peers.side_stream(q.device)
    # Copies, where rows have holes, must outlive what the second stream does.
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    keys = near = k[source : source + some + whole], v[source : source + some + whole]
    kv = k.new_empty(copied.shape[0] if keep_kv else 0, k.shape[1] * (k.shape[2] + v.shape[2]))
    if int(capacity):
        with nvtx("exchange"):
            push = _push(k, v, route, peers.FEW_BLOCKS, group, side, 0 if keep_kv else some)
            if keep_kv:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    kv.copy_(push.rows)
            if awaited:
                push.wait_for_early_rows()
        keys = near if whole else split_kv(push.rows, k.shape[1], k.shape[2], v.shape[2])
    overlap = None
    if where[0]:
        overlap = ForwardOverlap(tuple(where), early, (rest[0], rest[1]), side, near if some else None)
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, *keys, tables, params, overlap)
    if int(capacity):
        main.wait_stream(side)
    return (out, lse, kv) if sinks is None else (*add_sinks(out, lse, sinks), kv)


@pushed_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    route: Sequence[Tensor],
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    keep_kv: bool,
    group: str,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = route[NAMES.index("copied")].shape[0] if keep_kv else 0
    return *fake_results(q, v), k.new_empty(rows, k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::pushed_attention_backward", mutates_args=())
def pushed_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    route: Sequence[Tensor],
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (R, Hq, D), dk (R, Hkv, D) and dv (R, Hkv, V) of this rank's rows, in their dtypes; kv: if it was kept."""

    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    _, partners, capacity, place, holder_ptr, holders = route[RETURNED]
    source, _, whole = place.tolist()
    here = slice(source, source + whole)
    main, side = torch.cuda.current_stream(q.device), peers.side_stream(q.device)
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    mxint15 = bool(int(capacity)) and capabilities(kernel).unrounded_gradients(q, k.shape[1])
    rows: Tensor | None = None
    if int(capacity):
        if kv is None:
            with nvtx("exchange"):
                kv = _push(k, v, route, peers.FEW_BLOCKS if whole else peers.WHOLE_GPU, group, side).rows
        rows = peers.gradient_rows(kv, capacity, group, side)
    if rows is None or whole:
        sums = [x.new_empty(x.shape) for x in (k, v)]
        holders_here = holder_ptr[source : source + whole + 1]
        keys, grads = (k[here], v[here]), (sums[0][here], sums[1][here])
        overlap = BackwardOverlap(grads, mxint15=mxint15, holder_ptr=holders_here)
    else:
        sums = []  # made when the kernel has given its memory back
        keys, grads = (split_kv(x, k.shape[1], k.shape[2], v.shape[2]) for x in (kv, rows))
        overlap = BackwardOverlap(grads, partial(main.wait_stream, side), mxint15=mxint15)

    def send_home(rows: Tensor) -> None:
        sums.extend(x.new_empty(x.shape) for x in (k, v)[len(sums) :])
        with nvtx("exchange_backward"):
            lists = partners, capacity, here, holder_ptr, holders
            peers.return_rows(rows, *lists, sums[0], sums[1], group, side, mxint15)

    if rows is None:
        zero_others(sums, here)
    else:
        overlap = replace(overlap, gradients_written=partial(send_home, rows))
    with nvtx("attention_backward"):
        dq, _, _ = load(kernel).backward(dout, q, *keys, out, lse, tables, params, overlap)
    if rows is not None:
        main.wait_stream(side)
    return dq, sums[0], sums[1]


def _push(
    k: Tensor,
    v: Tensor,
    route: Sequence[Tensor],
    shape: peers.LaunchShape,
    group: str,
    side: torch.cuda.Stream,
    skip: int = 0,
) -> peers.Push:
    """An exchange on its way; rows of peers are here when `side` is waited for. Own rows but for the first `skip`."""

    push = peers.Push(k, v, *route[PUSHED], group=group)
    # Enqueued before the kernel, which fills every multiprocessor it gets.
    push.to_peers(shape, side)
    push.own_rows(skip)
    return push


@pushed_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *tables = inputs[:7]
    route, ctx.numbers, keep_kv, ctx.group, sinks = inputs[7], inputs[8:12], *inputs[12:]
    out, lse, kv = output
    ctx.mark_non_differentiable(lse, kv)
    Saved(q, k, v, out, lse, tables, route, kv if keep_kv else None, sinks).keep(ctx)


def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    x = Saved.of(ctx)
    dsinks = None if x.sinks is None else sinks_gradient(dout, x.out, x.lse, x.sinks)
    dq, dk, dv = _ops.pushed_attention_backward.default(
        dout, x.q, x.k, x.v, x.kv, x.out, x.lse, *x.tables, x.route, *ctx.numbers, ctx.group
    )
    return dq, dk, dv, *([None] * 4), no_gradients(ctx), *([None] * 6), dsinks


pushed_attention.register_autograd(_backward, setup_context=_setup_context)
