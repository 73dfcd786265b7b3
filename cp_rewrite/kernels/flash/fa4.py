"""FlashAttention 4 (`pip install cp_rewrite[fa4]`), Hopper and Blackwell: its two entry points behind our tables.

The first call of a new combination of dtype, head dims and window compiles for some seconds.
"""

from __future__ import annotations

import importlib
import math
from functools import cache, partial
from typing import Any

from torch import Tensor

from cp_rewrite.kernels.select import AttentionSpec, DeviceFacts, Params

from . import varlen
from .fa4_internals import (
    FlashCall,
    aligned,
    capabilities,
    forward_call,
    key_of,
    noting,
    run_backward,
    was_read,
    without_grad,
)
from .varlen import Launch

__all__ = ["backward", "capabilities", "forward", "reasons"]


def reasons(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Why this kernel can't run; empty: it can."""
    found = facts.missing("flash_attn.cute", "pip install 'cp_rewrite[fa4]'")
    found += facts.unless_capability((9, 10), "Hopper or Blackwell")
    found += spec.unless_half()
    dims = (spec.head_dim, spec.head_dim_v)
    if any(dim % 8 for dim in dims) or not all(8 <= dim <= 256 for dim in dims):
        found.append(f"head dims must be multiples of 8 from 8 to 256, got {dims}")
    elif facts.major == 10 and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
        found.append(f"on Blackwell head dims go up to 128, or are (192, 128) or (256, 256), got {dims}")
    if spec.needs_backward and spec.heads != spec.heads_kv and spec.head_dim != spec.head_dim_v:
        found.append("the backward with grouped heads needs equal head dims of keys and values")
    return found + (_wrong_gradients(spec, facts) if spec.needs_backward else [])


def _wrong_gradients(spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Where the backward of 4.0.0b36 gives wrong gradients without an error.

    Head dims that are no multiple of 32: on Hopper two of its kernels lay the fp32 gradients out differently (pull
    request 2896 of the library); Blackwell had errors of its own there (2698).

    On Hopper, without a causal mask, head dims of q and k from 97 to 128: its tiles have 80 queries. It stores the sums
    of out * dout 16 or 48 rows too far, sometimes over those of the next entry, unless the head dim of v rounds up, by
    32, to 128 or 256.

    On Blackwell, half of v's head dim no multiple of the columns in which it stores gradients of k: those of v are
    stored in as many (issue 2552, of (128, 96)). It was seen without cu_seqlens; with them, which we give, 4.0.0b36
    stores otherwise, where heads are not grouped, but nobody has run it.
    """
    dims = (spec.head_dim, spec.head_dim_v)
    found: list[str] = []
    if any(dim % 32 and dim % 8 == 0 for dim in dims):  # other dims have a reason already
        found.append(f"its gradients can be wrong at head dims that are no multiple of 32, got {dims}")
    if facts.major == 9 and not spec.causal and 96 < spec.head_dim <= 128 and -(-spec.head_dim_v // 32) % 4:
        found.append(f"its gradients on Hopper can be wrong without a causal mask at head dims {dims}")
    if facts.major == 10 and spec.head_dim_v // 2 % math.gcd(32, spec.head_dim // 2):
        found.append(f"its gradients of v on Blackwell can be wrong at head dims {dims}")
    return found


@cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params) -> None:
    tensors = q, k, v, out, lse
    key = key_of(tensors, params.scale, params.softcap)
    known = launch.kept.get(key)
    if known is not None and aligned((q, k, v, out)):
        kernel, rest = known
        kernel(*without_grad(*tensors), *rest)
        return
    run: Any = _interface()._flash_attn_fwd
    calls: list[FlashCall] | None = [] if was_read() and key not in launch.kept else None
    if calls is not None:
        run = noting(run, calls)
    run(q, k, v, softmax_scale=params.scale, softcap=params.softcap or None, out=out, lse=lse, **_arguments(launch))
    if calls is not None:
        launch.kept[key] = forward_call(calls, tensors, (launch.cu_seqlens_q, launch.cu_seqlens_k))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    launch: Launch, params: Params,
) -> None:  # fmt: skip
    inputs, grads, overlap = (q, k, v, out, dout, lse), (dq, dk, dv), launch.overlap
    mxint15 = overlap is not None and overlap.mxint15
    key = key_of((*inputs, *grads), dk.dtype, mxint15, params.scale, params.softcap, params.deterministic)
    known = launch.kept.get(key)
    if known is not None and aligned((*inputs[:5], *grads)):
        known(inputs, grads, overlap)
        return
    run: Any = _interface()._flash_attn_bwd
    if was_read() or overlap is not None or params.unrounded:
        run = partial(run_backward, run, overlap)
    noted = run(
        *inputs,
        softmax_scale=params.scale,
        softcap=params.softcap,
        deterministic=params.deterministic,
        dq=dq,
        dk=dk,
        dv=dv,
        **_arguments(launch),
    )
    if was_read():
        launch.kept[key] = noted.again(inputs[:5], (launch.cu_seqlens_q, launch.cu_seqlens_k))


def _arguments(launch: Launch) -> dict[str, Any]:
    """Lengths as Python ints: a tensor there would make a new compile key at every call."""
    left, right = launch.window
    return {
        "cu_seqlens_q": launch.cu_seqlens_q,
        "cu_seqlens_k": launch.cu_seqlens_k,
        "max_seqlen_q": launch.max_q,
        "max_seqlen_k": launch.max_k,
        "causal": launch.causal,
        "window_size_left": left,
        "window_size_right": None if launch.causal else right,
    }


forward, backward = varlen.functions(_forward, _backward)
