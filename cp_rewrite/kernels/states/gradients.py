"""Gradients inside of a chunk, by kernels of ours: of what weights the pairs of its tokens, and of what states around
it reach.

    add_gradients_of_weights    queries, keys and decays of each channel, from gradients of the weights of pairs
    chunk_gradients             queries, keys, decays and WY keys, from states and gradients of states around the chunk

Shapes: R rows, Hk heads of queries and keys, H heads, K and V head dims, C chunks of L rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .select import CHUNK, Runs

# pyright: reportMissingParameterType=false, reportPrivateUsage=false


_CHANNELS, _FEW_CHANNELS, _KIMI_BLOCK = 64, 32, 16
"""Channels of a program of either kernel, and rows of a block."""
_FAR = 100.0
"""From here on powers of 2 are not sure to be numbers in fp32."""


@triton.jit
def _power(exponent, there):
    """0 where nothing is there."""
    return tl.where(there, tl.exp2(tl.where(there, exponent, 0.0)), 0.0)


@triton.jit
def _place(offsets, chunks, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr):
    """The place of this program: its first row, the row behind its run, and its channels."""
    blocks: tl.constexpr = tl.cdiv(K, BK)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    run, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(offsets + run).to(tl.int64) + number * L
    return start, tl.load(offsets + run + 1).to(tl.int64), tl.program_id(0) % blocks * BK + tl.arange(0, BK)


@triton.jit
def _from_middle(g, start, stop, column, H: tl.constexpr, K: tl.constexpr, L: tl.constexpr):
    """g (L, BK) less what it is in the chunk's middle; 0 where there is no row."""
    row, head = start + tl.arange(0, L), tl.program_id(1).to(tl.int64)
    known = column < K
    inside = (row < stop)[:, None] & known[None, :]
    middle = tl.minimum(start + L // 2, stop - 1)
    g_LK = tl.load(g + (row[:, None] * H + head) * K + column[None, :], mask=inside, other=0.0)
    anchor_K = tl.load(g + (middle * H + head) * K + column, mask=known, other=0.0)
    return tl.where(inside, g_LK - anchor_K[None, :], 0.0)


@triton.jit
def _load(
    q, k, beta, dw_q, dw_k, start, stop, column, HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, L: tl.constexpr
):
    """Rows, which of them are there, which numbers are; addresses of these with H heads and with HK; queries and keys,
    beta, and gradients of the weights of both."""
    place, head = tl.arange(0, L), tl.program_id(1).to(tl.int64)
    row = start + place
    there = row < stop
    inside = there[:, None] & (column < K)[None, :]
    at = (row[:, None] * H + head) * K + column[None, :]
    at_k = (row[:, None] * HK + head // (H // HK)) * K + column[None, :]
    at_w = (row[:, None] * H + head) * L + place[None, :]
    both = there[:, None] & there[None, :]
    q_LK = tl.load(q + at_k, mask=inside, other=0.0).to(tl.float32)
    k_LK = tl.load(k + at_k, mask=inside, other=0.0).to(tl.float32)
    beta_L = tl.load(beta + row * H + head, mask=there, other=0.0).to(tl.float32)
    w_q, w_k = tl.load(dw_q + at_w, mask=both, other=0.0), tl.load(dw_k + at_w, mask=both, other=0.0)
    return row, there, inside, at, at_k, q_LK, k_LK, beta_L, w_q, w_k


@triton.jit
def _add(
    q_LK, k_LK, beta_L, read_q, read_k, of_k, dq, dk, dg, db, at, inside, there, H: tl.constexpr
):  # fmt: skip
    """read_q, read_k: gradients of queries and, without beta, of keys that read; of_k: of keys that are read. db: at
    the first of the rows."""
    tl.store(db + tl.arange(0, read_k.shape[0]) * H, tl.sum(read_k * k_LK, 1), mask=there)
    read_k *= beta_L[:, None]
    tl.store(dq + at, tl.load(dq + at, mask=inside, other=0.0) + read_q, mask=inside)
    tl.store(dk + at, tl.load(dk + at, mask=inside, other=0.0) + read_k + of_k, mask=inside)
    found = q_LK * read_q + k_LK * (read_k - of_k)
    tl.store(dg + at, tl.load(dg + at, mask=inside, other=0.0) + found, mask=inside)


@triton.jit
def _by_products(
    q, k, g, beta, dw_q, dw_k, dq, dk, dg, db, offsets, chunks, rows, far,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """One block of BK channels of one chunk and head, unless g is far from what it is in the middle."""
    start, stop, column = _place(offsets, chunks, K, L, BK)
    above_LK = _from_middle(g, start, stop, column, H, K, L)
    leave = tl.max(tl.abs(above_LK)) >= FAR
    tl.store(far + tl.program_id(0) * H + tl.program_id(1), leave)
    if leave:
        return
    head = tl.program_id(1).to(tl.int64)
    _, there, inside, at, _, q_LK, k_LK, beta_L, w_q, w_k = _load(
        q, k, beta, dw_q, dw_k, start, stop, column, HK, H, K, L
    )
    decay, growth = tl.exp2(above_LK), tl.exp2(-above_LK)
    read_q = tl.dot(w_q, k_LK * growth) * decay
    read_k = tl.dot(w_k, k_LK * growth) * decay
    of_k = tl.dot(tl.trans(w_q), q_LK * decay)
    of_k = tl.dot(tl.trans(w_k), k_LK * beta_L[:, None] * decay, of_k) * growth
    block = tl.program_id(0) % tl.cdiv(K, BK) * (BK // NARROW)
    db += (block.to(tl.int64) * rows + start) * H + head
    _add(q_LK, k_LK, beta_L, read_q, read_k, of_k, dq, dk, dg, db, at, inside, there, H)


@triton.jit
def _by_pairs(
    q, k, g, beta, dw_q, dw_k, dq, dk, dg, db, offsets, chunks, rows, far,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Compute what `_by_products`, in blocks of WIDE channels, leaves over, in blocks of B rows."""
    blocks: tl.constexpr = tl.cdiv(K, BK)
    wide = tl.program_id(0) // blocks * tl.cdiv(K, WIDE) + tl.program_id(0) % blocks * BK // WIDE
    if tl.load(far + wide * H + tl.program_id(1)) == 0:
        return
    start, stop, column = _place(offsets, chunks, K, L, BK)
    place, head = tl.arange(0, L), tl.program_id(1).to(tl.int64)
    row, there, inside, at, at_k, q_LK, k_LK, beta_L, w_q, w_k = _load(
        q, k, beta, dw_q, dw_k, start, stop, column, HK, H, K, L
    )
    block, known = place // B, (column < K)[None, :]
    g_LK = tl.load(g + at, mask=inside, other=0.0)
    read_q = tl.zeros([L, BK], dtype=tl.float32)
    read_k = tl.zeros([L, BK], dtype=tl.float32)
    of_k = tl.zeros([L, BK], dtype=tl.float32)
    for b in range(1, L // B):  # what a block reads of earlier ones, by g of its first row
        first = start + b * B
        anchor = tl.load(g + (first * H + head) * K + column, mask=(first < stop) & (column < K), other=0.0)[None, :]
        read = k_LK * _power(anchor - g_LK, (place < b * B)[:, None] & (first < stop) & known)
        decay = _power(g_LK - anchor, (block == b)[:, None] & inside)
        read_q += tl.dot(w_q, read) * decay
        read_k += tl.dot(w_k, read) * decay
    for b in range(0, L // B - 1):  # what later ones read of a block, by g of its last row
        last = tl.minimum(start + (b + 1) * B, stop) - 1
        anchor = tl.load(g + (last * H + head) * K + column, mask=column < K, other=0.0)[None, :]
        decay = _power(g_LK - anchor, (place >= (b + 1) * B)[:, None] & inside)
        found = tl.dot(tl.trans(w_q), q_LK * decay)
        found = tl.dot(tl.trans(w_k), k_LK * beta_L[:, None] * decay, found)
        of_k += found * _power(anchor - g_LK, (block == b)[:, None] & inside)
    for d in range(0, B):  # a row reads the one d before it, and is read by the one d behind
        near = there & (place % B >= d)
        pair = near[:, None] & known
        read = tl.load(k + at_k - d * HK * K, mask=pair, other=0.0).to(tl.float32)
        read *= _power(g_LK - tl.load(g + at - d * H * K, mask=pair, other=0.0), pair)
        read_q += tl.load(dw_q + (row * H + head) * L + place - d, mask=near, other=0.0)[:, None] * read
        read_k += tl.load(dw_k + (row * H + head) * L + place - d, mask=near, other=0.0)[:, None] * read
        near = (row + d < stop) & (place % B + d < B)
        pair = near[:, None] & known
        of_q = tl.load(dw_q + ((row + d) * H + head) * L + place, mask=near, other=0.0)
        written = tl.load(dw_k + ((row + d) * H + head) * L + place, mask=near, other=0.0)
        written *= tl.load(beta + (row + d) * H + head, mask=near, other=0.0).to(tl.float32)
        found = of_q[:, None] * tl.load(q + at_k + d * HK * K, mask=pair, other=0.0).to(tl.float32)
        found += written[:, None] * tl.load(k + at_k + d * HK * K, mask=pair, other=0.0).to(tl.float32)
        of_k += found * _power(tl.load(g + at + d * H * K, mask=pair, other=0.0) - g_LK, pair)
    db += ((tl.program_id(0) % blocks).to(tl.int64) * rows + start) * H + head
    _add(q_LK, k_LK, beta_L, read_q, read_k, of_k, dq, dk, dg, db, at, inside, there, H)


def add_gradients_of_weights(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, dw_q: Tensor, dw_k: Tensor, dq: Tensor, dk: Tensor, dg: Tensor,
    db: Tensor, runs: Runs,
) -> None:  # fmt: skip
    """Add to gradients of q and k (1, R, H, K), of sums of decays (1, R, H, K) and of beta (1, R, H), in place and in
    fp32.

    A weight of a token i and an earlier one j is the sum over channels of q_i k_j 2^(g_i - g_j). Its gradients are
    products of matrices where that is written as 2^(g_i - a) 2^(a - g_j), with an anchor a of the channel in the
    chunk's middle. Both powers are numbers if g is nowhere far from a: unless a channel forgets all in a few tokens.
    Where one does, another kernel takes an anchor between each two blocks of 16 tokens, so that no power is above 1,
    and goes through the pairs in a block one distance after another, as fla does for all channels.

    Args:
        q, k: (1, R, Hk, K). g: (1, R, H, K) fp32, sums of decays from the chunk's start on, as powers of 2.
        beta: (1, R, H). dw_q, dw_k: (1, R, H, L = 64) fp32, gradients of the weights of queries and keys, 0 above the
            diagonal, of keys on it.
    """
    rows, heads_k, channels = q.shape[1:]
    heads = g.shape[2]
    wide, narrow = triton.cdiv(channels, _CHANNELS), triton.cdiv(channels, _FEW_CHANNELS)
    of_beta = db.new_zeros(narrow, rows, heads)
    far = runs.chunks.new_empty(wide * len(runs.chunks), heads)
    given = q, k, g, beta, dw_q, dw_k, dq, dk, dg, of_beta, runs.offsets, runs.chunks, rows, far
    sizes = heads_k, heads, channels, CHUNK
    products: Any = _by_products
    pairs: Any = _by_pairs
    products[far.shape](*given, *sizes, _CHANNELS, _FEW_CHANNELS, _FAR, num_warps=4, num_stages=1)
    pairs[(narrow * len(runs.chunks), heads)](
        *given, *sizes, _FEW_CHANNELS, _CHANNELS, _KIMI_BLOCK, num_warps=4, num_stages=1
    )
    db.add_(of_beta.sum(0))


# pyright: reportMissingParameterType=false


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

    fla's kernel for this multiplies by the transpose of a product that tensor cores hold, which Triton 3.4 to 3.7.0
    compiles wrongly on Hopper (fla refuses to run it there). This one computes the transposed product by itself.

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
