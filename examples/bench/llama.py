"""A compiled Llama-style block stack over packed documents: one GPU on a quarter of the tokens, then all GPUs.

    torchrun --nproc-per-node 4 examples/bench/llama.py

P packs of web_mix are drawn, each of 32K tokens with documents cut at 8K. With one rank, a step runs on one of them;
the time is the mean over all. With P ranks, a step runs on all of them in one row. Documents and work are the same, so
efficiency is the ratio of the two. A step is forward, backward, the sum of gradients over the ranks, and AdamW.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packs import draw
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_rewrite as cp

HEADS, HEADS_KV, DIM = 32, 8, 128
TOKENS = {"x": 1, "position_ids": 1, "doc_ids": 1}


class Block(nn.Module):
    """Attention and SwiGLU with RMS norms and rotary positions."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        wide = hidden * 7 // 2
        self.first, self.second = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, HEADS * DIM, bias=False)
        self.kv = nn.Linear(hidden, 2 * HEADS_KV * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        q = self.q(h).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2 * HEADS_KV, DIM)).transpose(1, 2).chunk(2, 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Stack(nn.Module):
    """Blocks over hidden states; each token attends to the tokens before it in its document."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x: Tensor, position_ids: Tensor, doc_ids: Tensor) -> Tensor:
        index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
        mask = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (index[:, None] >= index[None, :])
        frequency = 10000.0 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
        angles = position_ids[:, None, :, None] * frequency
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, mask[:, None])
        return x


def batch_of(lengths: tuple[int, ...], hidden: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = torch.tensor(lengths)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    generator = torch.Generator(device).manual_seed(len(lengths))
    x = torch.randn(1, int(sizes.sum()), hidden, generator=generator, device=device).to(dtype)
    return {"x": x, "position_ids": position_ids[None].to(device), "doc_ids": doc_ids[None].to(device)}


class Trainer:
    """A compiled stack on one context-parallel mesh."""

    def __init__(
        self, mesh: DeviceMesh, options: argparse.Namespace, device: torch.device, room: cp.Capacity | None = None
    ) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Stack(options.layers, options.hidden).to(device, dtype)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, capturable=fused)
        self.sharding = cp.Sharding(
            mesh, TOKENS, cp.DocumentIds("doc_ids"), exchange=options.exchange, inner=options.inner, capacity=room
        )
        self.summing = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.compiled: Any = torch.compile(self.model, backend=cp.backend(self.sharding), fullgraph=True)

    def step(self, batch: dict[str, Tensor], lengths: tuple[int, ...]) -> None:
        with self.sharding.shard(batch, lengths=lengths) as local:
            self.update(local, batch["x"].shape[1])

    def update(self, local: dict[str, Any], tokens: int) -> None:
        (self.compiled(**local).float().square().sum() / tokens).backward()
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            self.summing[0].record()
        cp.sum_gradients(self.model.parameters(), self.sharding)
        if not capturing:
            self.summing[1].record()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Replayed(Trainer):
    """The same with every step one CUDA graph, captured after two steps."""

    graph: torch.cuda.CUDAGraph | None = None
    steps = 0

    def step(self, batch: dict[str, Tensor], lengths: tuple[int, ...]) -> None:
        self.steps += 1
        side = torch.cuda.Stream()
        if self.steps <= 2:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                super().step(batch, lengths)
            torch.cuda.current_stream().wait_stream(side)
            return
        with self.sharding.shard(batch, lengths=lengths) as local:
            graph = self.graph = self.graph or self.capture(local, batch["x"].shape[1])
            graph.replay()

    def capture(self, local: dict[str, Any], tokens: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.update(local, tokens)
        return graph


def step_seconds(
    trainer: Trainer, rows: list[tuple[int, ...]], options: argparse.Namespace, device: Any
) -> tuple[float, float]:
    """Mean over rows of the median step, and of its sum of gradients, on the slowest rank."""
    dtype = next(trainer.model.parameters()).dtype
    medians: list[tuple[float, float]] = []
    for lengths in rows:
        batch = batch_of(lengths, options.hidden, device, dtype)
        times: list[tuple[float, float]] = []
        for i in range(options.steps + options.warmup):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            start.record()
            trainer.step(batch, lengths)
            stop.record()
            torch.cuda.synchronize()
            if i >= options.warmup:
                summing = trainer.summing[0].elapsed_time(trainer.summing[1])
                times.append((start.elapsed_time(stop) / 1e3, summing / 1e3))
        medians.append(tuple(statistics.median(column) for column in zip(*times, strict=True)))
    mean = torch.tensor([statistics.mean(column) for column in zip(*medians, strict=True)], device=device)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean[0]), float(mean[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="per GPU")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--inner", default="inductor")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world_size, 1), mesh_dim_names=("dp", "cp"))
    quarters = [draw("web_mix", options.tokens, seed) for seed in range(42, 42 + world_size)]
    whole = tuple(length for lengths in quarters for length in lengths)
    results: list[tuple[float, float]] = []
    if dist.get_rank() == 0:
        print(f"{world_size} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {len(whole)} documents")
        print(
            "| | step s | of it, sum of gradients | tokens | tokens/s | peak GiB |\n|---|---|---|---|---|---|",
            flush=True,
        )
    everyone = init_device_mesh("cuda", (world_size,), mesh_dim_names=("cp",))
    room = cp.Capacity(documents=256, pieces=128, rows=options.tokens * 2)
    for name, kind, part, rows, count in (
        ("cp 1", Trainer, mesh["cp"], quarters, 1),
        (f"cp {world_size}", Trainer, everyone, [whole], world_size),
        (f"cp {world_size}, one CUDA graph", Replayed, everyone, [whole], world_size),
    ):
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        trainer = kind(part, options, device, room if kind is Replayed else None)
        seconds, summing = step_seconds(trainer, rows, options, device)
        results.append((seconds, summing))
        tokens, memory = options.tokens * count, torch.cuda.max_memory_allocated() / 2**30
        if dist.get_rank() == 0:
            figures = f"{seconds:.4f} | {summing:.4f} | {tokens} | {tokens / seconds:.0f} | {memory:.1f}"
            print(f"| {name} | {figures} |", flush=True)
        del trainer
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        one, many, graph = results
        print(f"scaling efficiency {100 * one[0] / many[0]:.1f} %", end="")
        print(f"; in a CUDA graph {100 * one[0] / graph[0]:.1f} %", end="")
        print(f"; without the sum of gradients {100 * (one[0] - one[1]) / (many[0] - many[1]):.1f} %")
    # All ranks are done with each other's memory before any lets go of it.
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
