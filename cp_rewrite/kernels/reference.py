"""Attention in plain torch, piece by piece: the oracle, on any device and dtype. Nothing optimised imports it.

Shapes: R local rows, E expanded rows, H heads (Hq = Hkv * N), D and V head dims of qk and v, B rows of a block.
Works in fp32 (fp64 for fp64 inputs); a (T, T) mask is never built: memory is bounded by `_BLOCK` logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .select import Params, Tables

_BLOCK = 1 << 22
"""Logits held at once."""
_SUMMED = 512
"""Rows that `sum_rows` copies at a time."""


def forward(q_RHD: Tensor, k_EHD: Tensor, v_EHV: Tensor, tables: Tables, params: Params) -> tuple[Tensor, Tensor]:
    """Attention of every piece over its own keys.

    Args:
        q_RHD: (R, Hq, D). k_EHD: (E, Hkv, D). v_EHV: (E, Hkv, V). Rows in no piece are not read.
    Returns:
        out: (R, Hq, V) in q's dtype, exact zeros in rows of no piece; lse: (Hq, R) fp32 (fp64 for fp64), -inf there.
    """
    acc = torch.promote_types(q_RHD.dtype, torch.float32)
    out = q_RHD.new_zeros(*q_RHD.shape[:2], v_EHV.shape[2])
    lse_HR = q_RHD.new_full((q_RHD.shape[1], q_RHD.shape[0]), -torch.inf, dtype=acc)
    for rows, keys, keep in _blocks(tables, q_RHD.shape[1], q_RHD.device):
        logits, _ = _logits(q_RHD[rows].to(acc), k_EHD[keys].to(acc), keep, params)
        lse = logits.logsumexp(-1)
        prob = _probabilities(logits, lse)
        value = torch.einsum("hnbk,khv->bhnv", prob, v_EHV[keys].to(acc))
        out[rows] = value.flatten(1, 2).to(out.dtype)
        lse_HR[:, rows] = lse.flatten(0, 1)
    return out, lse_HR


def backward(
    dout_RHV: Tensor, q_RHD: Tensor, k_EHD: Tensor, v_EHV: Tensor, out_RHV: Tensor, lse_HR: Tensor,
    tables: Tables, params: Params,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q (R, Hq, D), k (E, Hkv, D) and v (E, Hkv, V), in their dtypes; exact zeros in rows of no piece."""
    acc = torch.promote_types(q_RHD.dtype, torch.float32)
    dq = torch.zeros_like(q_RHD, memory_format=torch.contiguous_format)
    # Keys of a piece are summed over its blocks of queries, so dk and dv are summed in fp32.
    dk = torch.zeros(k_EHD.shape, dtype=acc, device=k_EHD.device)
    dv = torch.zeros(v_EHV.shape, dtype=acc, device=v_EHV.device)
    heads_kv = k_EHD.shape[1]
    for rows, keys, keep in _blocks(tables, q_RHD.shape[1], q_RHD.device):
        q, k, v = q_RHD[rows].to(acc), k_EHD[keys].to(acc), v_EHV[keys].to(acc)
        logits, slope = _logits(q, k, keep, params)
        prob = _probabilities(logits, lse_HR[:, rows].to(acc).unflatten(0, (heads_kv, -1)))
        dout = dout_RHV[rows].to(acc).unflatten(1, (heads_kv, -1))
        delta = (dout * out_RHV[rows].to(acc).unflatten(1, (heads_kv, -1))).sum(-1).permute(1, 2, 0)
        dprob = torch.einsum("bhnv,khv->hnbk", dout, v)
        dlogits = prob * (dprob - delta[..., None]) * slope
        dv[keys] += torch.einsum("hnbk,bhnv->khv", prob, dout)
        dk[keys] += torch.einsum("hnbk,bhnd->khd", dlogits, q.unflatten(1, (heads_kv, -1)))
        dq[rows] = torch.einsum("hnbk,khd->bhnd", dlogits, k).flatten(1, 2).to(dq.dtype)
    return dq, dk.to(k_EHD.dtype), dv.to(v_EHV.dtype)


