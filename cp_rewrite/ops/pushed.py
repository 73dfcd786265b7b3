"""Packed attention whose rows travel through symmetric memory while the kernel works on what needs none of them.

The kernel reads expanded rows where peers write them, and writes gradients where peers read them: nothing is copied.
Keys of the early entries that `planning/routes/push.py` found side by side in the local rows are read in place, and
their gradients written there.

    forward     own rows      | early entries' kernel   | late entries' kernel, as the GPU empties
                rows for them | rows of the late entries

    backward    late entries' kernel, as soon as it can | early entries' kernel | rounding of dq
                rows of peers                           | gradients go home     | and are added

A rank without such keys exchanges before and after its backward's kernel. Where rows travel longer than that, they and
the kernel run in stages of heads.

    Stage, stages_of, …_sizes                    stages of heads
    forward_in_stages, backward_in_stages        the steps in stages
    push_once, backward_at_once                  the steps in one stage: which exchange runs beside which kernel
    pushed_attention, pushed_attention_backward  the ops

Only for kernels whose `Capabilities` say `overlaps_exchange`; others exchange first (`packed_attention`). Results are
the same bit for bit, for the same kernels read the same rows. The exception is `unrounded_gradients` of keys: parts of
them travel as MXINT15 (`csrc/rows.cuh`) and come out nearer to those of one GPU.

Shapes: R local rows, E expanded rows, Hq query and Hkv key heads, D and V head dims, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import cuda, peers
from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.kernels.flash.varlen import BackwardOverlap, BackwardParts, ForwardOverlap, Parts
from cp_rewrite.kernels.rows import zero_gaps
from cp_rewrite.kernels.select import Params, Tables, capabilities, load
from cp_rewrite.planning.names import PlaceRow, StageRow
from cp_rewrite.planning.routes.push import PUSH, Shape, StageLoad, backward_stages, forward_stages
from cp_rewrite.torch_internals import call_directly

from .attention import fake_results, finished, has_gaps, register_attention
from .exchanges.push import zero_others
from .local_rows import packed_width, split_kv
from .max_logits import note
from .schemas import call


@dataclass(frozen=True)
class Stage:
    """Args: number: 0 first. first, stop: its key heads, of `heads`. group: query heads of each."""

    number: int
    first: int
    stop: int
    heads: int
    group: int

    @property
    def keys(self) -> slice:
        return slice(self.first, self.stop)

    @property
    def queries(self) -> slice:
        return slice(self.group * self.first, self.group * self.stop)

    @property
    def last(self) -> bool:
        return self.stop == self.heads


def stages_of(sizes: Sequence[int], heads: int) -> Iterator[Stage]:
    """The stages of so many key heads each, of `heads` query heads."""
    first, total = 0, sum(sizes)
    for number, size in enumerate(sizes):
        yield Stage(number, first, first + size, total, heads // total)
        first += size


def forward_sizes(q: Tensor, k: Tensor, v: Tensor, route: Any) -> tuple[int, ...]:
    """Key heads of each stage of a forward, the same on all ranks."""
    return forward_stages(*_known(q, k, v, route))


def backward_sizes(q: Tensor, k: Tensor, v: Tensor, route: Any, kept: bool) -> tuple[int, ...]:
    """Key heads of each stage of a backward, the same on all ranks."""
    return backward_stages(*_known(q, k, v, route), kept)


def _known(q: Tensor, k: Tensor, v: Tensor, route: Any) -> tuple[tuple[StageLoad, ...], Shape]:
    loads = tuple(StageLoad(*row) for row in route.loads.tolist())
    return loads, Shape(q.shape[1], k.shape[1], k.shape[2], v.shape[2], k.element_size())


def in_place(route: Any) -> slice:
    """The local rows that are all keys of this rank and are read in place; none: there are others."""
    at = PlaceRow(*route.place.tolist())
    return slice(at.source, at.source + at.whole)


def whole(here: slice) -> bool:
    """True if all keys are read in place, of `in_place`."""
    return here.stop > here.start


def csr_part(ptr: Tensor, here: slice) -> Tensor:
    """The part of a CSR index that is of rows `here`."""
    return ptr[here.start : here.stop + 1]


def returned(
    expanded: Tensor, route: Any, group: str, mxint15: bool, stream: torch.cuda.Stream | None = None
) -> peers.Return:
    """The way home of gradients of expanded rows, by a route."""
    lists = route.partners, route.capacity, route.holder_ptr, route.holders
    return peers.Return(expanded, *lists, group, mxint15, stream)


class _Streams:
    """Kernels of even stages on the main stream, of odd ones on another (`lane`), so that the blocks of a stage fill
    the GPU up as those of the one before end. The exchange has a third, `side`: the kernel of a stage hides what
    another one exchanges (`planning/routes/push.py`).

        side     rows of all stages, in their order             gradients 0 | gradients 1 …
        main     own rows 0 | stage 0        | stage 2        …
        lane     own rows 1 … |    stage 1        | stage 3   …
    """

    def __init__(self, device: torch.device) -> None:
        self.main, self.side, self.lane = (
            cuda.current_stream(device),
            peers.side_stream(device),
            peers.lane(device),
        )

    def of(self, stage: Stage) -> torch.cuda.Stream:
        return self.lane if stage.number % 2 else self.main

    def join(self) -> None:
        """All that is enqueued is done before what follows on the main stream."""
        self.main.wait_stream(self.lane)
        self.main.wait_stream(self.side)


def _start(k: Tensor, v: Tensor, route: Any, sizes: Sequence[int], group: str, at: _Streams) -> tuple[peers.Push, Any]:
    """Rows on their way, of this rank to itself too; when these are there, but for those of stage 0 (an event)."""
    lists = route.sends, route.targets, route.ends, route.copied, route.partners, route.capacity
    push = peers.Push(k, v, *lists, group, sizes)
    push.to_peers(peers.FEW_BLOCKS, at.side)
    push.own_rows(stages=slice(0, 1))
    at.lane.wait_stream(at.main)
    with cuda.on(at.lane):
        push.own_rows(stages=slice(1, len(sizes)))
    return push, at.lane.record_event()


def forward_in_stages(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, params: Params, route: Any, kernel: str, kv: Tensor, group: str,
    sizes: Sequence[int], site: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of `pushed_attention`, without sinks. kv: (E, C), to be kept, or of no row. k, v: `dense_rows`.

    Results are the same bit for bit as in one stage, for each head's kernel does the same. A rank whose keys are all
    read in place takes part in the others' stages, and waits for none of their rows.
    """
    at, results = _Streams(q.device), fake_results(q, v)
    with nvtx("exchange"):
        push, copied = _start(k, v, route, sizes, group, at)
    here = in_place(route)
    keys = (k[here], v[here]) if whole(here) else split_kv(push.rows, k.shape[1], k.shape[2], v.shape[2])
    for stage in stages_of(sizes, q.shape[1]):
        with cuda.on(at.of(stage)), nvtx("attention"):
            if stage.number == 2:
                at.main.wait_event(copied)
            if not whole(here):
                push.wait_for_stage(stage.number)
            into = results[0][:, stage.queries], results[1][stage.queries]
            part = (x[:, stage.keys] for x in keys)
            load(kernel).forward(q[:, stage.queries], *part, tables, params, into=into)
    if kv.shape[0]:
        at.side.wait_event(copied)
        with cuda.on(at.side):
            kv.copy_(push.rows)
    at.join()
    note(site, q, keys[0], tables, params)
    if has_gaps(tables, q.shape[0]):
        zero_gaps(*results, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return results


def backward_in_stages(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, out: Tensor, lse: Tensor, tables: Tables,
    params: Params, route: Any, kernel: str, group: str, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of `pushed_attention_backward`. kv: the expanded rows, if they were kept. k, v: `dense_rows`.

    Results are the same bit for bit as in one stage, but where gradients of keys travel as MXINT15: those that stay on
    their rank are MXINT15 here too, before they are rounded.
    """
    at, push, copied = _Streams(q.device), None, None
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if kv is None:
        with nvtx("exchange"):
            push, copied = _start(k, v, route, sizes, group, at)
        kv = push.rows
    mxint15 = capabilities(kernel).unrounded_gradients(q, k.shape[1])
    back = returned(kv, route, group, mxint15)
    at.lane.wait_stream(at.main)
    here = in_place(route)
    if whole(here):
        keys, grads, holder_ptr = (k[here], v[here]), (dk[here], dv[here]), csr_part(route.holder_ptr, here)
    else:
        keys, grads = (split_kv(x, k.shape[1], k.shape[2], v.shape[2]) for x in (kv, back.rows))
        holder_ptr = None

    def wait(stage: Stage) -> None:
        if push is not None and not whole(here):
            push.wait_for_stage(stage.number)

    def send_home(stage: Stage) -> None:
        at.side.wait_stream(at.of(stage))
        shape = peers.SHAPE if stage.last else peers.BESIDE
        with cuda.on(at.side), nvtx("exchange_backward"):
            back.written()
            back.sum_up(dk, dv, here, heads=(stage.first, stage.stop, stage.heads), shape=shape)

    for stage in stages_of(sizes, q.shape[1]):
        with cuda.on(at.of(stage)), nvtx("attention_backward"):
            if stage.number == 2 and copied is not None:
                at.main.wait_event(copied)
            own, theirs = stage.queries, stage.keys
            overlap = BackwardOverlap(
                (grads[0][:, theirs], grads[1][:, theirs]),
                lambda stage=stage: wait(stage),
                lambda stage=stage: send_home(stage),
                mxint15,
                holder_ptr,
            )
            inputs = dout[:, own], q[:, own], keys[0][:, theirs], keys[1][:, theirs], out[:, own], lse[own]
            load(kernel).backward(*inputs, tables, params, overlap, into=dq[:, own])
    at.join()
    if has_gaps(tables, q.shape[0]):
        zero_gaps(dq, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return dq, dk, dv


Run = Callable[[Sequence[Tensor], BackwardOverlap | BackwardParts], Tensor]
"""dq of a kernel over (k, v), with its exchange."""


def parts_of(route: Any, early_kv: tuple[Tensor, ...] | None) -> Parts:
    """How the route cuts the kernel's work."""
    stage = StageRow(*route.stages.tolist())
    cut, rest = (stage.entries, stage.queries, stage.keys), (route.rest_cu_seqlens_q, route.rest_cu_seqlens_k)
    return Parts(cut, stage.early, rest, early_kv)


def push_once(
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


def backward_at_once(
    run: Run, k: Tensor, v: Tensor, kv: Tensor | None, route: Any, group: str, mxint15: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `pushed_attention_backward`. kv: the expanded rows, if they were kept. k, v: `dense_rows`.

    a rank reads            its steps
    own rows only           exchanges nothing of its own; gradients are written in place
    early keys in place     two kernels: the early part's, and, first as soon as its rows are here, the late part's
    other keys              rows of peers, the kernel, gradients home
    """
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
    """A backward in steps, around one kernel. `here`: rows in place, which are all keys of this rank or none."""
    main, side, whole = cuda.current_stream(k.device), peers.side_stream(k.device), here.stop > here.start
    if kv is None:
        with nvtx("exchange"):
            kv = push_once(k, v, route, peers.FEW_BLOCKS if whole else peers.WHOLE_GPU, group, side).rows
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
    """A backward in two parts. The early one reads keys of rows `here` in place, and writes their gradients there."""
    main, side, lane = cuda.current_stream(k.device), peers.side_stream(k.device), peers.first_lane(k.device)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    if kv is None:
        with nvtx("exchange"):
            kv = push_once(k, v, route, peers.FEW_BLOCKS, group, side, here.stop - here.start, lane).rows
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


_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::pushed_attention", mutates_args=())
def pushed_attention(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    route: Sequence[Tensor], scale: float, softcap: float, kernel: str, deterministic: bool,
    keep_kv: bool, group: str, sinks: Tensor | None, site: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
    kv = k.new_empty(x.copied.shape[0] if keep_kv else 0, packed_width(k, v))
    if len(sizes := forward_sizes(q, k, v, x)) > 1:
        out, lse = forward_in_stages(q, k, v, tables, params, x, kernel, kv, group, sizes, site)
        return *finished(out, lse, tables, sinks), kv
    if int(x.capacity):
        with nvtx("exchange"):
            push = push_once(k, v, x, peers.FEW_BLOCKS, group, side, 0 if keep_kv else at.early)
            if keep_kv:
                side.wait_stream(main)
                with cuda.on(side):
                    kv.copy_(push.rows)
            if stage.awaited:
                push.wait_for_early_rows()
        keys = near if at.whole else split_kv(push.rows, k.shape[1], k.shape[2], v.shape[2])
    overlap = ForwardOverlap(parts_of(x, near if at.early else None), side) if stage.entries else None
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, *keys, tables, params, overlap)
    if int(x.capacity):
        main.wait_stream(side)
    note(site, q, keys[0], tables, params, overlap and overlap.parts)
    return *finished(out, lse, tables, sinks), kv


def _fake_rows(x: SimpleNamespace) -> tuple[Tensor]:
    rows = PUSH.bind(x.route).copied.shape[0] if x.keep_kv else 0
    return (x.k.new_empty(rows, packed_width(x.k, x.v)),)


@custom_op("cp_rewrite::pushed_attention_backward", mutates_args=())
def pushed_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    route: Sequence[Tensor], scale: float, softcap: float, kernel: str, deterministic: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq (R, Hq, D), dk (R, Hkv, D) and dv (R, Hkv, V) of this rank's rows, in their dtypes; kv: if it was kept."""
    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)

    def run(keys: Sequence[Tensor], overlap: BackwardOverlap | BackwardParts) -> Tensor:
        with nvtx("attention_backward"):
            return load(kernel).backward(dout, q, *keys, out, lse, tables, params, overlap)[0]

    x = PUSH.bind(route)
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    if int(x.capacity) and len(sizes := backward_sizes(q, k, v, x, kv is not None)) > 1:
        return backward_in_stages(dout, q, k, v, kv, out, lse, tables, params, x, kernel, group, sizes)
    mxint15 = capabilities(kernel).unrounded_gradients(q, k.shape[1])
    return backward_at_once(run, k, v, kv, x, group, mxint15)


@pushed_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(x: SimpleNamespace, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return call(_ops.pushed_attention_backward.default, x, dout=dout)


register_attention(pushed_attention, _backward, _fake_rows)
for _op in (pushed_attention, pushed_attention_backward):
    call_directly(_op)
