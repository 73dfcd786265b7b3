"""Peak memory and speed of a training step with and without tiles: a Llama under FSDP2, blocks checkpointed.

    torchrun --nproc-per-node 2 examples/bench/tiles.py --width 2048 --layers 16 --vocabulary 128256 --tokens 131072

Each setting runs in turn; peaks are of the slowest and fullest rank. Losses and norms of gradients are beside them.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import cp_rewrite as cp

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


class WithLoss(nn.Module):
    """A language model that returns its loss, and not its logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        lm = LlamaForCausalLM(config)
        lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.model, self.lm_head = lm.model, lm.lm_head

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        logits = self.lm_head(h).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    args = parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    if gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    if dist.get_rank() == 0:
        print(f"{'tile':>8} {'peak GiB':>9} {'s/step':>8} {'tokens/s':>9} {'loss':>9} {'norm':>9}", flush=True)
    for tile in args.tiles:
        found = measure(args, mesh, None if tile == "none" else tile if tile == "auto" else int(tile))
        if dist.get_rank() == 0:
            peak, seconds, loss, norm = found
            print(
                f"{tile:>8} {peak:9.1f} {seconds:8.3f} {args.tokens / seconds:9.0f} {loss:9.5f} {norm:9.5f}", flush=True
            )
    dist.destroy_process_group()


def measure(args: argparse.Namespace, mesh: Any, tile: Any) -> tuple[float, float, float, float]:
    """(peak GiB, seconds a step, loss and norm of the first step)."""
    torch._dynamo.reset()
    gc.collect()
    device = torch.device(mesh.device_type)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=args.inside or 4 * args.width * 2 // 3 // 128 * 128,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 128),
        num_key_value_heads=max(1, args.width // 512),
        max_position_embeddings=args.tokens,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        model = WithLoss(config)
    sharding = cp.Sharding(mesh["cp"], TOKENS, cp.PositionIds("position_ids"), inner=args.inner, tile=tile)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else None
    ours = cp.parallelize(model, mesh, sharding, mp_policy=half, blocks=list(model.model.layers))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-4)
    batch = make_batch(args)
    times: list[float] = []
    first: tuple[float, float] = (0.0, 0.0)
    for step in range(args.steps):
        if step == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with sharding.shard(batch) as local:
            loss = ours(**local)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
            first = loss.item(), full.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    found = torch.tensor([peak / 2**30, sorted(times[2:])[len(times[2:]) // 2]], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return (*found.tolist(), *first)  # type: ignore[return-value]


def make_batch(args: argparse.Namespace) -> dict[str, Tensor]:
    """One row of documents of 2,000 to 16,000 tokens, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    positions: list[Tensor] = []
    while sum(map(len, positions)) < args.tokens:
        length = int(torch.randint(min(2000, args.tokens), min(16000, args.tokens) + 1, (), generator=generator))
        positions.append(torch.arange(min(length, args.tokens - sum(map(len, positions)))))
    ids = torch.randint(0, args.vocabulary, (1, args.tokens + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "position_ids": torch.cat(positions)[None], "labels": ids[:, 1:]}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the row, of all ranks together")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inside", type=int, default=0, help="width inside the MLPs; by default 8/3 of the width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="the first two are not counted")
    parser.add_argument("--tiles", nargs="+", default=["none", "auto"], help="none, auto, or rows of a tile")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager", "eager"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
