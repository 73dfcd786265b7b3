"""Kernels over the experts that tokens choose: where their rows go, and what is added up of what comes back.

On GPUs each is one launch; the host waits for none. Elsewhere, and for weights in fp64, plain torch does the same.

Shapes: N tokens with k choices each, of P ranks with `own` experts; S rows are sent, R received; M pairs of a received
row and an expert. Places are int32, -1 for none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda
from .rows import compiled, widest_access

_BLOCK, _SCAN_BLOCK, _SUM_BLOCK = 256, 1024, 128
"""Threads of a block: of most kernels, of those that count in order, and of sums."""
_MOST_EXPERTS = 1024
"""Experts of a rank that `route_rows` has room for."""


class Routed(NamedTuple):
    """Destinations of tokens.

    counts: (P, 1 + own + P) int64: of each rank, the rows that it is sent, the pairs of each of its experts, and the
        rows that all ranks are sent.
    at: (N, P) the row sent for a token to a rank. token: (S or more,) of each row sent.
    packed: (S or more, 2 k) of each row sent its choices, as numbers among the experts of the rank that it goes to,
        `own` for none of these, and their weights, 0 there, in bits.
    """

    counts: Tensor
    at: Tensor
    token: Tensor
    packed: Tensor


def route(chosen: Tensor, weight: Tensor, own: int, ranks: int) -> Routed:
    """Where tokens go, rank after rank.

    Args:
        chosen: (N, k) int64; others than 0 … own P - 1 are no expert. weight: (N, k) in fp32 or fp64.
    """
    N, k = chosen.shape
    if not _runs(chosen, weight) or own > _MOST_EXPERTS:
        return _route(chosen, weight, own, ranks)
    chosen, weight = chosen.contiguous(), weight.contiguous()
    most = N * min(k, ranks)
    counts, at = chosen.new_empty(ranks, 1 + own + ranks), _places(chosen, N, ranks)
    token, packed = _places(chosen, most), _places(chosen, most, 2 * k)
    _launch("route_rows", ranks, _SCAN_BLOCK, chosen, at, counts, N, k, own, macros=(("MOST", str(_MOST_EXPERTS)),))
    given = chosen, weight, counts, at, token, packed, N, k, own, ranks
    _launch("pack_choices", -(-N * ranks // _BLOCK), _BLOCK, *given)
    return Routed(counts, at, token, packed)


class ByExpert(NamedTuple):
    """Pairs of received rows and experts, sorted by expert.

    row: (M,) the row of each pair. weight: (M, 1). at: (R, k) the pair of a row's choice.
    """

    row: Tensor
    weight: Tensor
    at: Tensor


def sort(packed: Tensor, ends: Tensor, pairs: int) -> ByExpert:
    """packed: (R, 2 k) as `route` gave it. ends: (own,) int32, where each expert's pairs end. pairs: M."""
    R, k = packed.shape[0], packed.shape[1] // 2
    if not _runs(packed) or packed.dtype is not torch.int32:
        return _sort(packed, ends, pairs)
    row, at = _places(packed, pairs), _places(packed, R, k)
    weight = packed.new_empty(pairs, 1, dtype=torch.float32)
    _launch("sort_choices", ends.shape[0], _SCAN_BLOCK, packed, ends, row, weight, at, R, k)
    return ByExpert(row, weight, at)


