"""A loss in chunks of tokens takes each rank its part of one process's memory, counted by torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.helpers.peak import peak_bytes
from tests.helpers.pool import Pool

TOKENS, VOCAB, WIDTH, CHUNKS = 2048, 2000, 8, 8
Loss = Callable[["Head", Tensor, Tensor], Any]


class Head(nn.Module):
    """Hidden states of tokens, and a loss in chunks of them."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Any:
        return LOSSES[self.loss](self, self.embed(input_ids), labels)


def chunk_loss(m: Head, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).float().flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)


def of_loop(m: Head, h: Tensor, y: Tensor) -> Any:
    parts = zip(h.chunk(CHUNKS, dim=1), y.chunk(CHUNKS, dim=1), strict=True)
    return sum(chunk_loss(m, x, t) for x, t in parts) / (y != -100).sum()


def of_checkpoints(m: Head, h: Tensor, y: Tensor) -> Any:
    parts = zip(h.chunk(CHUNKS, dim=1), y.chunk(CHUNKS, dim=1), strict=True)
    found = [checkpoint(chunk_loss, m, x, t, use_reentrant=False) for x, t in parts]
    return sum(found) / (y != -100).sum()  # type: ignore[arg-type]


def of_logits(m: Head, h: Tensor, y: Tensor) -> Any:
    """As torchtune has it: the head makes chunks, the loss takes them one by one."""
    chunks = [m.head(x) for x in h.chunk(CHUNKS, dim=1)]
    total: Any = 0.0
    for x, t in zip(chunks, y.chunk(CHUNKS, dim=1), strict=True):
        total += F.cross_entropy(x.flatten(0, 1).float(), t.reshape(-1), reduction="sum", ignore_index=-100)
    return total / (y != -100).sum()


class Fused(torch.autograd.Function):
    """Gradients of each chunk are made with its loss."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, y: Tensor) -> Any:
        total, of_weight = h.new_zeros(()), torch.zeros_like(w)
        of_rows: list[Tensor] = []
        for x, t in zip(h.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            logits = x @ w.t()
            total += F.cross_entropy(logits, t, reduction="sum", ignore_index=-100)
            away = (logits.softmax(-1) - F.one_hot(t, VOCAB)) * (t != -100)[:, None]
            of_rows.append(away @ w)
            of_weight += away.t() @ x
        ctx.save_for_backward(torch.cat(of_rows), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_rows, of_weight = ctx.saved_tensors
        return g * of_rows, g * of_weight, None


def of_function(m: Head, h: Tensor, y: Tensor) -> Any:
    return Fused.apply(h.flatten(0, 1), m.head.weight, y.flatten()) / (y != -100).sum()  # type: ignore[operator]


LOSSES: dict[str, Loss] = {
    "of_loop": of_loop,
    "of_checkpoints": of_checkpoints,
    "of_logits": of_logits,
    "of_function": of_function,
}


def make_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(TOKENS // 4), torch.arange(TOKENS - TOKENS // 4)])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1)}


def trained(model: Head, call: Callable[[], Any]) -> tuple[int, Tensor, Tensor]:
    """The most bytes of a step's forward and backward, the loss, and the head's gradient."""
    found: list[Tensor] = []

    def step() -> None:
        loss = call()
        loss.backward()
        found.append(loss.detach())

    for compiled in (False, True):
        model.zero_grad()
        peak = peak_bytes(step) if compiled else step()
    gradient = model.head.weight.grad
    assert peak is not None and gradient is not None  # noqa: PT018
    return peak, found[-1], gradient


def on_rank(mesh: DeviceMesh, name: str) -> tuple[int, Tensor, Tensor]:
    model, batch = Head(name), make_batch()
    sharding = cp.Sharding(mesh, dict.fromkeys(batch, 1), cp.PositionIds("position_ids"), inner="eager")
    run: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        peak, loss, _ = trained(model, lambda: run(**local))
    cp.sum_gradients(model.parameters(), sharding)
    assert model.head.weight.grad is not None
    return peak, loss, model.head.weight.grad


@pytest.mark.shared
@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_takes_its_part_of_one_process(pool: Pool, name: str) -> None:
    model, batch = Head(name), make_batch()
    whole, loss, gradient = trained(model, lambda: model(**batch))
    for peak, found, summed in pool.run(2, on_rank, name):
        assert peak <= 1.1 * whole / 2
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(summed, gradient)
