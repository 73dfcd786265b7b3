"""Packed attention whose rows travel through symmetric memory while the kernel works on what needs none of them.

The kernel reads expanded rows where peers write them, and writes gradients where peers read them: nothing is copied.
Keys that lie side by side in the local rows are read in place (`planning/routes/push.py`).

    forward     own rows      | early entries' kernel   | late entries' kernel, as the GPU empties
                rows for them | rows of the late entries

    backward    late entries' kernel, as soon as it can | early entries' kernel | rounding of dq
                rows of peers                           | gradients go home     | and are added

Keys of the early entries that `push_cut.py` found side by side are read in place, and their gradients written there. A
rank without such keys exchanges before and after its backward's kernel (`one_stage.py`). Where rows travel longer than
that, they and the kernel run in stages of heads (`stages.py`).

Only for kernels whose `Capabilities` say `overlaps_exchange`; others exchange first (`packed_attention`). Results are
the same bit for bit, for the same kernels read the same rows. The exception is `unrounded_gradients` of keys: parts of
them travel as MXINT15 (`csrc/rows.cuh`) and come out nearer to those of one GPU.

Shapes: R local rows, E expanded rows, Hq query and Hkv key heads, D and V head dims, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels import cuda, peers
from cp_rewrite.kernels.flash.overlap import BackwardOverlap, BackwardParts, ForwardOverlap
from cp_rewrite.kernels.inputs import Params, Tables
from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.kernels.select import capabilities, load
from cp_rewrite.ops.local_rows import packed_width, split_kv
from cp_rewrite.ops.max_logits import note
from cp_rewrite.ops.merge import finished
from cp_rewrite.ops.schemas import bind, call, fake_results, register_attention
from cp_rewrite.planning.columns import PlaceRow, StageRow
from cp_rewrite.planning.routes.push import PUSH
from cp_rewrite.torch_internals import call_directly

from . import one_stage, stages

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
    site: str = "",
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
    kv = k.new_empty(x.copied.shape[0] if keep_kv else 0, packed_width(k, v))
    if len(sizes := stages.forward_sizes(q, k, v, x)) > 1:
        out, lse = stages.forward(q, k, v, tables, params, x, kernel, kv, group, sizes, site)
        return *finished(out, lse, tables, sinks), kv
    if int(x.capacity):
        with nvtx("exchange"):
            push = one_stage.push(k, v, x, peers.FEW_BLOCKS, group, side, 0 if keep_kv else at.early)
            if keep_kv:
                side.wait_stream(main)
                with cuda.on(side):
                    kv.copy_(push.rows)
            if stage.awaited:
                push.wait_for_early_rows()
        keys = near if at.whole else split_kv(push.rows, k.shape[1], k.shape[2], v.shape[2])
    overlap = ForwardOverlap(one_stage.parts_of(x, near if at.early else None), side) if stage.entries else None
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, *keys, tables, params, overlap)
    if int(x.capacity):
        main.wait_stream(side)
    note(site, q, keys[0], tables, params, overlap and overlap.parts)
    return *finished(out, lse, tables, sinks), kv


@pushed_attention.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = bind(_ops.pushed_attention.default, inputs)
    rows = PUSH.bind(x.route).copied.shape[0] if x.keep_kv else 0
    return *fake_results(x.q, x.v), x.k.new_empty(rows, packed_width(x.k, x.v))


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

    def run(keys: Sequence[Tensor], overlap: BackwardOverlap | BackwardParts) -> Tensor:
        with nvtx("attention_backward"):
            return load(kernel).backward(dout, q, *keys, out, lse, tables, params, overlap)[0]

    x = PUSH.bind(route)
    k, v = peers.dense_rows(k), peers.dense_rows(v)
    if int(x.capacity) and len(sizes := stages.backward_sizes(q, k, v, x, kv is not None)) > 1:
        return stages.backward(dout, q, k, v, kv, out, lse, tables, params, x, kernel, group, sizes)
    mxint15 = capabilities(kernel).unrounded_gradients(q, k.shape[1])
    return one_stage.backward(run, k, v, kv, x, group, mxint15)


@pushed_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(x: SimpleNamespace, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return call(_ops.pushed_attention_backward.default, x, dout=dout)


register_attention(pushed_attention, _backward)
for _op in (pushed_attention, pushed_attention_backward):
    call_directly(_op)
