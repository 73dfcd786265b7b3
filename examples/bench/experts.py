"""Experts that ranks share, beside FSDP alone: steps of Qwen3-30B-A3B's or gpt-oss-120b's layers, forward and backward.

    torchrun --nproc-per-node 2 examples/bench/experts.py
    torchrun --nproc-per-node 2 examples/bench/experts.py --shape gpt_oss --tokens 8192
    torchrun --nproc-per-node 2 examples/bench/experts.py --device cpu --tiny --tokens 64 128 --steps 2

One table: tokens a GPU, milliseconds of a step and peak GB with FSDP alone (`experts=1`) and with all ranks sharing one
set, how many times as fast that is, and what it saves. Then the dispatch alone: GB/s of rows that leave a rank. Weights
in bf16, no optimizer step; medians, and of each step the slowest rank. Routers are as initialized: nearly balanced.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from attention import ends_all_ranks
from aux_loss import TOKENS, VOCAB, Clock, batch_of, begin
from packs import draw
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import cp_rewrite as cp
from cp_rewrite.experts.dispatch import Dispatch, join_group

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
GB = 1e9


def model_of(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    both: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": options.layers, "use_cache": False}
    tiny = TINY if options.tiny else {}
    if options.shape == "gpt_oss":
        given = {
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attn_implementation": "eager",
        }  # fmt: skip
        kind, config = GptOssForCausalLM, GptOssConfig(**{**both, **given, **tiny})
    else:
        given = {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "norm_topk_prob": True, "attn_implementation": "sdpa",
        }  # fmt: skip
        kind, config = Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**both, **given, **tiny})
    config._experts_implementation = "grouped_mm" if device.type == "cuda" else "batched_mm"
    with device:
        return kind(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)


class Measured(NamedTuple):
    """Milliseconds of a step, peak GB, and what the step computes: the loss and the norm of all gradients."""

    ms: float
    peak: float
    loss: float
    norm: float


def measured(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device, shared: int) -> list[Measured]:
    """For each of the token counts."""
    torch._dynamo.reset()
    inner = "inductor" if device.type == "cuda" else "aot_eager"
    across = options.shape == "gpt_oss"
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner=inner, across_documents=across)
    model = cp.parallelize(model_of(options, device), mesh, sharding, experts=shared)
    found: list[Measured] = []
    for tokens in options.tokens:
        batch = batch_of(draw("web_mix", tokens * mesh.size(), 42))

        def step(batch: Any = batch) -> Tensor:
            model.zero_grad()
            with sharding.shard(batch, shift_labels=True) as local:
                loss = model(**local).loss
            loss.backward()
            return loss.detach()

        for _ in range(options.warmup):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        (ms,) = Clock(device).in_turns([step], options.steps)
        peak = torch.cuda.max_memory_allocated() / GB if device.type == "cuda" else 0.0
        loss = float(step())
        found.append(Measured(ms, peak, loss, float(cp.clip_grad_norm_(model.parameters(), 1e9))))
    return found


def dispatched(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device, tokens: int) -> list[float]:
    """GB/s of rows that leave a rank: by the all-to-all alone, with rows picked first, and on the whole way there and
    back, with its counts and sums."""
    columns, experts, each = (64, 8, 2) if options.tiny else (2048, 128, 8)
    group = join_group(mesh.mesh.tolist(), mesh.get_group(), mesh.size())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(tokens, columns, device=device, dtype=dtype)
    weight, chosen = torch.rand(tokens, experts, device=device).topk(each)

    def there_and_back() -> None:
        way, _ = Dispatch.of(chosen, weight, experts // mesh.size(), group)
        way.home(way.go(x))

    way, _ = Dispatch.of(chosen, weight, experts // mesh.size(), group)
    rows = x[way.token].contiguous()
    runs = [lambda: way.exchange(rows), lambda: way.go(x), there_and_back]
    for run in runs:
        run()
    times = Clock(device).in_turns(runs, options.steps)
    leaves = (sum(way.send) - way.send[mesh.get_local_rank()]) * columns * x.element_size()
    return [leaves * trips / GB / (ms / 1e3) for ms, trips in zip(times, (1, 1, 2), strict=True)]


def table(tokens: Sequence[int], alone: Sequence[Measured], shared: Sequence[Measured]) -> str:
    lines = [
        "| tokens a GPU | FSDP alone | experts shared | times as fast | GB saved | losses | norms of gradients |",
        "|---|---|---|---|---|---|---|",
    ]
    for T, a, b in zip(tokens, alone, shared, strict=True):
        lines.append(
            f"| {T:,} | {a.ms:.1f} ms, {a.peak:.1f} GB | {b.ms:.1f} ms, {b.peak:.1f} GB | {a.ms / b.ms:.2f} | "
            f"{a.peak - b.peak:.1f} | {a.loss:.5f} {b.loss:.5f} | {a.norm:.4f} {b.norm:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("qwen3_moe", "gpt_oss"), default="qwen3_moe")
    parser.add_argument("--tiny", action="store_true", help="a few columns, to see that it runs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768], help="per rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    options, device, mesh = begin(parser)
    results: list[list[Measured]] = []
    for shared in (1, mesh.size()):
        results.append(measured(options, mesh, device, shared))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    speeds = [(tokens, dispatched(options, mesh, device, tokens)) for tokens in options.tokens]
    if dist.get_rank() == 0:
        print(f"{options.shape}, {options.layers} layers, {mesh.size()} ranks, torch {torch.__version__}\n")
        print(table(options.tokens, *results), "\n")
        for tokens, (bare, picked, whole) in speeds:
            print(f"dispatch of {tokens:,}: {bare:.0f} GB/s, with rows picked {picked:.0f}, there and back {whole:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
