"""Without FSDP, too, equal blocks are compiled once: losses and gradients are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.helpers.tolerances import assert_close

D, HEADS = 16, 2
LENGTHS = ((9, 3, 12), (5, 1, 14), (20,), (2, 29))
"""Lengths of documents, batch by batch: the last batch is longer."""


class Block(nn.Module):
    """`option`: what may differ from block to block. `body(block, x)`: what comes behind attention."""

    def __init__(self, option: Any, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.option, self.body = option, body
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(D))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, doc_ids: Tensor, causal: Tensor) -> Tensor:
        q, k, v = self.qkv(x * self.scale).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]) & causal
        if isinstance(self.option, int):
            place = torch.arange(x.shape[1])
            mask = mask & (place[:, None] - place[None] < self.option)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.body(self, self.out(y.transpose(1, 2).flatten(2)))
        return x.add_(y) if self.body is passed_on else x + y


class Model(nn.Module):
    def __init__(self, options: tuple[Any, ...], body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, D), nn.Linear(D, 11)
        self.blocks = nn.ModuleList(Block(option, body) for option in options)

    def forward(self, ids: Tensor, doc_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, doc_ids, causal)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def batch_of(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(sum(lengths))
    ids = torch.randint(11, (1, sum(lengths)))
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return {"ids": ids, "doc_ids": doc_ids, "labels": ids.roll(-1)}


def compare(model: Model, inner: Any = "aot_eager") -> tuple[int, int]:
    """(segments, those of them that were compiled): (0, 0) where the graph is one piece. Losses, gradients and buffers
    are those of the plain model, batch after batch, with one compile."""
    counters.clear()
    torch._dynamo.reset()
    names = {"ids": 1, "doc_ids": 1, "labels": 1}
    sharding = cp.Sharding(1, names, cp.DocumentIds("doc_ids"), inner=inner, random="per_rank")
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    calls = [block.calls for block in model.blocks]  # type: ignore[union-attr]
    for lengths in LENGTHS:
        batch, found = batch_of(lengths), list[Any]()
        for run in (model, compiled):
            for buffer in calls:
                buffer.zero_()  # type: ignore[operator]
            torch.manual_seed(3)
            if run is model:
                loss = model(**batch)
            else:
                with sharding.shard(batch) as local:
                    loss = compiled(**local)
            gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            found.append([loss, *gradients, *(buffer.clone() for buffer in calls)])  # type: ignore[operator]
        for theirs, mine in zip(*found, strict=True):
            assert_close(mine, theirs)
    assert counters["cp_rewrite"]["graphs rewritten"] == 1, "a batch of another length is compiled anew"
    return counters["cp_rewrite"]["segments"], counters["cp_rewrite"]["segments compiled"]


def plain(_: Any, x: Tensor) -> Tensor:
    return x


def counted(block: Any, x: Tensor) -> Tensor:
    block.calls.add_(1)
    return x * (1 + block.calls)


def checkpointed(block: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: block.out(x).sin(), x, use_reentrant=False)


def dropped(_: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def passed_on(_: Any, x: Tensor) -> Tensor:
    return x


def test_equal_blocks_are_compiled_once() -> None:
    assert compare(Model((None,) * 4, plain)) == (6, 3)


def test_blocks_with_windows_in_turns_are_two() -> None:
    assert compare(Model((4, None) * 2, plain)) == (6, 4)
    assert compare(Model((4, 5, 6), plain)) == (0, 0), "none equals another: the graph is one piece"


@pytest.mark.shared
@pytest.mark.parametrize(
    ("body", "expected"), [(counted, (5, 3)), (checkpointed, (5, 3)), (dropped, (5, 3)), (passed_on, (0, 0))]
)
def test_what_blocks_do_inside(body: Callable[[Any, Tensor], Tensor], expected: tuple[int, int]) -> None:
    """A buffer that each writes; a region that is computed again; draws of its own; what the next block writes."""
    assert compare(Model((None,) * 3, body)) == expected


def test_frozen_weights_and_shared_ones() -> None:
    model = Model((None,) * 4, plain)
    blocks: Any = model.blocks
    blocks[2].requires_grad_(False)
    assert compare(model) == (6, 4), "a frozen block is a class of its own"
    model = Model((None,) * 3, plain)
    blocks = model.blocks
    blocks[2].out = blocks[0].out
    assert compare(model) == (0, 0), "weights are used in turns"


def test_one_block_is_one_piece() -> None:
    assert compare(Model((None,), plain)) == (0, 0)