def max_logits(q_RHD: Tensor, k_EHD: Tensor, tables: Tables, params: Params) -> Tensor:
    """(Hq,) fp32 (fp64 for fp64): the largest logit of each head over all pieces; -inf: it sees no key."""
    acc = torch.promote_types(q_RHD.dtype, torch.float32)
    found = q_RHD.new_full((q_RHD.shape[1],), -torch.inf, dtype=acc)
    for rows, keys, keep in _blocks(tables, q_RHD.shape[1], q_RHD.device):
        logits, _ = _logits(q_RHD[rows].to(acc), k_EHD[keys].to(acc), keep, params)
        found = torch.maximum(found, logits.amax((2, 3)).flatten())
    return found


def sum_rows(x_EC: Tensor, ptr: Tensor, rows: Tensor) -> Tensor:
    """(n, C) in fp32 (fp64 for fp64): row i is the sum of x_EC at rows[2 i] and rows[2 i + 1], where these are not
    negative, and at rows[ptr[i]:ptr[i + 1]], in that order."""
    acc = torch.promote_types(x_EC.dtype, torch.float32)
    n = ptr.numel() - 1
    each = torch.arange(n, device=ptr.device)
    there = rows[: 2 * n] >= 0
    others = torch.repeat_interleave(each, ptr.diff())
    target = torch.cat([each.repeat_interleave(2)[there], others])
    source = torch.cat([rows[: 2 * n][there], rows[2 * n : 2 * n + others.numel()]])
    found = torch.zeros(n, x_EC.shape[1], dtype=acc, device=x_EC.device)
    for to, of in zip(target.split(_SUMMED), source.split(_SUMMED), strict=True):
        found.index_add_(0, to, x_EC[of].to(acc))
    return found


def _blocks(tables: Tables, heads: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(query rows, key rows, which keys each row sees or None for all) block by block; launches do not matter here."""
    for q0, q1, k0, k1, left, right, _ in tables.pieces.tolist():
        if q1 == q0 or k1 == k0:
            continue
        shift = (k1 - k0) - (q1 - q0)
        block = max(1, _BLOCK // (heads * (k1 - k0)))
        for a in range(0, q1 - q0, block):
            b = min(a + block, q1 - q0)
            lo = 0 if left < 0 else max(0, a + shift - left)
            hi = k1 - k0 if right < 0 else min(k1 - k0, b + shift + right)
            yield (
                slice(q0 + a, q0 + b),
                slice(k0 + lo, k0 + hi),
                _visible(a, b, lo, hi, shift, left, right, device),
            )


def _visible(
    a: int, b: int, lo: int, hi: int, shift: int, left: int, right: int, device: torch.device
) -> Tensor | None:
    if left < 0 and right < 0:
        return None
    delta = torch.arange(a, b, device=device)[:, None] + shift - torch.arange(lo, hi, device=device)[None, :]
    keep = torch.ones_like(delta, dtype=torch.bool)
    if left >= 0:
        keep &= delta <= left
    if right >= 0:
        keep &= -delta <= right
    return keep


def _logits(q_BHD: Tensor, k_KHD: Tensor, keep_BK: Tensor | None, params: Params) -> tuple[Tensor, Tensor | float]:
    """Masked logits (Hkv, N, B, K) and their slope against q·k."""
    raw = torch.einsum("bhnd,khd->hnbk", q_BHD.unflatten(1, (k_KHD.shape[1], -1)), k_KHD) * params.scale
    slope: Tensor | float = params.scale
    if params.softcap:
        squashed = torch.tanh(raw / params.softcap)
        raw, slope = params.softcap * squashed, params.scale * (1 - squashed * squashed)
    return (raw if keep_BK is None else raw.masked_fill(~keep_BK, -torch.inf)), slope


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), 0 where a row sees no key (lse -inf)."""
    return torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
