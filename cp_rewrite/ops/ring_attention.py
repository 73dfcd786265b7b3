"""The exchange `p2p`: ring attention as an op. Keys and values go from rank to rank, and every rank attends to the rows
that it holds while the next ones come.

    step 0      rank 0 holds rows of 0     rank 1 holds rows of 1     rank 2 holds rows of 2
    step 1      rank 0 holds rows of 2     rank 1 holds rows of 0     rank 2 holds rows of 1

A rank holds two buffers of key and value rows, whatever the number of ranks. Results of the steps are merged in fp32.
The backward sends the keys round again, and their gradients, in fp32, one step behind them; after the last step these
are back at their owner. A step runs the kernel in one or more rounds: `planning/routes/ring.py` says why.

Shapes: R local rows, E expanded rows of a round, Hq query and Hkv key heads, D and V head dims of qk and v,
C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.kernels.select import Params, Tables, capabilities, load
from cp_rewrite.planning.names import RoundRow
from cp_rewrite.torch_internals import process_group

from . import local_rows
from .attention import add_sinks, fill_gaps, merge_parts, register_attention
from .local_rows import as_rows, pack_kv, packed_width, split_kv
from .max_logits import note, note_site
from .schemas import call

_ops: Any = torch.ops.cp_rewrite
_KV, _GRADIENTS = 0, 1
"""Tags of messages: both are under way at once."""


@custom_op("cp_rewrite::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    kv_rows: Tensor, sum_ptr: Tensor, sum_rows: Tensor, rounds: Tensor,
    scale: float, softcap: float, kernel: str, deterministic: bool,
    group: str, world_size: int, sinks: Tensor | None, site: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's queries over the keys of their documents, which come round.

    Args:
        q: (R, Hq, D). k, v: (R, Hkv, D) and (R, Hkv, V), this rank's rows.
        cu_seqlens_q, …, rounds: `ring_tables` (pieces, launches and rounds on the host).
        scale, softcap, kernel, deterministic, sinks, site: see `packed_attention`.
        group, world_size: the ring.
    Returns:
        out and lse as of `packed_attention`.
    """
    tables, route = (cu_seqlens_q, cu_seqlens_k, pieces, launches), (kv_rows, sum_ptr, sum_rows, rounds)
    run, params = load(kernel), Params(scale, softcap, deterministic)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_in = _as_exact(q, kernel)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide)
    first = True
    note_site(site, q_in)
    for held, r in _go_round(pack_kv(k, v), tables, route, group, world_size):
        keys, values = _keys(held, r, k, v, kernel)
        with nvtx("attention"):
            part, part_lse = run.forward(q_in, keys, values, r.tables, params)
        note(site, q_in, keys, r.tables, params)
        out, lse = (part.to(wide), part_lse) if first else merge_parts(out, lse, part, part_lse)
        first = False
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return fill_gaps(out.to(q.dtype, copy=True), lse), lse.clone()


