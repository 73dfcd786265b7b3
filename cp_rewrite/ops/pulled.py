"""Packed attention whose rows travel through symmetric memory while the kernel works on what needs none of them.

    forward     own rows | early entries' kernel | late entries' kernel, as the GPU empties
                         | rows of peers, on a second stream, before the late entries

    backward    sums of out * dout | kernel | rounding of dq
                rows of peers      |        | gradients go home

Only for kernels that run in parts (`select.in_parts`); others exchange first (`packed_attention`). Results are the same
bit for bit: the same kernels read the same rows. Shapes: R local rows, E expanded rows, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import load
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.nvtx import nvtx
from cp_rewrite.pull import NAMES

from .merge import add_sinks, sinks_gradient
from .pull import PULLED, RETURNED, STAGES
from .rows import as_rows, split_kv
from .saved import Saved, fake_results, no_gradients

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::pulled_attention", mutates_args=())
def pulled_attention(
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
    """`packed_attention` with its exchange: (out, lse, kv). `route` is in the order of `pull.NAMES`; kv (E, C) are the
    expanded rows, which the backward pulls again unless `keep_kv`."""
    from cp_rewrite.kernels import symm
    from cp_rewrite.kernels.varlen import Stages

    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    rows, (cut, *rest) = route[PULLED], route[STAGES]
    n, *before, early = cut.tolist()
    main, side = torch.cuda.current_stream(q.device), symm.side_stream(q.device)
    stages = None
    with nvtx("exchange"):
        kv = symm.pull_rows(k, v, *rows, group=group, parts=symm.OWN if n else symm.ALL)
        if n > 0:
            symm.pull_rows(k, v, *rows, group=group, out=kv, parts=symm.EARLY, stream=side)
            main.wait_stream(side)
            stages = Stages((n, *before), early, (rest[0], rest[1]), side)
        if n:
            symm.pull_rows(k, v, *rows, group=group, out=kv, parts=symm.LATE, stream=side)
    with nvtx("attention"):
        keys, values = split_kv(kv, k.shape[1], k.shape[2], v.shape[2])
        out, lse = load(kernel).forward(q, keys, values, tables, params, stages)
    if n:
        main.wait_stream(side)
    return (out, lse, kv) if sinks is None else (*add_sinks(out, lse, sinks), kv)


@pulled_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    route: Sequence[Tensor],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = route[NAMES.index("job_rows")].shape[0]
    return *fake_results(q, v), k.new_empty(rows, k.shape[1] * (k.shape[2] + v.shape[2]))


@custom_op("cp_rewrite::pulled_attention_backward", mutates_args=())
def pulled_attention_backward(
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
    from cp_rewrite.kernels import symm
    from cp_rewrite.kernels.launches import Beside

    tables, params = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches), Params(scale, softcap, deterministic)
    heads, dims = k.shape[1], (k.shape[2], v.shape[2])
    main, side = torch.cuda.current_stream(q.device), symm.side_stream(q.device)
    # A stream that has nothing to do with a capture must not be waited for in it.
    keys_needed: Callable[[], None] = partial(main.wait_stream, side) if kv is None else lambda: None
    if kv is None:
        # Copies, where rows have holes, must outlive what the second stream does.
        k, v = symm.dense_rows(k), symm.dense_rows(v)
        with nvtx("exchange"):
            kv = symm.pull_rows(k, v, *route[PULLED], group=group, stream=side)
    home: list[Tensor] = []

    def beside(dk: Tensor, dv: Tensor) -> Beside:
        def send_home() -> None:
            rows, ptr, contributions, most = route[RETURNED]
            dkv = as_rows(dk, dv, keys, values)
            with nvtx("exchange_backward"):
                sums = symm.return_rows(dkv, rows, ptr, contributions, int(most), heads, dims, group, side)
            home.extend((*sums, dkv))  # which must outlive what the second stream does, too

        return Beside(keys_needed, send_home)

    keys, values = split_kv(kv, heads, *dims)
    with nvtx("attention_backward"):
        dq, _, _ = load(kernel).backward(dout, q, keys, values, out, lse, tables, params, beside)
    main.wait_stream(side)
    dk, dv, _ = home
    return dq, dk, dv


@pulled_attention_backward.register_fake
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
    dq, dk, dv = _ops.pulled_attention_backward.default(
        dout, x.q, x.k, x.v, x.kv, x.out, x.lse, *x.tables, x.route, *ctx.numbers, ctx.group
    )
    return dq, dk, dv, *([None] * 4), no_gradients(ctx), *([None] * 6), dsinks


pulled_attention.register_autograd(_backward, setup_context=_setup_context)
