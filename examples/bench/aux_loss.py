"""What the sums over ranks cost that a Qwen3-MoE's auxiliary loss asks for: `transformers`' model as it is.

    torchrun --nproc-per-node 2 examples/bench/aux_loss.py

Prints the time of a step (forward, backward, the sum of gradients) with and without the auxiliary loss, and the sums
over ranks that the pass put in: how many, their bytes, and their time, one after the other in forward and backward, by
themselves. Medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attention import ends_all_ranks
from packs import draw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import cp_rewrite as cp

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


def model_of(options: argparse.Namespace, device: torch.device, dtype: torch.dtype, aux: bool) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=options.hidden, intermediate_size=3 * options.hidden, num_experts=options.experts,
        num_experts_per_tok=min(8, options.experts), moe_intermediate_size=options.hidden * 3 // 8, head_dim=128,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 512), output_router_logits=aux, router_aux_loss_coef=0.001,
        use_cache=False, attn_implementation="sdpa", norm_topk_prob=True,
        experts_implementation=options.experts_implementation,
    )  # fmt: skip
    with device:
        model = Qwen3MoeForCausalLM(config).to(dtype)
    maybe_install_capturing_hooks(model.model)  # a first call without torch.compile does this: it takes a lock
    return model


def batch_of(lengths: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    ids = torch.randint(0, 4096, position_ids.shape, generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "position_ids": position_ids, "labels": ids}


def median_ms(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Of the slowest rank."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def step_ms(sharding: cp.Sharding, model: nn.Module, lengths: tuple[int, ...], options: argparse.Namespace) -> float:
    device = next(model.parameters()).device
    batch = batch_of(lengths, device)
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)

    def step() -> None:
        with sharding.shard(batch, lengths=lengths, shift_labels=True) as local:
            compiled(**local).loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        model.zero_grad()

    for _ in range(options.warmup):
        step()
    return median_ms(step, options.steps, device)


def sums_ms(sizes: list[int], sharding: cp.Sharding, device: torch.device) -> float:
    """Of sums of so many bytes of fp32, forward and backward."""
    parts = [torch.ones(size // 4, device=device) for size in sizes]

    def run() -> None:
        for part in parts + parts:
            dist.all_reduce(part, group=sharding.group)

    run()
    return median_ms(run, 20, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384, help="per rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--experts-implementation", default="grouped_mm")
    parser.add_argument("--inner", default="inductor")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner=options.inner)
    lengths = draw("web_mix", options.tokens * dist.get_world_size(), 42)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[bool, float] = {}
    for aux in (False, True):
        torch._dynamo.reset()
        found[aux] = step_ms(sharding, model_of(options, device, dtype, aux), lengths, options)
    report = cp.explain(model_of(options, device, dtype, True), sharding)(**batch_of((64, 64), torch.device("cpu")))
    sizes = [collective.bytes for collective in report.collectives if collective.bytes]
    alone = sums_ms(sizes, sharding, device)
    if dist.get_rank() == 0:
        shape = f"{options.layers} layers, {options.experts} experts, {options.tokens} tokens per rank"
        print(f"{dist.get_world_size()} x {device.type}, torch {torch.__version__}, {shape}")
        print("| step without, ms | step with | sums | bytes | their time, ms | of a step |\n|---|---|---|---|---|---|")
        share = f"{alone:.3f} | {100 * alone / found[True]:.2f} %"
        print(f"| {found[False]:.2f} | {found[True]:.2f} | {len(sizes)} | {sum(sizes)} | {share} |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
