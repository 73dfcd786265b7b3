"""Cost of the sums over ranks that a Qwen3-MoE's auxiliary loss asks for: `transformers`' model as it is.

    torchrun --nproc-per-node 2 examples/bench/aux_loss.py
    torchrun --nproc-per-node 2 examples/bench/aux_loss.py --layers 24 --hidden 512 --experts 32
    torchrun --nproc-per-node 2 examples/bench/aux_loss.py --device cpu --layers 2 --hidden 64 --experts 4 --tokens 256

One model, compiled by Inductor with the auxiliary loss and without it; the two are called in turns. A step is forward
and backward; sums of weights' gradients over the ranks are not timed. The sums that the pass put in are timed by
themselves, one after another. Medians, and of each call the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attention import ends_all_ranks
from packs import draw
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import cp_rewrite as cp

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
VOCAB = 4096


def model_of(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Qwen3-30B-A3B's shape where the width is 2048; narrower ones keep its ratios."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        moe_intermediate_size=options.hidden * 3 // 8, num_experts=options.experts,
        num_experts_per_tok=min(8, options.experts // 2), num_hidden_layers=options.layers, head_dim=128,
        num_attention_heads=max(2, options.hidden // 64), num_key_value_heads=max(1, options.hidden // 512),
        norm_topk_prob=True, router_aux_loss_coef=0.001, use_cache=False, attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )  # fmt: skip
    with device:
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model


def batch_of(lengths: Sequence[int]) -> dict[str, Tensor]:
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(0, VOCAB, position_ids.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": position_ids, "labels": ids.clone()}


class Clock:
    """Points in time: of the GPU's work, or of the host where that does it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Milliseconds; of events, once the device is done."""
        return 1e3 * (stop - start) if self.device.type == "cpu" else start.elapsed_time(stop)

    def in_turns(self, runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        """Milliseconds of each; ranks meet before each turn."""
        meeting = torch.zeros(1, device=self.device)
        points: list[list[Any]] = []
        for _ in range(repeats):
            dist.all_reduce(meeting)
            points.append([self.now()])
            for run in runs:
                run()
                points[-1].append(self.now())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        found = [[self.between(*pair) for pair in itertools.pairwise(turn)] for turn in points]
        times = torch.tensor(found, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.median(0).values.tolist()


def sums(sizes: Sequence[int], sharding: cp.Sharding, device: torch.device) -> None:
    """As many sums over ranks of so many bytes."""
    for size in sizes:
        torch.ops.cp_rewrite.sum_over_ranks(torch.ones(max(1, size // 4), device=device), sharding.group_name)


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, torch.device, DeviceMesh]:
    """Options, with `--device`; this rank's device; and a mesh of all ranks, whose group is made."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    return options, device, init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384, help="per rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    options, device, mesh = begin(parser)
    inner = "inductor" if options.device == "cuda" else "eager"
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner=inner)
    model = model_of(options, device)
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    lengths = draw("web_mix", options.tokens * mesh.size(), 42)
    batch = batch_of(lengths)

    def with_loss(**values: Any) -> Tensor:
        return model(**values, output_router_logits=True).loss

    report = cp.explain(with_loss, sharding, shift_labels=True)(**batch)
    sizes = [collective.bytes for collective in report.collectives if collective.bytes]
    torch._dynamo.reset()
    with sharding.shard(batch, lengths=lengths, shift_labels=True) as local:

        def step(aux: bool) -> None:
            compiled(**local, output_router_logits=aux).loss.backward()
            model.zero_grad(set_to_none=True)

        runs = partial(step, True), partial(step, False), partial(sums, sizes, sharding, device)
        for run in runs * options.warmup:
            run()
        beside, without, alone = Clock(device).in_turns(runs, options.steps)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} x {options.device}, torch {torch.__version__}: {options.layers} layers of "
              f"{options.hidden}, {options.experts} experts, {options.tokens} tokens per rank")  # fmt: skip
        print("| step with, ms | without | difference | sums put in | bytes | their time, ms | of a step |")
        print("|---|---|---|---|---|---|---|")
        print(f"| {beside:.2f} | {without:.2f} | {100 * (beside / without - 1):+.2f} % | {len(sizes)} | {sum(sizes)} | "
              f"{alone:.3f} | {100 * alone / beside:.3f} % |")  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
