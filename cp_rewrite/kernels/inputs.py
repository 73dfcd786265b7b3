"""Inputs of an attention kernel besides q, k and v: its pieces, one value, made once per batch and shared by all
layers; and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cp_rewrite.planning.columns import SIZES_ARE_BOUNDS, LaunchRow


@dataclass(frozen=True, eq=False)
class Tables:
    """The pieces of one rank as tensors. R local query rows, E expanded key rows.

    Launch 0 is described by `cu_seqlens_q` and `cu_seqlens_k`, which cover all R rows in order: rows of no document,
    and pieces of another launch, are entries with zero keys. Other launches run over their rows of `pieces`.

    Args:
        cu_seqlens_q: (N + 1,) int32 on the device, running sum of query rows per entry, from 0 to R.
        cu_seqlens_k: (N + 1,) int32 on the device, running sum of expanded key rows per entry, from 0 to at most E.
        pieces: (N', 7) int64 on the CPU, a `PieceRow` each. Those without a query or a key only fill it up.
        launches: (G, 4) int64 on the CPU, G >= 1, a `LaunchRow` each.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    pieces: Tensor
    launches: Tensor

    @property
    def first_launch(self) -> LaunchRow[int]:
        """The row of launch 0."""
        return LaunchRow(*self.launches[0].tolist())

    @property
    def sizes_are_bounds(self) -> bool:
        """The sizes in `launches` are bounds for all batches of a capacity: a launch made of them, captured in a CUDA
        graph, then serves other batches, and kernels must not look at `pieces`."""
        return len(self.launches) > 1 and LaunchRow(*self.launches[1].tolist()).max_q == SIZES_ARE_BOUNDS


@dataclass(frozen=True)
class Params:
    """Args: scale: softmax scale. softcap: logits become softcap * tanh(logits / softcap), 0.0 means none.
    deterministic: the backward must be bitwise repeatable. unrounded: the backward gives fp32 gradients of keys and
    values; only where `Capabilities.unrounded_gradients` says that the kernel can."""

    scale: float
    softcap: float = 0.0
    deterministic: bool = False
    unrounded: bool = False
