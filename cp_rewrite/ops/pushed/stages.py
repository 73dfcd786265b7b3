"""The steps of pushed attention in stages of heads (`planning/routes/push_stages.py`): the kernel of a stage hides what
another one exchanges.

    side     rows of all stages, in their order             gradients 0 | gradients 1 …
    main     own rows 0 | stage 0        | stage 2        …
    lane     own rows 1 … |    stage 1        | stage 3   …

Kernels take turns on two streams, so that the blocks of a stage fill the GPU up as those of the one before end. Results
are the same bit for bit as in one stage, for each head's kernel does the same. One exception: where gradients of keys
travel as MXINT15, those that stay on their rank are MXINT15 here too, before they are rounded.

A rank whose keys are all read in place takes part in the others' stages, and waits for none of their rows.

Shapes: as of `attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda, peers
from cp_rewrite.kernels.flash.overlap import BackwardOverlap
from cp_rewrite.kernels.inputs import Params, Tables
from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.kernels.rows import zero_gaps
from cp_rewrite.kernels.select import capabilities, load
from cp_rewrite.ops.local_rows import split_kv
from cp_rewrite.ops.max_logits import note
from cp_rewrite.ops.merge import has_gaps
from cp_rewrite.ops.schemas import fake_results
from cp_rewrite.planning.columns import PlaceRow
from cp_rewrite.planning.routes.push_stages import Shape, StageLoad, backward_stages, forward_stages


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
    """The same of a backward."""
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
    """Where gradients of expanded rows go, by a route."""
    lists = route.partners, route.capacity, route.holder_ptr, route.holders
    return peers.Return(expanded, *lists, group, mxint15, stream)


class _Streams:
    """Kernels of even stages on the main stream, of odd ones on another. The exchange has a third, `side`."""

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


def forward(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, params: Params, route: Any, kernel: str, kv: Tensor, group: str,
    sizes: Sequence[int], site: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of `pushed_attention`, without sinks. kv: (E, C), to be kept, or of no row. k, v: `dense_rows`."""
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


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, out: Tensor, lse: Tensor, tables: Tables,
    params: Params, route: Any, kernel: str, group: str, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of `pushed_attention_backward`. kv: the expanded rows, if they were kept. k, v: `dense_rows`."""
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
