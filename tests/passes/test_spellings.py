"""A hand-written model in each mask spelling: loss and every gradient under context parallelism, all layouts and
exchanges, against the plain model on one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite import PackedMask
from tests.helpers.pool import Pool
from tests.passes.mask_spellings import OFFSETS, SPELLINGS, Mask, make_batch

PROVEN = {s.name: s for s in SPELLINGS if isinstance(s.means, PackedMask)}
LAYOUTS: tuple[Any, ...] = ("contiguous", "head_tail", "dual_chunk", "balanced")
WAYS = list(itertools.product(LAYOUTS, ["all_gather", "needed"]))
LENGTHS = [[13, 1, 7, 29, 2, 12], [31, 33]]
QUICK = (
    "ids_equal_tril-DocumentIds", "ids_causal_window-DocumentIds", "ids_symmetric_window-DocumentIds",
    "ids_masked_fill_in_place-DocumentIds", "ids_sum_of_additive-DocumentIds", "ids_vmapped-DocumentIds",
    "ids_and_in_place-DocumentIds", "positions_as_transformers-PositionIds", "positions_roll-PositionIds",
    "whole_row_causal-PositionIds", "positions_window_in_bfloat16-PositionIds", "offsets_searchsorted-CuSeqlens",
    "offsets_repeat_interleave-CuSeqlens", "offsets_start_table-CuSeqlens", "ends_less_themselves-EndOfDocument",
)  # fmt: skip
"""A spelling for each kind of nodes that a rewrite erases, layouts in turn, on threads; the others are slow.
test_predicate.py compares what each spelling means with brute force."""


class Block(nn.Module):
    """Embedding, one attention with 4 query and 2 key/value heads, and the sum of a score of every token."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.embed = nn.Embedding(64, 32)
        self.qkv = nn.Linear(32, 64)
        self.out = nn.Linear(32, 1)

    def forward(self, **batch: Tensor) -> Tensor:
        x = self.embed(batch["input_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(**batch), enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        return (self.out(torch.tanh(x)).squeeze(-1) * batch["weights"]).sum()


def make_model(name: str) -> Block:
    torch.manual_seed(0)
    return Block(PROVEN[name].mask)


def global_batch(name: str, seed: int) -> dict[str, Tensor]:
    lengths = LENGTHS[:1] if PROVEN[name].packing is OFFSETS else LENGTHS
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(lengths)
    batch["input_ids"] = torch.randint(0, 64, batch["input_ids"].shape, generator=generator)
    # All positive: the gradient of a bias is their sum, which must not cancel.
    batch["weights"] = torch.rand(batch["input_ids"].shape, generator=generator) + 0.5
    if len(lengths) > 1:
        del batch["cu_seqlens"]
    return batch


def sharded_gradients(mesh: DeviceMesh, name: str, ways: list[tuple[Any, Any]]) -> list[dict[str, Tensor]]:
    model, batch = make_model(name), global_batch(name, 0)
    tokens = {key: 1 for key in batch if key != "cu_seqlens"}
    results: list[dict[str, Tensor]] = []
    torch._dynamo.reset()
    for layout, exchange in ways:
        sharding = cp.Sharding(
            mesh, tokens, PROVEN[name].packing, layout, exchange, inner="eager", across_documents=True
        )
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        model.zero_grad()
        with sharding.shard(batch) as local:
            loss = compiled(**local)
        loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        total = loss.detach().clone()
        dist.all_reduce(total, group=sharding.group)
        results.append(
            {"loss": total} | {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        )
    return results


def check(pool: Pool, name: str, world_size: int, ways: list[tuple[str, str]]) -> None:
    model = make_model(name)
    loss = model(**global_batch(name, 0))
    loss.backward()
    expected = {"loss": loss.detach()} | {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    for way, result in zip(ways, pool.run(world_size, sharded_gradients, name, ways)[0], strict=True):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            error = float((result[key] - value).norm() / value.norm().clamp_min(1e-3))
            assert error <= 1e-5, f"{key}: {error:.1e} {way}"


@pytest.mark.shared
@pytest.mark.parametrize("name", QUICK)
def test_spelling_trains_as_on_one_process(name: str) -> None:
    batch = global_batch(name, 0)
    tokens = {key: 1 for key in batch if key != "cu_seqlens"}
    torch._dynamo.reset()
    sharding = cp.Sharding(
        2, tokens, PROVEN[name].packing, LAYOUTS[QUICK.index(name) % len(LAYOUTS)], across_documents=True
    )
    report = cp.check(make_model(name), sharding, batch)
    assert report.largest <= 1e-5, str(report)


@pytest.mark.parametrize("way", WAYS[::3], ids="-".join)
def test_spelling_trains_on_processes(pool: Pool, way: tuple[str, str]) -> None:
    check(pool, QUICK[0], 2, [way])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_spelling_trains_in_every_way(pool: Pool, name: str, world_size: int) -> None:
    check(pool, name, world_size, WAYS)
