"""What an attention kernel reads about its pieces: one value, made once per batch and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tables:
    """The pieces of one rank as tensors. R local query rows, E expanded key rows.

    Launch 0 is described by `cu_seqlens_q` and `cu_seqlens_k`, which cover all R rows in order: rows of no document,
    and pieces of another launch, are entries with zero keys. Other launches run over their rows of `pieces`.

    Args:
        cu_seqlens_q: (N + 1,) int32 on the device, running sum of query rows per entry, from 0 to R.
        cu_seqlens_k: (N + 1,) int32 on the device, running sum of expanded key rows per entry, from 0 to at most E.
        pieces: (N', 7) int64 on the CPU: q0, q1, k0, k1 (rows), left, right (bottom-right aligned window of the kernel,
            -1 = no limit), launch. Only pieces with at least one query and one key.
        launches: (G, 4) int64 on the CPU, G >= 1: left, right, max_q, max_k (the longest entry of each side, in rows).
            A second row with max_q = -1 says that the sizes are bounds for all batches of a capacity: a launch made of
            them, captured in a CUDA graph, then serves other batches, and kernels must not look at `pieces`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    pieces: Tensor
    launches: Tensor