@custom_op("cp_rewrite::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    kv_rows: Tensor, sum_ptr: Tensor, sum_rows: Tensor, rounds: Tensor,
    scale: float, softcap: float, kernel: str, deterministic: bool, group: str, world_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (R, Hq, D) in q's dtype, and the gradients of this rank's packed rows (R, C) in fp32 (fp64 for fp64).

    Every owner's gradients are summed in the order in which its rows go round, so two runs are bitwise equal.
    """
    steps = _steps((cu_seqlens_q, cu_seqlens_k, pieces, launches), (kv_rows, sum_ptr, sum_rows, rounds), q.shape[0])
    unrounded = capabilities(kernel).unrounded_gradients(q, k.shape[1])
    run, params = load(kernel), Params(scale, softcap, deterministic, unrounded)
    ring = _Ring(group, world_size)
    wide = torch.promote_types(q.dtype, torch.float32)
    saved = [_as_exact(x, kernel) for x in (dout, q, out)]
    dq = q.new_zeros(q.shape, dtype=wide)
    held = pack_kv(k, v)
    dkv, returning = held.new_zeros(held.shape, dtype=wide), ()
    for step in range(world_size):
        coming, under_way = ring.shift(held, _KV) if step + 1 < world_size else (held, ())
        part = held.new_zeros(held.shape, dtype=wide)
        for r in steps.get(step, ()):
            keys, values = _keys(held, r, k, v, kernel)
            with nvtx("attention_backward"):
                dq_part, dk, dv = run.backward(*saved[:2], keys, values, saved[2], lse, r.tables, params)
            dq += dq_part
            part += local_rows.sum_rows(as_rows(dk, dv, keys, values), r.sum_ptr, r.sum_rows, q.shape[0])
        # The ranks that held these rows before have summed their parts in dkv: this rank adds its own and sends it on.
        _finish(returning)
        dkv, returning = ring.shift(part.add_(dkv), _GRADIENTS)
        _finish(under_way)
        held = coming
    _finish(returning)
    return dq.to(q.dtype, copy=True), dkv.clone() if world_size == 1 else dkv


@ring_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape[0], packed_width(k, v), dtype=wide)


def _backward(x: SimpleNamespace, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv = call(_ops.ring_attention_backward.default, x, dout=dout)
    return dq, *split_kv(dkv, x.k.shape[1], x.k.shape[2], x.v.shape[2])


register_attention(ring_attention, _backward)


@dataclass(frozen=True, eq=False)
class _Round:
    """One run of the kernel: its tables, which of the held rows it reads, and how their gradients are summed."""

    tables: Tables
    kv_rows: Tensor
    sum_ptr: Tensor
    sum_rows: Tensor


def _go_round(
    rows_RC: Tensor, tables: Sequence[Tensor], route: Sequence[Tensor], group: str, world_size: int
) -> Iterator[tuple[Tensor, _Round]]:
    """(rows that this rank holds, a round that reads them), while all ranks' rows go round once."""
    steps, ring, held = _steps(tables, route, rows_RC.shape[0]), _Ring(group, world_size), rows_RC
    for step in range(world_size):
        coming, under_way = ring.shift(held, _KV) if step + 1 < world_size else (held, ())
        for r in steps.get(step, ()):
            yield held, r
        _finish(under_way)
        held = coming


_known = WeakTensorKeyDictionary()


def _steps(tables: Sequence[Tensor], route: Sequence[Tensor], size: int) -> dict[int, list[_Round]]:
    """The rounds of each step. Cut out of the tables once per batch: kernels keep their launches by these tensors."""
    kv_rows, sum_ptr, sum_rows, rounds = route
    known = _known.get(rounds)
    if known is not None and known[0] is kv_rows:
        return known[1]
    steps: dict[int, list[_Round]] = {}
    cu_q, cu_k, pieces, launches = tables
    for i, at in enumerate(RoundRow(*row) for row in rounds.tolist()):
        if at.step >= 0:
            entries = slice(at.entry0, at.entry1)
            host = pieces[at.piece0 : at.piece1], launches[at.launch0 : at.launch1]
            ptr = sum_ptr[i * (size + 1) : (i + 1) * (size + 1)]
            lists = kv_rows[at.row0 : at.row1], ptr, sum_rows[at.sum0 : at.sum1]
            steps.setdefault(at.step, []).append(_Round(Tables(cu_q[entries], cu_k[entries], *host), *lists))
    _known[rounds] = (kv_rows, steps)
    return steps


class _Ring:
    """This rank's neighbours: rows go to the next rank and come from the one before."""

    def __init__(self, group: str, world_size: int) -> None:
        self.world_size = world_size
        if world_size > 1:
            self.group = process_group(group)
            rank = dist.get_rank(self.group)
            self.after, self.before = (
                dist.get_global_rank(self.group, (rank + side) % world_size) for side in (1, world_size - 1)
            )

    def shift(self, held: Tensor, tag: int) -> tuple[Tensor, tuple[Any, ...]]:
        """(what comes, what is under way): `held` is sent to the next rank; `_finish` before what comes is read."""
        if self.world_size == 1:
            return held, ()
        coming = torch.empty_like(held)
        send = dist.P2POp(dist.isend, held, self.after, self.group, tag)
        receive = dist.P2POp(dist.irecv, coming, self.before, self.group, tag)
        with nvtx("exchange"):
            return coming, (held, *dist.batch_isend_irecv([send, receive]))


def _finish(under_way: tuple[Any, ...]) -> None:
    """Wait for messages. The tuple's first entry keeps what is sent in memory until then."""
    for work in under_way[1:]:
        work.wait()


def _keys(held: Tensor, r: _Round, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Keys and values that a round reads, views of one buffer."""
    return split_kv(_as_exact(local_rows.gather_rows(held, r.kv_rows), kernel), k.shape[1], k.shape[2], v.shape[2])


def _as_exact(x: Tensor, kernel: str) -> Tensor:
    """The reference kernel works in fp32 anyway: given fp32, it does not round the results of steps either."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if kernel == "reference" else x