def add_listed(x: Tensor, at: Tensor) -> Tensor:
    """(n, C) in the dtype of x (…, C): the sum of its rows at each of `at` (n, m), in that order, in fp32 or fp64."""
    x = x.contiguous()
    access = widest_access(x.shape[1] * x.element_size(), x.data_ptr())
    if not _runs(x) or x.dtype not in cuda.DTYPES or access < x.element_size():
        return _add_listed(x, at)
    out, width = x.new_empty(at.shape[0], x.shape[1]), x.shape[1] * x.element_size() // access
    macros = (cuda.DTYPES[x.dtype], "1"), ("ACCESS", str(access))
    grid = -(-at.shape[0] * width // _SUM_BLOCK)
    _launch("sum_listed", grid, _SUM_BLOCK, x, out, at, *at.shape, width, macros=macros)
    return out


def pick(found: Tensor, at: Tensor, chosen: Tensor, own: int) -> Tensor:
    """(N, k): of each choice what came back for it, 0 for one of no expert. found: (S, k). at: (N, P) of `route`."""
    (N, k), ranks = chosen.shape, at.shape[1]
    if not _runs(found, chosen) or found.dtype is not torch.float32:
        return _pick(found, at, chosen, own)
    found, chosen = found.contiguous(), chosen.contiguous()
    out = found.new_empty(N, k)
    _launch("pick_choices", -(-N * k // _BLOCK), _BLOCK, found, at, chosen, out, N, k, own, ranks)
    return out


def _runs(*tensors: Tensor) -> bool:
    return all(x.is_cuda and x.dtype is not torch.float64 for x in tensors) and compiled()


def _places(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _launch(name: str, grid: int, block: int, first: Tensor, *args: Any, macros: cuda.Macros = ()) -> None:
    """Enqueue a kernel of `csrc/` on the device of its first argument, a tensor as others may be."""
    if grid:
        given = (x.data_ptr() if isinstance(x, Tensor) else x for x in (first, *args))
        kernel = cuda.kernel(name, first.device, (("BLOCK", str(block)), *macros))
        cuda.launch(kernel, grid, block, first.device, *given)


def _route(chosen: Tensor, weight: Tensor, own: int, ranks: int) -> Routed:
    N, E = chosen.shape[0], own * ranks
    there = (chosen >= 0) & (chosen < E)
    owner = torch.where(there, chosen // own, ranks)
    hit = chosen.new_zeros(N, ranks + 1, dtype=torch.bool).scatter_(1, owner, True)[:, :ranks]
    bins = torch.where(there, chosen, E).flatten()
    pairs = chosen.new_zeros(E + 1).scatter_add_(0, bins, torch.ones_like(bins))[:E]
    sent = hit.sum(0)
    counts = torch.cat([sent[:, None], pairs.view(ranks, own), sent.expand(ranks, -1)], 1)
    flat = hit.T.reshape(-1)
    at = torch.where(hit, flat.cumsum(0).view(ranks, N).T - 1, -1).int()
    sends = flat.nonzero()[:, 0]
    rank, token = sends // max(N, 1), sends % max(N, 1)
    mine = owner[token] == rank[:, None]
    bits = torch.int64 if weight.dtype is torch.float64 else torch.int32
    ids = torch.where(mine, chosen[token] - rank[:, None] * own, own).to(bits)
    return Routed(counts, at, token.int(), torch.cat([ids, torch.where(mine, weight[token], 0).view(bits)], 1))


def _sort(packed: Tensor, ends: Tensor, pairs: int) -> ByExpert:
    ids, bits = packed.chunk(2, 1)
    dtype = torch.float64 if packed.dtype is torch.int64 else torch.float32
    order = ids.flatten().argsort(stable=True)[:pairs]
    at = torch.full_like(ids.flatten(), -1).scatter_(0, order, torch.arange(pairs, device=ids.device, dtype=ids.dtype))
    weight = bits.flatten()[order].view(dtype)
    return ByExpert((order // max(ids.shape[1], 1)).int(), weight[:, None], at.view(ids.shape).int())


def _add_listed(x: Tensor, at: Tensor) -> Tensor:
    out = x.new_zeros(at.shape[0], x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    for column in at.unbind(1):
        (there,) = torch.where(column >= 0)
        out[there] += x[column[there]]
    return out.to(x.dtype)


def _pick(found: Tensor, at: Tensor, chosen: Tensor, own: int) -> Tensor:
    there = (chosen >= 0) & (chosen < own * at.shape[1])
    row = at.long().gather(1, torch.where(there, chosen // own, 0))
    padded = torch.cat([found, found.new_zeros(1, found.shape[1])])
    return padded.gather(0, torch.where(there, row, found.shape[0]))
