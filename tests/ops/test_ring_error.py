"""Rounding of the ring does not grow with its size: eight ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.select import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops import ring_attention
from cp_rewrite.planning.routes.by_exchange import Exchange
from tests.helpers.packed import dense_attention, in_documents, make_schedule, run_rank
from tests.helpers.tolerances import relative_error

WORLD_SIZE = 8
ROWS = [Documents.from_lengths([300, 17, 1, 450], 800)]


class ThreadRing:
    """Neighbours in other threads of this process; a group is named by the rank."""

    barrier = threading.Barrier(WORLD_SIZE, timeout=60)
    boxes: list[Any] = [None] * WORLD_SIZE  # shared by all threads, as it must be

    def __init__(self, group: str, world_size: int) -> None:
        self.rank = int(group)

    def shift(self, held: Tensor, tag: int) -> tuple[Tensor, tuple[Any, ...]]:
        self.boxes[self.rank] = held.clone()
        self.barrier.wait()
        coming = self.boxes[self.rank - 1]
        self.barrier.wait()
        return coming, ()


def ring_errors(world_size: int, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Relative errors of out, dq, dk, dv over a ring of `world_size` ranks."""
    schedule, indices = make_schedule(ROWS, world_size, "dual_chunk", PackedMask())

    def rank_results(rank: int) -> list[Tensor]:
        index = torch.from_numpy(np.maximum(indices[rank].reshape(-1), 0))
        q, k, v, dout = (x[index] for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = run_rank(*leaves, schedule, rank, Exchange("p2p", str(rank), world_size), Params(0.25))  # type: ignore[arg-type]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    with ThreadPoolExecutor(world_size) as threads:
        parts = list(threads.map(rank_results, range(world_size)))
    found: list[float] = []
    for i, want in enumerate(expected):
        whole = torch.zeros_like(want)
        for rank, part in enumerate(parts):
            real = indices[rank].reshape(-1) >= 0
            whole[torch.from_numpy(indices[rank].reshape(-1)[real])] = part[i][torch.from_numpy(real)].double()
        found.append(relative_error(in_documents(whole, ROWS) if i == 0 else whole, want))
    return found


@pytest.mark.parametrize("rounded_steps", [False, True], ids=["exact_steps", "rounded_steps"])
def test_error_at_eight_ranks_is_that_of_one(monkeypatch: pytest.MonkeyPatch, rounded_steps: bool) -> None:
    """`rounded_steps`: as with a kernel that returns each step's results in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(800, 4, 16), (800, 2, 16), (800, 2, 16), (800, 4, 16)]
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    dense = dense_attention(*leaves, ROWS, PackedMask(), Params(0.25))  # type: ignore[arg-type]
    expected = [dense.detach(), *torch.autograd.grad(dense, leaves, inputs[3].double())]
    if rounded_steps:
        monkeypatch.setattr(ring_attention, "load", lambda _: reference)
        monkeypatch.setattr(ring_attention, "_as_exact", lambda x, _: x)
    alone = ring_errors(1, inputs, expected)
    monkeypatch.setattr(ring_attention, "_Ring", ThreadRing)
    together = ring_errors(WORLD_SIZE, inputs, expected)
    assert all(many <= 1.5 * one for many, one in zip(together, alone, strict=True)), (together, alone)
