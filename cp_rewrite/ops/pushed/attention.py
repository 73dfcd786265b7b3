"""Packed attention whose rows travel through symmetric memory while the kernel works on what needs none of them.

The kernel reads expanded rows where peers write them, and writes gradients where peers read them: nothing is copied.
Keys that lie side by side in the local rows are read in place (`planning/routes/push.py`).

    forward     own rows      | early entries' kernel   | late entries' kernel, as the GPU empties
                rows for them | rows of the late entries

    backward    own rows, sums of out * dout | kernel | rounding of dq
                rows of peers                |        | gradients go home

Where rows travel longer than that, they and the kernel run in stages of heads (`stages.py`).

Where all of a rank's keys are read in place its kernels wait for nothing, and gradients of them are written in place.

Only for kernels whose `Capabilities` say `overlaps_exchange`; others exchange first (`packed_attention`). Results are
the same bit for bit, for the same kernels read the same rows. The exception is `unrounded_gradients` of keys: parts of
them travel as MXINT15 (`csrc/rows.cuh`) and come out nearer to those of one GPU.

Shapes: R local rows, E expanded rows, Hq query and Hkv key heads, D and V head dims, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import cuda, peers
from cp_rewrite.kernels.flash.overlap import BackwardOverlap, ForwardOverlap
from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import capabilities, load
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.ops.local_rows import split_kv
from cp_rewrite.ops.merge import finished, sinks_gradient
from cp_rewrite.ops.one_sided import zero_others
from cp_rewrite.ops.schemas import bind, call, fake_results, gradients, keep, kept
from cp_rewrite.planning.columns import PlaceRow, StageRow
from cp_rewrite.planning.routes.push import PUSH
from cp_rewrite.torch_internals import call_directly

from . import stages

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
    """`packed_attention` with its exchange: (out, lse, kv). `route` holds the tensors of `PUSH`. With `keep_kv` kv are
    the expanded rows, (E, C), none where all is in place; else (0, C): they are pushed again in the backward."""
    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    x = PUSH.bind(route)
    stage, at = StageRow(*x.stages.tolist()), PlaceRow(*x.place.tolist())
    main, side = cuda.current_stream(q.device), peers.side_stream(q.device)
    # Copies, where rows have holes, must outlive what the second stream does.
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    in_place = slice(at.source, at.source + at.early + at.whole)
    keys = near = k[in_place], v[in_place]
    kv = k.new_empty(x.copied.shape[0] if keep_kv else 0, k.shape[1] * (k.shape[2] + v.shape[2]))
    if len(sizes := stages.forward_sizes(q, k, v, x)) > 1:
        out, lse = stages.forward(q, k, v, tables, params, x, kernel, kv, group, sizes)
        return *finished(out, lse, tables, sinks), kv
    if int(x.capacity):
        with nvtx("exchange"):
            push = _push(k, v, x, peers.FEW_BLOCKS, group, side, 0 if keep_kv else at.early)
            if keep_kv:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    kv.copy_(push.rows)
            if stage.awaited:
                push.wait_for_early_rows()
        keys = near if at.whole else split_kv(push.rows, k.shape[1], k.shape[2], v.shape[2])
    overlap = None
    if stage.entries:
        cut, rest = (stage.entries, stage.queries, stage.keys), (x.rest_cu_seqlens_q, x.rest_cu_seqlens_k)
        overlap = ForwardOverlap(cut, stage.early, rest, side, near if at.early else None)
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, *keys, tables, params, overlap)
    if int(x.capacity):
        main.wait_stream(side)
    return *finished(out, lse, tables, sinks), kv


@pushed_attention.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = bind(_ops.pushed_attention.default, inputs)
    rows = PUSH.bind(x.route).copied.shape[0] if x.keep_kv else 0
    return *fake_results(x.q, x.v), x.k.new_empty(rows, x.k.shape[1] * (x.k.shape[2] + x.v.shape[2]))


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

    def run(keys: Sequence[Tensor], overlap: BackwardOverlap) -> Tensor:
        with nvtx("attention_backward"):
            return load(kernel).backward(dout, q, *keys, out, lse, tables, params, overlap)[0]

    x = PUSH.bind(route)
    at = PlaceRow(*x.place.tolist())
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    here = slice(at.source, at.source + at.whole)
    if not int(x.capacity):
        return _backward_in_place(run, k, v, here, x.holder_ptr)
    if len(sizes := stages.backward_sizes(q, k, v, x, kv is not None)) > 1:
        return stages.backward(dout, q, k, v, kv, out, lse, tables, params, x, kernel, group, sizes)
    main, side = cuda.current_stream(q.device), peers.side_stream(q.device)
    mxint15 = capabilities(kernel).unrounded_gradients(q, k.shape[1])
    if kv is None:
        with nvtx("exchange"):
            kv = _push(k, v, x, peers.FEW_BLOCKS if at.whole else peers.WHOLE_GPU, group, side).rows
    rows = peers.gradient_rows(kv, x.capacity, group, side)
    sums: list[Tensor] = []

    def send_home() -> None:
        if not sums:  # made when the kernel has given its memory back
            sums.extend(y.new_empty(y.shape) for y in (k, v))
        with nvtx("exchange_backward"):
            lists = x.partners, x.capacity, here, x.holder_ptr, x.holders
            peers.return_rows(rows, *lists, sums[0], sums[1], group, side, mxint15)

    if at.whole:
        sums.extend(y.new_empty(y.shape) for y in (k, v))
        keys, grads = (k[here], v[here]), (sums[0][here], sums[1][here])
        holder_ptr = stages.csr_part(x.holder_ptr, here)
        overlap = BackwardOverlap(grads, gradients_written=send_home, mxint15=mxint15, holder_ptr=holder_ptr)
    else:
        keys, grads = (split_kv(y, k.shape[1], k.shape[2], v.shape[2]) for y in (kv, rows))
        overlap = BackwardOverlap(grads, partial(main.wait_stream, side), send_home, mxint15)
    dq = run(keys, overlap)
    main.wait_stream(side)
    return dq, sums[0], sums[1]


def _backward_in_place(
    run: Callable[[Sequence[Tensor], BackwardOverlap], Tensor], k: Tensor, v: Tensor, here: slice, holder_ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of a batch whose ranks read nothing but their own rows `here`, in place; gradients of these are
    written in place too."""
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    zero_others((dk, dv), here)
    dq = run((k[here], v[here]), BackwardOverlap((dk[here], dv[here]), holder_ptr=stages.csr_part(holder_ptr, here)))
    return dq, dk, dv


