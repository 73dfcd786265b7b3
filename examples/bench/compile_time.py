"""What the rewrite costs at compile time: `explain` on a deep graph, and the passes' share of an Inductor compile.

    python examples/bench/compile_time.py [--layers 32 64] [--inductor-layers 4] [--attention eager]

`explain` and the passes in seconds of CPU, the compile with Inductor, which uses more processes, in seconds.
Bars: explain on 32 layers under 2 s (after one warm-up on 1 layer), passes on 64 layers under 3 s, passes under 5% of
the compile with Inductor.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cp_rewrite as cp
from cp_rewrite import passes

TOKENS = {"input_ids": 1, "position_ids": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 64], help="depths of the dry runs")
    parser.add_argument("--inductor-layers", type=int, default=4, help="depth of the compiled model")
    parser.add_argument("--attention", default="sdpa", help="sdpa | eager (written out)")
    args = parser.parse_args()
    explain(1, args.attention)
    print(f"{'':28}{'seconds':>9}")
    for layers in args.layers:
        total, in_passes = explain(layers, args.attention)
        print(f"explain, {layers} layers{'':10}{total:9.2f}   of which passes {in_passes:.2f}")
    total, in_passes = compile_with_inductor(args.inductor_layers, args.attention)
    share = f"{in_passes:.2f} ({in_passes / total:.1%})"
    print(f"inductor, {args.inductor_layers} layers, training{total:9.2f}   of which passes {share}")


def make_model(layers: int, attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def make_batch() -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in (100, 7, 1, 60, 88)])[None]
    return {"input_ids": torch.randint(0, 256, positions.shape), "position_ids": positions}


class Stopwatch:
    """Seconds spent in the passes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._run = passes.run_passes

    def __enter__(self) -> Stopwatch:
        passes.run_passes = self._timed
        return self

    def __exit__(self, *_: Any) -> None:
        passes.run_passes = self._run

    def _timed(self, state: passes.State) -> passes.State:
        start = time.process_time()
        state = self._run(state)
        self.seconds += time.process_time() - start
        return state


def explain(layers: int, attention: str) -> tuple[float, float]:
    """(seconds of `explain`, capture by Dynamo included; seconds of the passes)."""
    model, batch = make_model(layers, attention), make_batch()
    sharding = cp.Sharding(4, TOKENS, cp.PositionIds("position_ids"))
    torch._dynamo.reset()
    with Stopwatch() as watch:
        start = time.process_time()
        report = cp.explain(model, sharding)(**batch)
        total = time.process_time() - start
    assert report.ok, str(report)
    return total, watch.seconds


def compile_with_inductor(layers: int, attention: str) -> tuple[float, float]:
    """(seconds of the first forward and backward, seconds of the passes)."""
    model, batch = make_model(layers, attention), make_batch()
    sharding = cp.Sharding(1, TOKENS, cp.PositionIds("position_ids"))
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    torch._dynamo.reset()
    with Stopwatch() as watch, torch._inductor.utils.fresh_cache():
        start = time.perf_counter()
        with sharding.shard(batch) as local:
            compiled(**local).logits.square().mean().backward()
        total = time.perf_counter() - start
    return total, watch.seconds


if __name__ == "__main__":
    main()
