"""Packed attention over rows that are read from the peers' symmetric memory, as ops. See `kernels/symm.py`, `pull.py`.

Rows come in groups of heads: while the kernel runs on one group, a second stream brings the rows of the next; in the
backward it also takes home the gradients of the one before.

    compute     wait    | heads 0-3          | heads 4-7          |
    rows        pull 0-3| pull 4-7  |

`pull.NAMES` lists a route's tensors in the order in which these ops take them. Shapes: R local rows, E expanded rows,
Hq = Hkv * n heads, D and V head dims of qk and v, C = Hkv * (D + V), G groups of heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.nvtx import nvtx

from .merge import add_sinks, sinks_gradient
from .rows import as_rows, split_kv

_ops: Any = torch.ops.cp_rewrite
_GROUP_BYTES = 16 << 20
"""Rows of a group are at least these many bytes: smaller ones cost more in launches than they hide."""
_GROUP_TILES = 1024
"""A group has at least these many tiles of 128 rows and one query head: fewer leave multiprocessors idle."""


@custom_op("cp_rewrite::pull_rows", mutates_args=())
def pull_rows(
    k: Tensor,
    v: Tensor,
    publish_rows: Tensor,
    job_source: Tensor,
    job_ptr: Tensor,
    job_rows: Tensor,
    remote_jobs: Tensor,
    group: str,
) -> Tensor:
    """(E, C) expanded rows from all ranks' k (R, Hkv, D) and v (R, Hkv, V); only rows that some piece needs travel."""
    from cp_rewrite.kernels import symm

    with nvtx("exchange"):
        return symm.pull_rows(k, v, publish_rows, job_source, job_ptr, job_rows, remote_jobs, group)


@pull_rows.register_fake
def _(k: Tensor, v: Tensor, publish_rows: Tensor, job_source: Tensor, job_ptr: Tensor, *rest: Any) -> Tensor:
    return k.new_empty(rest[0].shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::pulled_attention", mutates_args=())
def pulled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    publish_rows: Tensor,
    job_source: Tensor,
    job_ptr: Tensor,
    job_rows: Tensor,
    remote_jobs: Tensor,
    return_rows: Tensor,
    pull_ptr: Tensor,
    pull_rows: Tensor,
    capacity: Tensor,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    keep_kv: bool,
    group: str,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of this rank's queries over the keys of their documents, read from all ranks' k and v.

    Args:
        q: (R, Hq, D). k, v: (R, Hkv, D) and (R, Hkv, V), this rank's rows.
        cu_seqlens_q, cu_seqlens_k, pieces, launches: `Schedule.attention` (pieces and launches on the host).
        publish_rows, …, capacity: `pull.pull_route` (capacity on the host).
        scale, softcap, kernel, deterministic, keep_kv, sinks: see `packed_attention`. group: name of the ranks'.
    Returns:
        out (R, Hq, V) in q's dtype, exact zeros in rows of no document; lse (Hq, R) fp32, -inf there, no gradient;
        the expanded rows (E, C), group of heads after group, for the backward; (0, C) unless `keep_kv`.
    """
    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    run = importlib.import_module(f"cp_rewrite.kernels.{kernel}")
    groups = head_groups(q, k, v, capacity)
    route = (publish_rows, job_source, job_ptr, job_rows, remote_jobs)
    kv, arrived = _pull_groups(k, v, route, groups, group)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for i, part in enumerate(kv):
        arrived[i].wait()
        keys, values = split_kv(part, k.shape[1] // groups, k.shape[2], v.shape[2])
        into = _heads(out, i, groups), lse.chunk(groups)[i]
        with nvtx("attention"):
            run.forward(_heads(q, i, groups), keys, values, tables, params, into)
    kept = kv.view(kv.shape[1], -1) if keep_kv else kv.new_empty(0, kv.shape[0] * kv.shape[2])
    return (out, lse, kept) if sinks is None else (*add_sinks(out, lse, sinks), kept)


@pulled_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    job_rows, keep_kv = rest[7], rest[17]
    return out, lse, k.new_empty(job_rows.shape[0] if keep_kv else 0, k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::pulled_attention_backward", mutates_args=())
def pulled_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    publish_rows: Tensor,
    job_source: Tensor,
    job_ptr: Tensor,
    job_rows: Tensor,
    remote_jobs: Tensor,
    return_rows: Tensor,
    pull_ptr: Tensor,
    pull_rows: Tensor,
    capacity: Tensor,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    keep_kv: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (R, Hq, D), dk (R, Hkv, D) and dv (R, Hkv, V) in the dtype of q, k and v: sums over all ranks in fp32, in a
    fixed order, rounded once; exact zeros in rows of no piece. `kv`: what the forward kept."""
    from cp_rewrite.kernels import symm

    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    run = importlib.import_module(f"cp_rewrite.kernels.{kernel}")
    groups = head_groups(q, k, v, capacity)
    if keep_kv:
        rows, arrived = kv.view(groups, kv.shape[0], -1), [_Arrival(None)] * groups
    else:
        route = (publish_rows, job_source, job_ptr, job_rows, remote_jobs)
        rows, arrived = _pull_groups(k, v, route, groups, group)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    lane, gradients = _Lane(groups > 1, q.device), []
    for i, part in enumerate(rows):
        arrived[i].wait()
        keys, values = split_kv(part, k.shape[1] // groups, k.shape[2], v.shape[2])
        mine = [_heads(x, i, groups) for x in (dout, q, out, dq, dk, dv)]
        with nvtx("attention_backward"):
            _, dk_part, dv_part = run.backward(
                *mine[:2], keys, values, mine[2], lse.chunk(groups)[i], tables, params, mine[3]
            )
        # Held until all is home: the other stream reads them.
        gradients.append(as_rows(dk_part, dv_part, keys, values))
        lane.follow()
        with lane.stream(), nvtx("exchange_backward"):
            beside = i + 1 < groups
            symm.return_rows(
                gradients[-1], return_rows, pull_ptr, pull_rows, int(capacity), mine[4], mine[5], group, beside
            )
    lane.arrival().wait()
    return dq, dk, dv


@pulled_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.numbers, sinks = inputs[16:22], inputs[22]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:16], *(() if sinks is None else (sinks,)))


