"""Train steps of a compiled model on GPUs: without a sync, and as one CUDA graph that replays on other documents."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from tests.end_to_end.test_conformance_gpu import free_port

pytestmark = pytest.mark.gpu

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
LENGTHS = ([900, 33, 1, 1114], [2048], [64] * 32, [1500, 500, 48])
ROOM = cp.Capacity(documents=64, pieces=80, rows=6000)
VOCAB = 512
CLOSE = 2e-2
"""Relative difference of losses and of parameters' updates: bf16 and other kernels."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_train_steps(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA GPUs")
    mp.spawn(run_rank, (world_size, free_port()), nprocs=world_size)  # type: ignore[no-untyped-call]


def run_rank(rank: int, world_size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("cp",))
    reference = Trainer(None)
    plain = [reference.step(*make_batch(lengths)) for lengths in LENGTHS]
    eager = Trainer(cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), deterministic=True))
    close(eager.without_syncs(), plain)
    fixed = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), deterministic=True, capacity=ROOM)
    close(Trainer(fixed).replayed(), plain)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


def close(losses: list[Tensor], expected: list[Tensor]) -> None:
    got, want = torch.stack(losses).float(), torch.stack(expected).float()
    error = ((got - want).abs() / want.abs()).max()
    assert error <= CLOSE, f"{got.tolist()} {want.tolist()}"


def make_batch(lengths: list[int]) -> tuple[dict[str, Tensor], list[int]]:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(0, VOCAB, positions.shape, generator=generator)
    labels = ids.masked_fill(positions == 0, -100)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: x.cuda() for name, x in batch.items()}, lengths


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


class Trainer:
    """A model, its optimizer, and steps of both: plain without a Sharding, else compiled and sharded."""

    def __init__(self, sharding: cp.Sharding | None) -> None:
        self.sharding, self.model = sharding, make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True, capturable=True)
        self.run: Any = self.model
        if sharding is not None:
            self.run = torch.compile(self.model, backend=cp.backend(sharding), fullgraph=True)

    def update(self, batch: dict[str, Any]) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.run(**batch).loss
        loss.backward()
        total = loss.detach().clone()
        if self.sharding is not None:
            cp.sum_gradients(self.model.parameters(), self.sharding)
            dist.all_reduce(total, group=self.sharding.group)
        self.optimizer.step()
        return total

    def step(self, batch: dict[str, Tensor], lengths: list[int]) -> Tensor:
        if self.sharding is None:
            return self.update(batch)
        with self.sharding.shard(batch, lengths=lengths, shift_labels=True) as local:
            return self.update(local)

    def without_syncs(self) -> list[Tensor]:
        """Losses of a step per batch; a sync of host and device raises."""
        batches = [make_batch(lengths) for lengths in LENGTHS]
        state = self.snapshot()
        for batch in batches:
            self.step(*batch)
        self.restore(state)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return [self.step(*batch) for batch in batches]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def replayed(self) -> list[Tensor]:
        """Losses of replays of one captured step, a replay per batch."""
        assert self.sharding is not None
        state, graph = self.snapshot(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(*make_batch(LENGTHS[0]))
        torch.cuda.current_stream().wait_stream(side)
        batch, lengths = make_batch(LENGTHS[1])
        with self.sharding.shard(batch, lengths=lengths, shift_labels=True) as local:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self.update(local)
        self.restore(state)
        losses: list[Tensor] = []
        for batch, lengths in map(make_batch, LENGTHS):
            with self.sharding.shard(batch, lengths=lengths, shift_labels=True):
                graph.replay()
            losses.append(loss.clone())
        return losses

    def snapshot(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def restore(self, state: list[Tensor]) -> None:
        """Parameters as in `state`, the optimizer as new: in place, where a captured step finds them."""
        for parameter, value in zip(self.model.parameters(), state, strict=True):
            parameter.copy_(value)
        for values in self.optimizer.state.values():
            for value in values.values():
                value.zero_()
