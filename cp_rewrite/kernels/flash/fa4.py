"""FlashAttention 4 (`pip install cp_rewrite[fa4]`), Hopper and Blackwell: its two entry points behind our tables.

The first call of a new combination of dtype, head dims and window compiles for some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

from torch import Tensor

from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.select import AttentionSpec, DeviceFacts

from . import varlen
from .fa4_internals import keeps_sums, round_sums
from .launches import Beside, Launch

__all__ = ["backward", "forward", "in_parts", "keeps_sums", "reasons"]


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

    Fp32 gradients of head dims that are no multiple of 32 are laid out in two ways on Hopper (pull request 2896 of the
    library), and Blackwell had errors of its own there (2698). And on Hopper, without a causal mask or window, at head
    dims above 96 and up to 128, tiles have 80 queries: the sums of out * dout, where head dims of v do not round up to
    128 or 256, are stored 16 or 48 rows too far, sometimes over those of the next entry.
    """
    dims = (spec.head_dim, spec.head_dim_v)
    found: list[str] = []
    if any(dim % 32 and dim % 8 == 0 for dim in dims):  # those of other dims are told anyway
        found.append(f"its gradients can be wrong at head dims that are no multiple of 32, got {dims}")
    if facts.major == 9 and not spec.causal and 96 < spec.head_dim <= 128 and -(-spec.head_dim_v // 32) % 4:
        found.append(f"its gradients on Hopper can be wrong without a causal mask at head dims {dims}")
    return found


_IN_PARTS = ("4.0.0b36",)
"""Versions whose backward was read: it reads keys after `_bwd_preprocess` only, and never what
`_bwd_postprocess_convert` writes. Others run in one piece, with nothing beside them."""


@cache
def in_parts() -> bool:
    """Does this version tell when it needs keys, and when their gradients are written?"""
    try:
        return version("flash-attn-4") in _IN_PARTS
    except PackageNotFoundError:  # built from source under another name
        return False


def _interface() -> Any:
    import flash_attn.cute.interface as interface

    return interface


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params) -> None:
    _interface()._flash_attn_fwd(
        q, k, v, softmax_scale=params.scale, softcap=params.softcap or None, out=out, lse=lse, **_arguments(launch)
    )


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    launch: Launch,
    params: Params,
) -> None:
    beside = launch.beside
    if dk.dtype != q.dtype:  # the library wants its own dtype, and does not write there
        beside = beside or Beside((dk, dv))
        dk, dv = (x.view(q.dtype)[..., : x.shape[2]] for x in (dk, dv))
    run = _interface()._flash_attn_bwd if beside is None else _backward_in_parts(dq, dk, beside)
    run(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=params.scale,
        softcap=params.softcap,
        deterministic=params.deterministic,
        dq=dq,
        dk=dk,
        dv=dv,
        **_arguments(launch),
    )


def _backward_in_parts(dq: Tensor, dk: Tensor, beside: Beside) -> Callable[..., None]:
    """The library's backward, with what it does before it needs keys and after their gradients beside other work.

    It sums out * dout and clears its fp32 dq first, and rounds dq last: long for many rows of many heads. Its function
    runs here over the same globals but for those two helpers; nothing of the library is changed.
    """
    backward: Any = _interface()._flash_attn_bwd
    library = backward.__globals__
    rounding = library["_bwd_postprocess_convert"]
    late: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def preprocess(*args: Any, **kwargs: Any) -> None:
        library["_bwd_preprocess"](*args, **kwargs)
        beside.keys_needed()

    def convert(sums: Tensor, output: Tensor, scale: float, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> None:
        if output is dq:
            late.append(((sums, output, scale, cu_seqlens, *args), kwargs))
        elif beside.mxint15 or beside.wide:
            into = beside.grads[0 if output is dk else 1]
            round_sums(rounding, sums, output, into, scale, cu_seqlens, beside.holder_ptr, *args, **kwargs)
        else:
            rounding(sums, output, scale, cu_seqlens, *args, **kwargs)

    helpers = {"_bwd_preprocess": preprocess, "_bwd_postprocess_convert": convert}
    inner = FunctionType(backward.__code__, library | helpers, backward.__name__, backward.__defaults__)

    def run(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        beside.gradients_written()
        for positional, named in late:
            rounding(*positional, **named)

    return run


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
