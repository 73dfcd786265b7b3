"""Packed attention as an op: a rank's pieces in one variable-length launch, forward and backward.

Shapes: R local rows, E expanded rows, Hq = Hkv * n heads, D and V head dims of qk and v, C = Hkv * (D + V).
The op takes this rank's own k and v beside the expanded rows: they route the gradient. Its backward exchanges the
rows again unless they were kept, runs the kernel's backward, and sends the gradients home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import capabilities, load
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.planning.routes.head_deal import HeadDeal

from .exchange import exchange_kv, return_kv
from .heads import gather_heads, own_sinks, scatter_heads
from .merge import add_sinks, sinks_gradient
from .rows import as_rows, split_kv
from .saved import Saved, fake_results, no_gradients

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
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
    exchange: str,
    group: str,
    world_size: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of their documents.

    Args:
        q: (R, Hq, D). k, v: (R, Hkv, D) and (R, Hkv, V), this rank's rows. kv: (E, C), the expanded rows.
        cu_seqlens_q, cu_seqlens_k, pieces, launches: `Schedule.attention` (pieces and launches on the host).
        route: `Schedule.route(exchange)`, for the backward.
        scale: softmax scale. softcap: 0.0, or logits become softcap * tanh(logits / softcap).
        kernel: module of `cp_rewrite.kernels` that runs forward and backward.
        deterministic: bitwise repeatable backward. keep_kv: save `kv` instead of exchanging again.
        exchange, group, world_size: how `kv` came about.
        sinks: (Hq,) one more logit per head, which draws weight and adds no value.
    Returns:
        out (R, Hq, V) in q's dtype, exact zeros in rows of no document; lse (Hq, R) fp32, -inf there, no gradient.
    """
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    keys, values = split_kv(kv, k.shape[1], k.shape[2], v.shape[2])
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, keys, values, tables, Params(scale, softcap, deterministic))
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_results(q, v)


@custom_op("cp_rewrite::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    heads_kv: int,
    dim_v: int,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    unrounded: bool,
) -> tuple[Tensor, Tensor]:
    """dq (R, Hq, D) in q's dtype and dkv (E, C) in kv's, or in fp32 with `unrounded` (see `Params`); exact zeros in
    rows of no piece."""
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    keys, values = split_kv(kv, heads_kv, q.shape[2], dim_v)
    params = Params(scale, softcap, deterministic, unrounded)
    with nvtx("attention_backward"):
        dq, dk, dv = load(kernel).backward(dout, q, keys, values, out, lse, tables, params)
    return dq, as_rows(dk, dv, keys, values)


@packed_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, kv: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape, dtype=torch.float32 if args[-1] else None)


@dataclass(frozen=True)
class HeadScatter:
    """Attention inside an all-to-all. Args: deal: who gets which heads. dims: (D, V). group: name of the ranks'."""

    deal: HeadDeal
    dims: tuple[int, int]
    group: str


def attend(
    q: Any,
    k: Any,
    v: Any,
    tables: Sequence[Any],
    route: Sequence[Any],
    where: tuple[str, str, int],
    params: Params,
    kernel: str,
    keep_kv: bool = False,
    sinks: Any = None,
    heads: HeadScatter | None = None,
) -> Any:
    """Exchange keys and values, then attend: (out, lse) of `packed_attention`. Works on tensors and on graph proxies.

    Args:
        q, k, v: (R, Hq, D), (R, Hkv, D), (R, Hkv, V). tables: the four tensors of `Schedule.attention`.
        route: the tensors of `Schedule.route(exchange)`. where: exchange, group name, world size. sinks: (Hq,).
            For `p2p` both are those of `ring_tables`, and keep_kv says nothing: rows go round again.
        heads: scatter heads first; `route` then ends with `row_order` and `row_inverse`, and `lse` is of the heads
            that this rank has, in the order of its gathered rows; `heads.gather_lse` brings it home.
    """
    if heads is not None:
        *route, order, inverse = route
        q, k, v = scatter_heads(q, k, v, order, inverse, heads.deal, heads.dims, heads.group)
        sinks = sinks if sinks is None else own_sinks(sinks, heads.deal, heads.group)
        result = attend(q, k, v, tables, route, where, params, kernel, keep_kv, sinks)
        return gather_heads(result[0], order, inverse, heads.deal, heads.group), result[1]
    numbers = (params.scale, params.softcap, kernel, params.deterministic)
    if where[0] == "p2p":
        return _ops.ring_attention.default(q, k, v, *tables, *route, *numbers, *where[1:], sinks)
    if where[0] == "push" and capabilities(kernel).overlaps_exchange:
        result = _ops.pushed_attention.default(q, k, v, *tables, list(route), *numbers, keep_kv, where[1], sinks)
        return result[0], result[1]
    kv = exchange_kv(k, v, route, *where)
    return _ops.packed_attention.default(q, k, v, kv, *tables, list(route), *numbers, keep_kv, *where, sinks)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, kv, *tables = inputs[:8]
    route, ctx.scale, ctx.softcap, ctx.kernel, ctx.deterministic, keep_kv = inputs[8:14]
    *ctx.where, sinks = inputs[14:]
    ctx.mark_non_differentiable(output[1])
    Saved(q, k, v, *output, tables, route, kv if keep_kv else None, sinks).keep(ctx)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Any, ...]:
    x = Saved.of(ctx)
    dsinks = None if x.sinks is None else sinks_gradient(dout, x.out, x.lse, x.sinks)
    kv = exchange_kv(x.k, x.v, x.route, *ctx.where, after=dout) if x.kv is None else x.kv
    dq, dkv = _ops.packed_attention_backward.default(
        dout,
        x.q,
        kv,
        x.out,
        x.lse,
        *x.tables,
        x.k.shape[1],
        x.v.shape[2],
        ctx.scale,
        ctx.softcap,
        ctx.kernel,
        ctx.deterministic,
        ctx.where[0] != "local" and capabilities(ctx.kernel).unrounded_gradients(x.q, x.k.shape[1]),
    )
    dk, dv = return_kv(dkv, x.k, x.v, x.route, *ctx.where)
    return dq, dk.to(x.k.dtype), dv.to(x.v.dtype), *([None] * 5), no_gradients(ctx), *([None] * 8), dsinks


packed_attention.register_autograd(_backward, setup_context=_setup_context)
