"""Packed attention as an op: a rank's pieces in one variable-length launch, forward and backward.

packed_attention takes this rank's own k and v beside the expanded rows, for gradients go to them. Its backward
exchanges the rows again unless they were kept, runs the kernel's backward, and sends the gradients home.
gathered_attention takes expanded keys and values, row after row as the pieces read them; nothing travels.

All ops of attention share what stands first:

    merge_parts                 softmax results over parts of the keys, put together
    add_sinks, sinks_gradient   sinks, which are one more key without a value
    finished, fill_gaps         results for rows that saw no key at all
    register_attention          fakes and autograd

Shapes: R local rows, E expanded rows, H or Hq = Hkv * n query and Hkv key heads, D and V head dims of qk and v,
C = Hkv * (D + V). `lse` is (H, R); -inf (from some kernels +inf): the row saw no key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.kernels.rows import merge_steps
from cp_rewrite.kernels.select import Params, Tables, capabilities, load
from cp_rewrite.planning.names import PieceRow
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.torch_internals import call_directly

from .exchange import exchange_kv, return_kv
from .local_rows import as_rows, packed_width, split_kv
from .max_logits import note, scattered
from .scatter_heads import HeadScatter, gather_heads, own_sinks, scatter_heads
from .schemas import bind, call, gradients, keep, kept

_ops: Any = torch.ops.cp_rewrite


def merge_parts(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both: out (R, H, V) and lse, both in fp32 (fp64 for fp64).

    A row that saw no key in a part keeps what it has; one that saw none in both stays at 0 and -inf.
    """
    return merge_steps(torch.stack([out, part.to(out.dtype)]), torch.stack([lse, part_lse]))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one more logit per head, `sinks` (H,), that draws weight and adds no value.

        out' = out · exp(lse - lse'),   lse' = log(exp(lse) + exp(sink))

    Rows that saw no key stay at 0 and -inf. A kernel's backward given out' and lse' yields the gradients of q, k and v.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]).masked_fill(lse == -torch.inf, -torch.inf)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return (out * weight.t()[..., None]).to(out.dtype), total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,): minus the sum over rows of (the sink's weight) · (dout · out). Rows that saw no key are not read."""
    seen = lse != -torch.inf
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(~seen, 0.0))
    return -torch.where(seen, weight * delta, 0.0).sum(1).to(sinks.dtype)


def finished(out: Tensor, lse: Tensor, tables: Tables, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results of attention: a kernel's, with sinks added and rows of no document filled."""
    out, lse = (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    return (fill_gaps(out, lse) if has_gaps(tables, out.shape[0]) else out), lse


def fill_gaps(out: Tensor, lse: Tensor) -> Tensor:
    """out with copies in local rows of no document, padding and fill: of the last row before that saw a key, of the
    first where there is none. All other rows are the same bit for bit. The host does not wait for the device.

        row       0 1 2 3 4 5
        document  - A A - B -       -: lse -inf
        out of    1 1 2 2 4 4

    A model may divide by what attention gives, or take its logarithm. Such a row counts in no loss, but 0 times a
    gradient that is infinite is not 0: so it holds what is as valid as any token's.
    """
    if out.shape[0] == 0:
        return out
    gap = lse[0] == -torch.inf
    before = torch.where(gap, -1, torch.arange(gap.shape[0], device=gap.device)).cummax(0).values
    return out.index_select(0, torch.where(before < 0, gap.int().argmin(), before))


_known = WeakTensorKeyDictionary()


def has_gaps(tables: Tables, rows: int) -> bool:
    """True if some of the local rows may be of no document: of tables that are no ring's. Found once per batch."""
    known = _known.get(tables.pieces)
    if known is None:
        at = PieceRow(*tables.pieces.unbind(1))
        of_documents = int(((at.q1 - at.q0) * (at.k1 > at.k0)).sum())
        known = _known[tables.pieces] = -1 if tables.sizes_are_bounds else of_documents
    return known < rows


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (R, Hq, V) in q's dtype and lse (Hq, R) in fp32 (fp64 for fp64), of q (R, Hq, D) and v (R, Hkv, V)."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))


Backward = Callable[[SimpleNamespace, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(what was kept, by name, dout) -> dq, dk, dv."""


def register_attention(
    op: CustomOpDef, backward: Backward, more: Callable[[SimpleNamespace], tuple[Tensor, ...]] = lambda x: ()
) -> None:
    """Fakes and autograd of an attention op: gradients of out reach q, k, v and sinks.

    Kept are inputs and results by name. `kv`, expanded rows among either, is None without `keep_kv`.

    Args:
        more: fakes of what the op gives behind out and lse, by its arguments by name.
    """
    named = op._opoverload

    def fake(*inputs: Any) -> tuple[Tensor, ...]:
        x = bind(named, inputs)
        return *fake_results(x.q, x.v), *more(x)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = bind(named, inputs)
        x.out, x.lse, *rows = output
        if hasattr(x, "keep_kv"):
            x.kv = (*rows, getattr(x, "kv", None))[0] if x.keep_kv else None
        ctx.mark_non_differentiable(*output[1:])
        keep(ctx, **vars(x))

    def run(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
        x = kept(ctx)
        dsinks = None if x.sinks is None else sinks_gradient(dout, x.out, x.lse, x.sinks)
        dq, dk, dv = backward(x, dout)
        return gradients(named, x, q=dq, k=dk.to(x.k.dtype), v=dv.to(x.v.dtype), sinks=dsinks)

    op.register_fake(fake)
    op.register_autograd(run, setup_context=setup_context)


@custom_op("cp_rewrite::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    route: Sequence[Tensor], scale: float, softcap: float, kernel: str, deterministic: bool,
    keep_kv: bool, exchange: str, group: str, world_size: int, sinks: Tensor | None,
    site: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's queries over the keys of their documents.

    Args:
        q: (R, Hq, D). k, v: (R, Hkv, D) and (R, Hkv, V), this rank's rows. kv: (E, C), the expanded rows.
        cu_seqlens_q, cu_seqlens_k, pieces, launches: `Schedule.attention` (pieces and launches on the host).
        route: the tensors of the exchange's route, for the backward.
        scale: softmax scale. softcap: 0.0, or logits become softcap * tanh(logits / softcap).
        kernel: module of `cp_rewrite.kernels` that runs forward and backward.
        deterministic: bitwise repeatable backward. keep_kv: save `kv` instead of exchanging again.
        exchange, group, world_size: the fields of the `Exchange` that `kv` came by.
        sinks: (Hq,) one more logit per head, which draws weight and adds no value.
        site: its name, for `max_logits`; "" where these are not asked for.
    Returns:
        out (R, Hq, V) in q's dtype, in rows of no document copies of others (`fill_gaps`), into which no gradient goes;
        lse (Hq, R) fp32, -inf in such rows, no gradient.
    """
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    keys, values = split_kv(kv, k.shape[1], k.shape[2], v.shape[2])
    return _attended(q, keys, values, tables, Params(scale, softcap, deterministic), kernel, sinks, site)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, params: Params, kernel: str, sinks: Tensor | None, site: str
) -> tuple[Tensor, Tensor]:
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, k, v, tables, params)
    note(site, q, k, tables, params)
    return finished(out, lse, tables, sinks)


@custom_op("cp_rewrite::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    heads_kv: int, dim_v: int, scale: float, softcap: float, kernel: str, deterministic: bool, unrounded: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (R, Hq, D) in q's dtype and dkv (E, C) in kv's, or in fp32 with `unrounded` (see `Params`); exact zeros in
    rows of no piece."""
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    keys, values = split_kv(kv, heads_kv, q.shape[2], dim_v)
    params = Params(scale, softcap, deterministic, unrounded)
    return _gradients(dout, q, keys, values, out, lse, tables, params, kernel)


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tables: Tables, params: Params, kernel: str
) -> tuple[Tensor, Tensor]:
    with nvtx("attention_backward"):
        dq, dk, dv = load(kernel).backward(dout, q, k, v, out, lse, tables, params)
    return dq, as_rows(dk, dv, k, v)


@packed_attention_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    x = bind(_ops.packed_attention_backward.default, inputs)
    return x.q.new_empty(x.q.shape), x.kv.new_empty(x.kv.shape, dtype=torch.float32 if x.unrounded else None)


def travels_beside(exchange: Exchange, kernel: str) -> bool:
    """True if rows travel while the kernel works on what needs none of them (`pushed.py`)."""
    return exchange.kind == "push" and capabilities(kernel).overlaps_exchange


def attend(
    q: Any, k: Any, v: Any, tables: Sequence[Any], route: Sequence[Any], exchange: Exchange, params: Params,
    kernel: str, keep_kv: bool = False, sinks: Any = None, heads: HeadScatter | None = None, site: str = "",
) -> Any:  # fmt: skip
    """Exchange keys and values, then attend: (out, lse) of `packed_attention`. Works on tensors and on graph proxies.

    Args:
        q, k, v: (R, Hq, D), (R, Hkv, D), (R, Hkv, V). tables: the four tensors of `Schedule.attention`.
        route: the tensors of `exchange.route`. sinks: (Hq,). Where rows travel `in_steps`, tables and route are those
            of `ring_tables`, and keep_kv says nothing: rows go round again.
        heads: scatter heads first; `route` then ends with `row_order` and `row_inverse`, and `lse` is of the heads
            that this rank has, in the order of its gathered rows. site: its name, for `max_logits`.
    """
    if heads is not None:
        *route, order, inverse = route
        q, k, v = scatter_heads(q, k, v, order, inverse, heads)
        sinks = sinks if sinks is None else own_sinks(sinks, heads)
        site = scattered(site, heads.deal)
        result = attend(q, k, v, tables, route, exchange, params, kernel, keep_kv, sinks, None, site)
        return gather_heads(result[0], order, inverse, heads), result[1]
    numbers = (params.scale, params.softcap, kernel, params.deterministic)
    group, ranks = exchange.group, exchange.world_size
    last = (sinks, site) if site else (sinks,)
    if exchange.route.in_steps:
        return _ops.ring_attention.default(q, k, v, *tables, *route, *numbers, group, ranks, *last)
    if travels_beside(exchange, kernel):
        result = _ops.pushed_attention.default(q, k, v, *tables, list(route), *numbers, keep_kv, group, *last)
        return result[0], result[1]
    kv = exchange_kv(k, v, route, exchange)
    how = exchange.kind, group, ranks
    return _ops.packed_attention.default(q, k, v, kv, *tables, list(route), *numbers, keep_kv, *how, *last)


def _backward(x: SimpleNamespace, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    exchange = Exchange(x.exchange, x.group, x.world_size)
    x.kv = exchange_kv(x.k, x.v, x.route, exchange, after=dout) if x.kv is None else x.kv
    dq, dkv = call(
        _ops.packed_attention_backward.default,
        x,
        dout=dout,
        heads_kv=x.k.shape[1],
        dim_v=x.v.shape[2],
        unrounded=exchange.kind != "local" and capabilities(x.kernel).unrounded_gradients(x.q, x.k.shape[1]),
    )
    return dq, *return_kv(dkv, x.k, x.v, x.route, exchange)


register_attention(packed_attention, _backward)
for _op in (packed_attention, packed_attention_backward):
    call_directly(_op)


@custom_op("cp_rewrite::gathered_attention", mutates_args=())
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    scale: float, softcap: float, kernel: str, deterministic: bool, sinks: Tensor | None, site: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`packed_attention` of q (R, Hq, D) over expanded rows k (E, Hkv, D) and v (E, Hkv, V); nothing travels.

    Returns out (R, Hq, V) and lse (Hq, R), as there.
    """
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    return _attended(q, k, v, tables, Params(scale, softcap, deterministic), kernel, sinks, site)


@custom_op("cp_rewrite::gathered_attention_backward", mutates_args=())
def gathered_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, pieces: Tensor, launches: Tensor,
    scale: float, softcap: float, kernel: str, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (R, Hq, D), and dk and dv as one (E, C); exact zeros in rows of no piece."""
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    return _gradients(dout, q, k, v, out, lse, tables, Params(scale, softcap, deterministic), kernel)


@gathered_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape[0], packed_width(k, v))


def attend_gathered(
    q: Any, k: Any, v: Any, tables: Sequence[Any], params: Params, kernel: str, sinks: Any = None, site: str = ""
) -> Any:
    """(out, lse) of `gathered_attention`. Works on tensors and on graph proxies."""
    numbers = (params.scale, params.softcap, kernel, params.deterministic)
    return _ops.gathered_attention.default(q, k, v, *tables, *numbers, sinks, *((site,) if site else ()))


def _gathered_backward(x: SimpleNamespace, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv = call(_ops.gathered_attention_backward.default, x, dout=dout)
    return dq, *split_kv(dkv, x.k.shape[1], x.k.shape[2], x.v.shape[2])


register_attention(gathered_attention, _gathered_backward)
