"""The steps of pushed attention in one stage: which exchange runs beside which kernel.

    a rank reads            its backward
    own rows only           exchanges nothing of its own; gradients are written in place
    early keys in place     two kernels: the early part's, and, first as soon as its rows are here, the late part's
    other keys              rows of peers, the kernel, gradients home

Shapes: as of `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda, peers
from cp_rewrite.kernels.flash.overlap import BackwardOverlap, BackwardParts, Parts
from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.ops.exchanges.push import zero_others
from cp_rewrite.ops.local_rows import split_kv
from cp_rewrite.planning.columns import PlaceRow, StageRow

from .stages import csr_part, returned

Run = Callable[[Sequence[Tensor], BackwardOverlap | BackwardParts], Tensor]
"""dq of a kernel over (k, v), with its exchange."""


def parts_of(route: Any, early_kv: tuple[Tensor, ...] | None) -> Parts:
    """How the route cuts the kernel's work."""
    stage = StageRow(*route.stages.tolist())
    cut, rest = (stage.entries, stage.queries, stage.keys), (route.rest_cu_seqlens_q, route.rest_cu_seqlens_k)
    return Parts(cut, stage.early, rest, early_kv)


def push(
    k: Tensor,
    v: Tensor,
    route: Any,
    shape: peers.LaunchShape,
    group: str,
    side: torch.cuda.Stream,
    skip: int = 0,
    lane: torch.cuda.Stream | None = None,
) -> peers.Push:
    """An exchange on its way; rows of peers are here when `side` is waited for. Own rows but for the first `skip` are
    when `lane` is; None: on the current stream."""
    lists = route.sends, route.targets, route.ends, route.copied, route.partners, route.capacity
    push = peers.Push(k, v, *lists, group)
    # Enqueued before the kernel, which fills every multiprocessor it gets.
    push.to_peers(shape, side)
    if lane is not None:
        lane.wait_stream(cuda.current_stream(k.device))
    with cuda.on(lane):
        push.own_rows(skip)
    return push


def backward(
    run: Run, k: Tensor, v: Tensor, kv: Tensor | None, route: Any, group: str, mxint15: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `pushed_attention_backward`. kv: the expanded rows, if they were kept. k, v: `dense_rows`."""
    at = PlaceRow(*route.place.tolist())
    here = slice(at.source, at.source + at.early + at.whole)
    if not int(route.capacity):
        return _in_place(run, k, v, here, route.holder_ptr)
    if at.early:
        return _in_parts(run, k, v, kv, route, here, group, mxint15)
    return _around(run, k, v, kv, route, here, group, mxint15)


def _in_place(run: Run, k: Tensor, v: Tensor, here: slice, holder_ptr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a batch whose ranks read nothing but their own rows `here`."""
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    zero_others((dk, dv), here)
    dq = run((k[here], v[here]), BackwardOverlap((dk[here], dv[here]), holder_ptr=csr_part(holder_ptr, here)))
    return dq, dk, dv


def _around(
    run: Run, k: Tensor, v: Tensor, kv: Tensor | None, route: Any, here: slice, group: str, mxint15: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """In steps, around one kernel. `here`: rows in place, which are all keys of this rank or none."""
    main, side, whole = cuda.current_stream(k.device), peers.side_stream(k.device), here.stop > here.start
    if kv is None:
        with nvtx("exchange"):
            kv = push(k, v, route, peers.FEW_BLOCKS if whole else peers.WHOLE_GPU, group, side).rows
    back = returned(kv, route, group, mxint15, side)
    sums: list[Tensor] = []

    def send_home() -> None:
        if not sums:  # made when the kernel has given its memory back
            sums.extend(y.new_empty(y.shape) for y in (k, v))
        with nvtx("exchange_backward"):
            if not whole:
                back.written(side)
            back.sum_up(sums[0], sums[1], here, side)

    if whole:
        sums.extend(y.new_empty(y.shape) for y in (k, v))
        with nvtx("exchange_backward"):
            back.written(side)  # none
            back.pull(sums[0], sums[1], here, side)
        keys, grads = (k[here], v[here]), (sums[0][here], sums[1][here])
        holder_ptr = csr_part(route.holder_ptr, here)
        overlap = BackwardOverlap(grads, gradients_written=send_home, mxint15=mxint15, holder_ptr=holder_ptr)
    else:
        keys, grads = (split_kv(y, k.shape[1], k.shape[2], v.shape[2]) for y in (kv, back.rows))
        overlap = BackwardOverlap(grads, partial(main.wait_stream, side), send_home, mxint15)
    dq = run(keys, overlap)
    main.wait_stream(side)
    return dq, sums[0], sums[1]


def _in_parts(
    run: Run, k: Tensor, v: Tensor, kv: Tensor | None, route: Any, here: slice, group: str, mxint15: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """In two parts. The early one reads the keys of rows `here` in place, and writes their gradients there."""
    main, side, lane = cuda.current_stream(k.device), peers.side_stream(k.device), peers.first_lane(k.device)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    if kv is None:
        with nvtx("exchange"):
            kv = push(k, v, route, peers.FEW_BLOCKS, group, side, here.stop - here.start, lane).rows
    back = returned(kv, route, group, mxint15, side)
    keys, grads = (split_kv(x, k.shape[1], k.shape[2], v.shape[2]) for x in (kv, back.rows))
    parts = parts_of(route, (k[here], v[here]))
    listed = parts.keys(parts.early).start or 0

    def fetch() -> None:
        with nvtx("exchange_backward"):
            back.written(side)
            back.pull(dk, dv, here, side, listed=listed)

    def send_home() -> None:
        with nvtx("exchange_backward"):
            back.sum_up(dk, dv, here, side, listed=listed)

    holder_ptr, of_late = csr_part(route.holder_ptr, here), parts.keys(1 - parts.early)
    early = BackwardOverlap(
        (dk[here], dv[here]), gradients_written=send_home, mxint15=mxint15, holder_ptr=holder_ptr, own=1
    )
    late = BackwardOverlap(
        (grads[0][of_late], grads[1][of_late]),
        keys_needed=partial(lane.wait_stream, side),
        gradients_written=fetch,
        mxint15=mxint15,
    )
    dq = run(keys, BackwardParts(parts, (early, late), lane))
    main.wait_stream(side)
    return dq, dk, dv