def _backward(ctx: Any, dout: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, kv, *rest = ctx.saved_tensors
    tables, sinks = rest[:13], rest[13:]
    grads = _ops.pulled_attention_backward.default(dout, q, k, v, out, lse, kv, *tables, *ctx.numbers)
    dsinks = sinks_gradient(dout, out, lse, sinks[0]) if sinks else None
    return *grads, *([None] * 19), dsinks


pulled_attention.register_autograd(_backward, setup_context=_setup_context)


def head_groups(q: Tensor, k: Tensor, v: Tensor, capacity: Tensor) -> int:
    """G, the same on all ranks: as many groups as their rows and their tiles are worth. Divides Hkv."""
    columns = k.shape[1] * (k.shape[2] + v.shape[2])
    most = min(
        int(capacity) * columns * k.element_size() // _GROUP_BYTES, q.shape[0] * q.shape[1] // (128 * _GROUP_TILES)
    )
    fits = [
        groups
        for groups in range(1, k.shape[1] + 1)
        if k.shape[1] % groups == 0
        and all(x.shape[1] // groups * x.shape[2] * x.element_size() % 16 == 0 for x in (k, v))
    ]
    return max((groups for groups in fits if groups <= most), default=1)


def _heads(x_RHD: Tensor, i: int, groups: int) -> Tensor:
    """The heads of group i, a view."""
    return x_RHD if groups == 1 else x_RHD.chunk(groups, 1)[i]


def _pull_groups(
    k: Tensor, v: Tensor, route: Sequence[Tensor], groups: int, group: str
) -> tuple[Tensor, list[_Arrival]]:
    """(G, E, C / G) expanded rows, and when those of each group are there."""
    from cp_rewrite.kernels import symm

    columns = k.shape[1] * (k.shape[2] + v.shape[2])
    rows = k.new_empty(groups, route[3].shape[0], columns // groups)
    lane = _Lane(groups > 1, k.device)
    lane.follow()
    arrived: list[_Arrival] = []
    for i, part in enumerate(rows):
        with lane.stream(), nvtx("exchange"):
            mine = _heads(k, i, groups), _heads(v, i, groups)
            symm.pull_rows(*mine, *route, group=group, out_EC=part, beside=i > 0)
        arrived.append(lane.arrival())
    return rows, arrived


class _Lane:
    """A stream beside the current one, or the current one itself."""

    def __init__(self, beside: bool, device: torch.device) -> None:
        self._side = _side_stream(device) if beside and device.type == "cuda" else None

    def follow(self) -> None:
        """What comes next on the lane starts after what the current stream has been given so far."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))

    def stream(self) -> Any:
        """Context: launches go to the lane."""
        return torch.cuda.stream(self._side)

    def arrival(self) -> _Arrival:
        """When all that the lane was given so far is done."""
        return _Arrival(None if self._side is None else self._side.record_event())


class _Arrival:
    """An event that the current stream can wait for; None: it has happened."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """The current stream waits; the host does not."""
        if self._event is not None:
            self._event.wait()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # Its few blocks go first: all ranks wait for the last of them.
    return torch.cuda.Stream(device, priority=-1)
