"""Packed attention over keys and values that are at hand: row after row as this rank's pieces read them.

Shapes: R local rows, E expanded rows, Hq = Hkv * n heads, D and V head dims of qk and v, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import load
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.ops.local_rows import as_rows, packed_width, split_kv
from cp_rewrite.ops.max_logits import note
from cp_rewrite.ops.merge import finished
from cp_rewrite.ops.schemas import call, fake_results, register_attention

_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::gathered_attention", mutates_args=())
def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
    sinks: Tensor | None,
    site: str = "",
) -> tuple[Tensor, Tensor]:
    """`packed_attention` of q (R, Hq, D) over expanded rows k (E, Hkv, D) and v (E, Hkv, V); nothing travels.

    Returns out (R, Hq, V) and lse (Hq, R), as there.
    """
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    params = Params(scale, softcap, deterministic)
    with nvtx("attention"):
        out, lse = load(kernel).forward(q, k, v, tables, params)
    note(site, q, k, tables, params)
    return finished(out, lse, tables, sinks)


@gathered_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_results(q, v)


@custom_op("cp_rewrite::gathered_attention_backward", mutates_args=())
def gathered_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    pieces: Tensor,
    launches: Tensor,
    scale: float,
    softcap: float,
    kernel: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """dq (R, Hq, D), and dk and dv as one (E, C); exact zeros in rows of no piece."""
    tables = Tables(cu_seqlens_q, cu_seqlens_k, pieces, launches)
    with nvtx("attention_backward"):
        dq, dk, dv = load(kernel).backward(dout, q, k, v, out, lse, tables, Params(scale, softcap, deterministic))
    return dq, as_rows(dk, dv, k, v)


@gathered_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape[0], packed_width(k, v))


def attend_gathered(
    q: Any, k: Any, v: Any, tables: Sequence[Any], params: Params, kernel: str, sinks: Any = None, site: str = ""
) -> Any:
    """(out, lse) of `gathered_attention`. Works on tensors and on graph proxies."""
    numbers = (params.scale, params.softcap, kernel, params.deterministic)
    return _ops.gathered_attention.default(q, k, v, *tables, *numbers, sinks, *((site,) if site else ()))


def _backward(x: SimpleNamespace, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv = call(_ops.gathered_attention_backward.default, x, dout=dout)
    return dq, *split_kv(dkv, x.k.shape[1], x.k.shape[2], x.v.shape[2])


register_attention(gathered_attention, _backward)
