"""Gradients of a chunk's queries, keys, decays and WY keys, from states and gradients of states around it.

fla's kernel for this multiplies by the transpose of a product that tensor cores hold, which Triton 3.4 to 3.7.0
compiles wrongly on Hopper (fla refuses to run it there). This one computes the transposed product by itself.

Shapes: R rows, Hk heads of queries and keys, H heads, K and V head dims, C chunks of L rows.
"""

# pyright: reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import CHUNK, Runs

_BLOCK = 64


@triton.jit
def _kernel(
    q, k, v, g, h, do, dh, dv, dq, dk, dw, dg, offsets, chunks, rows, scale,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """One block of BK channels of one chunk and head."""
    block_k, chunk = tl.program_id(0) % tl.cdiv(K, BK), (tl.program_id(0) // tl.cdiv(K, BK)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    run, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(offsets + run).to(tl.int64) + number * L
    stop = tl.load(offsets + run + 1).to(tl.int64)
    row = start + tl.arange(0, L)
    there = row < stop
    column = block_k * BK + tl.arange(0, BK)
    inside = there[:, None] & (column < K)[None, :]
    at_q = (row[:, None] * HK + head // (H // HK)) * K + column[None, :]
    at_out = (row[:, None] * H + head) * K + column[None, :]
    state = (chunk * H + head) * K * V

    dq_LK = tl.zeros([L, BK], dtype=tl.float32)
    dk_LK = tl.zeros([L, BK], dtype=tl.float32)
    dw_LK = tl.zeros([L, BK], dtype=tl.float32)
    weights_q = tl.zeros([L, L], dtype=tl.float32)  # row i of the later token, column j of the earlier one
    weights_k = tl.zeros([L, L], dtype=tl.float32)  # its transpose
    kept = 0.0
    for first in range(0, V, BV):
        value = first + tl.arange(0, BV)
        at_v = (row[:, None] * H + head) * V + value[None, :]
        mask_v = there[:, None] & (value < V)[None, :]
        at_h = state + column[None, :] * V + value[:, None]
        mask_h = (value < V)[:, None] & (column < K)[None, :]
        v_LV = tl.load(v + at_v, mask=mask_v, other=0.0)
        do_LV = tl.load(do + at_v, mask=mask_v, other=0.0)
        h_VK = tl.load(h + at_h, mask=mask_h, other=0.0)
        dh_VK = tl.load(dh + at_h, mask=mask_h, other=0.0)
        kept += tl.sum(h_VK.to(tl.float32) * dh_VK.to(tl.float32))
        weights_q = tl.dot(do_LV, tl.trans(v_LV), weights_q)
        weights_k = tl.dot(v_LV, tl.trans(do_LV), weights_k)
        dq_LK = tl.dot(do_LV, h_VK.to(do_LV.dtype), dq_LK)
        dk_LK = tl.dot(v_LV, dh_VK.to(v_LV.dtype), dk_LK)
        if DELTA:
            dv_LV = tl.load(dv + at_v, mask=mask_v, other=0.0)
            dw_LK = tl.dot(dv_LV.to(v_LV.dtype), h_VK.to(v_LV.dtype), dw_LK)
    if DELTA:
        tl.store(dw + at_out, (-dw_LK).to(dw.dtype.element_ty), mask=inside)

    q_LK = tl.load(q + at_q, mask=inside, other=0.0)
    k_LK = tl.load(k + at_q, mask=inside, other=0.0)
    g_L = tl.load(g + row * H + head, mask=there, other=0.0)
    last = tl.minimum(start + L, stop) - 1
    g_last = tl.load(g + last * H + head)
    place = tl.arange(0, L)
    both = there[:, None] & there[None, :]
    lower = (place[:, None] >= place[None, :]) & both
    upper = (place[:, None] <= place[None, :]) & both
    across = g_L[:, None] - g_L[None, :]
    weights_q = tl.where(lower, weights_q * tl.exp2(tl.where(lower, across, 0.0)), 0.0) * scale
    weights_k = tl.where(upper, weights_k * tl.exp2(tl.where(upper, -across, 0.0)), 0.0) * scale
    dq_LK = dq_LK * (tl.exp2(g_L) * scale)[:, None]
    dk_LK = dk_LK * tl.where(there, tl.exp2(tl.where(there, g_last - g_L, 0.0)), 0.0)[:, None]
    of_last = kept * tl.exp2(g_last) + tl.sum(dk_LK * k_LK)
    dq_LK = tl.dot(weights_q.to(k_LK.dtype), k_LK, dq_LK)
    dk_LK = tl.dot(weights_k.to(q_LK.dtype), q_LK, dk_LK)
    tl.store(dq + at_out, dq_LK.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + at_out, dk_LK.to(dk.dtype.element_ty), mask=inside)
    dg_L = tl.sum(dq_LK * q_LK, axis=1) - tl.sum(dk_LK * k_LK, axis=1)
    dg_L += tl.where(row == last, of_last, 0.0)
    tl.store(dg + (block_k * rows + row) * H + head, dg_L, mask=there)


def chunk_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h: Tensor, do: Tensor, dh: Tensor, dv: Tensor | None,
    runs: Runs, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of q and k (1, R, H, K), of the WY keys (1, R, H, K), and of decays (1, R, H) at each token, in natural
    logarithms: those of g are sums from a token to its chunk's end.

    Args:
        q, k: (1, R, Hk, K). v, do: (1, R, H, V), of a delta rule the corrected values.
        g: (1, R, H) fp32, sums of decays from the chunk's start on, as powers of 2.
        h, dh: (1, C, H, K, V), states before chunks, gradients behind.
        dv: (1, R, H, V), gradients of the corrected values; None: no delta rule, and no gradient of WY keys.
    """
    rows, heads_k, channels = q.shape[1:]
    heads, values = v.shape[2:]
    blocks = triton.cdiv(channels, _BLOCK)
    dq, dk = (x.new_empty(1, rows, heads, channels) for x in (q, k))
    dw = None if dv is None else torch.empty_like(dk)
    dg = g.new_zeros(blocks, rows, heads)
    kernel: Any = _kernel
    kernel[(blocks * len(runs.chunks), heads)](
        q, k, v, g, h, do, dh, v if dv is None else dv, dq, dk, dk if dw is None else dw, dg,
        runs.offsets, runs.chunks, rows, scale, heads_k, heads, channels, values, CHUNK, _BLOCK, _BLOCK,
        dv is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dw, dg.sum(0, keepdim=True)
