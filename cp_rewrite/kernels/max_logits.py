"""The largest logit of each head over all pieces: one product of queries and keys, and a maximum, for any GPU on which
triton compiles. Nothing of it is written but a number per head and tile of queries.

    tile of 128 queries    entries of the launch that it meets, each with its own keys
    keys of an entry       | some are hidden | all rows see all | some are hidden |        masked only outside

A tile takes local rows [128 t, 128 t + 128), whatever entries they are of, so that the grid follows from shapes alone:
tables of fixed sizes serve, in a CUDA graph too. Scale and soft cap are monotone: the maximum is of bare products.

Shapes: R local rows, E expanded rows, Hq = Hkv * GROUP heads, D head dim, taken as DIM0 + DIM1, powers of two.
"""
# The language of triton has types of its own.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .flash.varlen import Launch, Parts, launches_of
from .select import Params, Tables

TILES: dict[int, tuple[int, int, int, int]] = {64: (128, 128, 4, 3), 128: (128, 64, 4, 3), 256: (128, 64, 8, 2)}
"""Up to a head dim: queries and keys of a tile, warps, stages of the pipeline."""
_LARGEST = (64, 32, 4, 2)
_NO_LIMIT = 1 << 30
DTYPES = (torch.bfloat16, torch.float16)


def max_logits(q_RHD: Tensor, k_EHD: Tensor, tables: Tables, params: Params, parts: Parts | None = None) -> Tensor:
    """(Hq,) fp32: `reference.max_logits` of q and k in one of `DTYPES`. The host does not wait for the device.

    Args:
        parts: where the forward ran in two parts: which keys are not among `k_EHD`.
    """
    found = [_products(q, k, launch) for launch, q, k in _calls(q_RHD, k_EHD, tables, parts)]
    return finished(torch.cat(found, 1).amax(1), params)


def finished(products: Tensor, params: Params) -> Tensor:
    """Logits of bare products; -inf stays. The scale is positive (`match/operands.py`)."""
    logits = products * params.scale
    logits = params.softcap * torch.tanh(logits / params.softcap) if params.softcap else logits
    return torch.where(products == -torch.inf, products, logits)


def _calls(
    q_RHD: Tensor, k_EHD: Tensor, tables: Tables, parts: Parts | None
) -> Iterator[tuple[Launch, Tensor, Tensor]]:
    """(launch, its rows of q, its keys), as `flash.varlen.run_forward` has them."""
    launches = launches_of(tables, q_RHD.shape[0])
    if parts is not None and parts.cut[0] + 1 < launches[0].cu_seqlens_q.shape[0]:
        for launch, rows, keys in parts.split(launches[0], (k_EHD,)):
            yield launch, q_RHD[rows], keys[0]
        return
    for launch in launches:
        q = q_RHD[: launch.stop] if launch.rows is None else q_RHD.index_select(0, launch.rows)
        yield launch, q, k_EHD[launch.keys[0] : launch.keys[1]]


