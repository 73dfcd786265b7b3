"""The part that variable-length flash kernels share: how the launches of a batch run, and what becomes of rows of no
document.

Rows of no document may hold NaN, and a kernel that loads whole tiles would spread it. Where such rows form the end of
the local rows they are left out; where they lie in between, the backward reads copies with zeros there, and the
results are overwritten with exact zeros there.

Shapes: R local rows, E expanded rows, H heads (Hq queries, Hkv keys), D and V head dims, N entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.inputs import Params, Tables
from cp_rewrite.kernels.rows import zero_gaps

from .launches import Launch, launches_of
from .overlap import BackwardOverlap, BackwardParts, ForwardOverlap

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Params], None]
"""(q, k, v, out, lse, launch, params): writes out (rows, Hq, V) and lse (Hq, rows), -inf where a row sees no key. The
heads of lse may lie apart."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Params], None]
"""(dout, q, k, v, out, lse, dq, dk, dv, launch, params): writes dq, dk and dv. lse: as of `Forward`."""


def functions(forward: Forward, backward: Backward) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`forward` and `backward` of a kernel module, with the arguments and results of `reference`'s."""
    return partial(run_forward, forward), partial(run_backward, backward)


def run_forward(
    kernel: Forward,
    q_RHD: Tensor,
    k_EHD: Tensor,
    v_EHV: Tensor,
    tables: Tables,
    params: Params,
    overlap: ForwardOverlap | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out (R, Hq, V), exact zeros in rows of no piece; lse (Hq, R) fp32, -inf there. `into`: (out, lse) to write
    instead of new ones, and only rows of pieces; heads of out are dense, lse is contiguous."""
    rows, heads = q_RHD.shape[:2]
    if into is None:
        out = q_RHD.new_empty(rows, heads, v_EHV.shape[2])
        lse = q_RHD.new_empty(heads, rows, dtype=torch.float32)
    else:
        out, lse = into
    launches = launches_of(tables, rows)
    # A cut is made where one launch does all; it may leave out the last entries, which have no keys.
    if overlap is not None and overlap.parts.cut[0] + 1 >= launches[0].cu_seqlens_q.shape[0]:
        assert overlap.parts.early_kv is None
        overlap.join()
        overlap = None
    for number, launch in enumerate(launches):
        k, v = _rows(k_EHD, launch.keys), _rows(v_EHV, launch.keys)
        if launch.rows is not None:
            q = q_RHD.index_select(0, launch.rows)
            part = out.new_empty(q.shape[0], *out.shape[1:]), lse.new_empty(heads, q.shape[0])
            kernel(q, k, v, *part, launch, params)
            out.index_copy_(0, launch.rows, part[0])
            lse.index_copy_(1, launch.rows, part[1])
        elif overlap is not None:
            parts = overlap.parts.split(launch, (k, v))
            overlap.run([partial(kernel, q_RHD[q], *x, out[q], lse[:, q], part, params) for part, q, x in parts])
        elif launch.stop:
            seen = 0, launch.stop
            part = lse if launch.stop == rows else lse[:, : launch.stop]
            kernel(_rows(q_RHD, seen), k, v, _rows(out, seen), part, launch, params)
        if into is None and number == 0 and (launch.gaps or launch.stop < rows):
            zero_gaps(out, lse, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return out, lse


def run_backward(
    kernel: Backward,
    dout_RHV: Tensor,
    q_RHD: Tensor,
    k_EHD: Tensor,
    v_EHV: Tensor,
    out_RHV: Tensor,
    lse_HR: Tensor,
    tables: Tables,
    params: Params,
    overlap: BackwardOverlap | BackwardParts | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (R, Hq, D), exact zeros in rows of no piece; dk (E, Hkv, D) and dv (E, Hkv, V), views of one (E, C) buffer and
    zeros past the last key, or `overlap.grads`, where rows that no piece reads keep what they hold. `into`: dq is
    written there, and only in rows of pieces."""
    rows = q_RHD.shape[0]
    dq = torch.empty_like(q_RHD, memory_format=torch.contiguous_format) if into is None else into
    launches = launches_of(tables, rows)
    if isinstance(overlap, BackwardParts):
        _run_in_parts(kernel, dout_RHV, q_RHD, k_EHD, v_EHV, out_RHV, lse_HR, dq, tables, params, overlap)
        return dq, *overlap.overlaps[1].grads
    inside = overlap is not None and len(launches) == 1 and launches[0].stop > 0
    if overlap is not None and not inside:
        overlap.keys_needed()
    dk, dv = _grad_rows(k_EHD, v_EHV, params.unrounded) if overlap is None else overlap.grads
    last = max((launch.keys[1] for launch in launches), default=0)
    if overlap is None and last < dk.shape[0]:
        dk[last:], dv[last:] = 0, 0
    for number, launch in enumerate(launches):
        k, v, grad_k, grad_v = (_rows(x, launch.keys) for x in (k_EHD, v_EHV, dk, dv))
        if overlap is not None:
            launch = replace(launch, overlap=overlap.of_keys(slice(*launch.keys), calls=inside))
        q, dout = _clean(q_RHD, tables, launch), _clean(dout_RHV, tables, launch)
        out, lse, grad = out_RHV, lse_HR, dq
        if launch.rows is not None:
            out, lse = out.index_select(0, launch.rows), lse.index_select(1, launch.rows)
            grad = dq.new_empty(q.shape)
        elif launch.stop < rows:
            out, lse, grad = out[: launch.stop], lse[:, : launch.stop], dq[: launch.stop]
        if q.shape[0]:
            kernel(dout, q, k, v, out, lse, grad, grad_k, grad_v, launch, params)
        if launch.rows is not None:
            dq.index_copy_(0, launch.rows, grad)
        if into is None and number == 0 and (launch.gaps or launch.stop < rows):
            zero_gaps(dq, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    if overlap is not None and not inside:
        overlap.gradients_written()
    return dq, dk, dv


def _run_in_parts(
    kernel: Backward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor,
    tables: Tables, params: Params, overlap: BackwardParts,
) -> None:  # fmt: skip
    """`run_backward` of a batch of one launch, in two parts: writes dq, and gradients of keys where `overlap` says."""
    (launch,) = launches_of(tables, q.shape[0])
    q, dout = _clean(q, tables, launch), _clean(dout, tables, launch)

    def over(part: Launch, rows: slice, keys: tuple[Tensor, ...]) -> Callable[[BackwardOverlap], None]:
        def run(at: BackwardOverlap) -> None:
            at = at.of_keys(slice(keys[0].shape[0]), calls=True)
            inputs = dout[rows], q[rows], keys[0], keys[1], out[rows], lse[:, rows]
            kernel(*inputs, dq[rows], *at.grads, replace(part, overlap=at), params)

        return run

    overlap.run([over(*part) for part in overlap.parts.split(launch, (_rows(k, launch.keys), _rows(v, launch.keys)))])
    if launch.gaps or launch.stop < dq.shape[0]:
        zero_gaps(dq, None, tables.cu_seqlens_q, tables.cu_seqlens_k)


def _clean(x: Tensor, tables: Tables, launch: Launch) -> Tensor:
    """The rows of x that a launch reads, without NaN in rows that belong to no piece."""
    if launch.rows is not None:
        return x.index_select(0, launch.rows)
    if not launch.dirty:
        return _rows(x, (0, launch.stop))
    x = x.clone(memory_format=torch.contiguous_format)
    zero_gaps(x, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return x


def _rows(x: Tensor, part: tuple[int, int]) -> Tensor:
    """Rows [first, stop) of x; x itself where these are all, for a view takes the host almost as long as a launch."""
    first, stop = part
    return x if first == 0 and stop >= x.shape[0] else x[first:stop]


def _grad_rows(k_EHD: Tensor, v_EHV: Tensor, fp32: bool) -> tuple[Tensor, Tensor]:
    k_width, v_width = k_EHD.shape[1] * k_EHD.shape[2], v_EHV.shape[1] * v_EHV.shape[2]
    buffer = k_EHD.new_empty(k_EHD.shape[0], k_width + v_width, dtype=torch.float32 if fp32 else None)
    return buffer[:, :k_width].view(k_EHD.shape), buffer[:, k_width:].view(v_EHV.shape)