def _push(
    k: Tensor, v: Tensor, route: Any, shape: peers.LaunchShape, group: str, side: torch.cuda.Stream, skip: int = 0
) -> peers.Push:
    """An exchange on its way; rows of peers are here when `side` is waited for. Own rows but for the first `skip`."""
    lists = route.sends, route.targets, route.ends, route.copied, route.partners, route.capacity
    push = peers.Push(k, v, *lists, group)
    # Enqueued before the kernel, which fills every multiprocessor it gets.
    push.to_peers(shape, side)
    push.own_rows(skip)
    return push


@pushed_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, (out, lse, kv) = bind(_ops.pushed_attention.default, inputs), output
    ctx.mark_non_differentiable(lse, kv)
    keep(ctx, **vars(x), out=out, lse=lse, kv=kv if x.keep_kv else None)


def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    x = kept(ctx)
    dsinks = None if x.sinks is None else sinks_gradient(dout, x.out, x.lse, x.sinks)
    dq, dk, dv = call(_ops.pushed_attention_backward.default, x, dout=dout)
    return gradients(_ops.pushed_attention.default, x, q=dq, k=dk, v=dv, sinks=dsinks)


pushed_attention.register_autograd(_backward, setup_context=_setup_context)
for _op in (pushed_attention, pushed_attention_backward):
    call_directly(_op)