def _products(q: Tensor, k: Tensor, launch: Launch) -> Tensor:
    """(Hq, tiles) fp32; -inf where a tile sees no key."""
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    rows, heads, dim = q.shape
    tile, keys, warps, stages = next((how for most, how in TILES.items() if dim <= most), _LARGEST)
    dim0 = 1 << dim.bit_length() - 1
    dim1 = triton.next_power_of_2(max(16, dim - dim0)) if dim > dim0 else 0
    tiles, group = -(-rows // tile), heads // k.shape[1]
    out = q.new_empty(heads, tiles, dtype=torch.float32)
    if not out.numel():
        return q.new_full((heads, 1), -torch.inf, dtype=torch.float32)
    left, right = (_NO_LIMIT if side is None else side for side in launch.window)
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1)
    entries = launch.cu_seqlens_q.shape[0] - 1
    _kernel[(tiles * heads,)](
        q, k, launch.cu_seqlens_q, launch.cu_seqlens_k, out, rows, entries, tiles, *strides, left, right,
        GROUP=group, DIM=dim, DIM0=max(dim0, 16), DIM1=dim1, TILE=tile, KEYS=keys, LEFT=left != _NO_LIMIT,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def jit(function: Callable[..., object]) -> triton.JITFunction:
    """Sizes and windows change with every batch: a kernel made for some of their values would be made again."""
    changing = ["rows", "entries", "tiles", "left", "right"]
    return triton.jit(function, do_not_specialize=changing, do_not_specialize_on_alignment=changing)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _columns(
    at, row, limit, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """(ROWS, COUNT): columns [FIRST, FIRST + COUNT) of rows [row, row + ROWS); 0 from DIM on, and with LIMITED from row
    `limit` on."""
    i, d = tl.arange(0, ROWS), FIRST + tl.arange(0, COUNT)
    at += row.to(tl.int64) * stride + i[:, None] * stride + d[None, :]
    if LIMITED:
        x = tl.load(at, mask=(row + i < limit)[:, None] & (d < DIM)[None, :], other=0.0)
    elif FIRST + COUNT > DIM:
        x = tl.load(at, mask=(d < DIM)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _scan(
    best, q0, q1, k, stride, first, lo, hi, least, most, keys,
    MASKED: tl.constexpr, DIM: tl.constexpr, DIM0: tl.constexpr, DIM1: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The largest products of each row of a tile with keys [lo, hi) of an entry, whose keys begin at row `first`. With
    MASKED row i sees keys `least[i]` to `most[i]`."""
    for j in range(lo, hi, KEYS):
        x = _columns(k, first + j, first + keys, stride, 0, DIM0, DIM, KEYS, MASKED)
        products = tl.dot(q0, tl.trans(x))
        if DIM1 > 0:
            x = _columns(k, first + j, first + keys, stride, DIM0, DIM1, DIM, KEYS, MASKED)
            products = tl.dot(q1, tl.trans(x), products)
        if MASKED:
            key = j + tl.arange(0, KEYS)
            seen = (key[None, :] >= least[:, None]) & (key[None, :] <= most[:, None])
            products = tl.where(seen, products, -float("inf"))
        best = _larger(best, tl.reduce(products, 1, _larger))
    return best


@jit
def _kernel(
    q, k, cu_seqlens_q, cu_seqlens_k, out, rows, entries, tiles,
    q_row, q_head, k_row, k_head, left, right,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM0: tl.constexpr, DIM1: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    # Heads that share keys side by side, then tiles, those with most keys first, then heads of keys.
    at = tl.program_id(0)
    tile, kv = tiles - 1 - at // GROUP % tiles, at // GROUP // tiles
    head = kv * GROUP + at % GROUP
    row0 = tile * TILE
    row1 = min(row0 + TILE, rows)
    q += head.to(tl.int64) * q_head
    k += kv.to(tl.int64) * k_head
    q0 = _columns(q, row0, rows, q_row, 0, DIM0, DIM, TILE, True)
    q1 = _columns(q, row0, rows, q_row, DIM0, DIM1, DIM, TILE, True) if DIM1 > 0 else q0
    entry, last = 0, entries  # of all entries the first that ends beyond row0
    while entry < last:
        middle = (entry + last) // 2
        if tl.load(cu_seqlens_q + middle + 1) <= row0:
            entry = middle + 1
        else:
            last = middle
    row = row0 + tl.arange(0, TILE)
    best = tl.full((TILE,), -float("inf"), tl.float32)
    start = row0
    while (entry < entries) & (start < row1):
        start = tl.load(cu_seqlens_q + entry)
        stop = tl.load(cu_seqlens_q + entry + 1)
        first = tl.load(cu_seqlens_k + entry)
        keys = tl.load(cu_seqlens_k + entry + 1) - first
        # Row i's own key, aligned at the last one; those of the tile's first and last row in this entry.
        shift = keys - stop
        own0, own1 = max(row0, start) + shift, min(row1, stop) - 1 + shift
        inside = (row >= start) & (row < stop) & (row < row1)
        most = tl.where(inside, tl.minimum(keys - 1, row + shift + right), -1)
        least = tl.maximum(0, row + shift - left) if LEFT else tl.zeros((TILE,), tl.int32)
        lo = max(0, own0 - left) if LEFT else 0
        hi = min(keys, own1 + right + 1)
        # All rows see keys [a, b): whole blocks of them need no mask.
        a = lo + tl.cdiv(max(0, own1 - left - lo), KEYS) * KEYS if LEFT else 0
        b = min(keys, own0 + right + 1)
        whole = (start <= row0) & (stop >= row0 + TILE) & (row1 == row0 + TILE)
        blocks = tl.where(whole, max(0, b - a) // KEYS, 0)
        a = tl.where(blocks > 0, a, lo)
        b = a + blocks * KEYS
        if LEFT:
            best = _scan(best, q0, q1, k, k_row, first, lo, a, least, most, keys, True, DIM, DIM0, DIM1, KEYS)
        best = _scan(best, q0, q1, k, k_row, first, a, b, least, most, keys, False, DIM, DIM0, DIM1, KEYS)
        best = _scan(best, q0, q1, k, k_row, first, b, hi, least, most, keys, True, DIM, DIM0, DIM1, KEYS)
        entry += 1
        start = stop
    tl.store(out + head * tiles + tile, tl.reduce(best, 0, _larger))
