"""Seconds until a first training step has run: in capture, passes, AOT and Inductor, with cold and with warm caches.

    python examples/bench/compile_time.py                  # a narrow Llama on a CPU, few layers
    python examples/bench/compile_time.py --gpu            # one of width 2048 in bf16 on one GPU, 4 to 64 layers
    python examples/bench/compile_time.py --cases explain parallelize --layers 4 16 32 64 --inner eager --cold-only
    python examples/bench/compile_time.py --gpu --cases whole --layers 4 --model qwen3_next    # kimi_linear, mamba2

Every line is a process of its own. Cold: its caches are empty. Warm: the same program once more. `rest` is what the
first step takes besides: its own work, loading of kernels, guards. `kernels` are those of recurrent states, as they are
compiled, tuned and tried. `miss` and `hit` count graphs (forward and backward
together) in AOTAutograd's cache, `GiB` is the GPU's peak.

cases    plain        torch.compile of the whole model, no cp_rewrite
         blocks       torch.compile of each block, no cp_rewrite
         whole        torch.compile(model, backend="cp_rewrite"): equal blocks compiled once
         uncut        the same with the graph compiled in one piece
         parallelize  cp.parallelize: FSDP2, segments of equal blocks compiled once
         apart        the same with each segment compiled by itself
         explain      a dry run: capture and passes alone
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, KimiLinearConfig, LlamaConfig, Mamba2Config, Qwen3NextConfig

import cp_rewrite as cp
from cp_rewrite import passes
from cp_rewrite.ops.states import trial
from cp_rewrite.segments import compiled

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
COLUMNS = ("first", "capture", "passes", "AOT", "Inductor", "kernels", "rest", "second", "step", "miss", "hit", "GiB")
DEPTHS = {
    "plain": [16],
    "blocks": [16],
    "whole": [16, 64],
    "uncut": [16],
    "parallelize": [4, 16, 64],
    "apart": [16],
    "explain": [16, 64],
}

MODELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": lambda given: LlamaConfig(**given),
    "qwen3_next": lambda given: Qwen3NextConfig(**given, mlp_only_layers=[*range(given["num_hidden_layers"])]),
    "kimi_linear": lambda given: KimiLinearConfig(**given, mlp_layer_types=["dense"] * given["num_hidden_layers"]),
    "mamba2": lambda given: Mamba2Config(
        **given | {"attn_implementation": "eager"},
        num_heads=given["hidden_size"] // 32,
        head_dim=64,
        n_groups=max(1, given["hidden_size"] // 256),
    ),
}
"""Configs of hybrids have the widths of recurrent layers that transformers gives them."""


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(measure(args.cases[0], args.layers[0], args)))
        return
    print(f"{'':30}{''.join(f'{name:>10}' for name in COLUMNS)}", flush=True)
    for case in args.cases:
        for layers in args.layers or (DEPTHS[case] if args.gpu else [4]):
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold",) if args.cold_only or case == "explain" else ("cold", "warm"):
                    found = in_process(case, layers, folder, args)
                    cells = found if isinstance(found, str) else "".join(f"{found[name]:10.2f}" for name in COLUMNS)
                    print(f"{f'{case}, {layers} layers, {state}':30}{cells}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="width 2048 in bf16 on a GPU, else narrow on a CPU")
    parser.add_argument("--cases", nargs="+", choices=DEPTHS, default=["plain", "blocks", "whole", "parallelize"])
    parser.add_argument("--layers", type=int, nargs="+", help="depths of every case; else its own, 4 on a CPU")
    parser.add_argument("--tokens", type=int, help="of a packed row; 8192 on a GPU, else 256")
    parser.add_argument(
        "--model", choices=MODELS, default="llama", help="one of its layers as it comes, all MLPs dense"
    )
    parser.add_argument("--attention", default="sdpa", help="sdpa | eager (written out)")
    parser.add_argument(
        "--inner", default="inductor", help="inductor | aot_eager | eager: what compiles the rewritten graph"
    )
    parser.add_argument("--cold-only", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tokens = args.tokens or (8192 if args.gpu else 256)
    return args


def in_process(case: str, layers: int, folder: str, args: argparse.Namespace) -> dict[str, float] | str:
    """Seconds that a process of its own measures, by name, or the last line of its error."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    caches["TILELANG_CACHE_DIR"] = f"{folder}/tilelang"
    command = [sys.executable, __file__, "--child", "--cases", case, "--layers", str(layers), "--inner", args.inner]
    command += [
        "--tokens",
        str(args.tokens),
        "--attention",
        args.attention,
        "--model",
        args.model,
        *(["--gpu"] if args.gpu else []),
    ]
    run = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or [f"exit {run.returncode}"]
    return json.loads(lines[-1]) if run.returncode == 0 else f"   {lines[-1][:120]}"


def measure(case: str, layers: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first step and of its parts, of the second, on other documents, and of a later one (median)."""
    device = "cuda" if args.gpu else "cpu"
    run = prepare(case, make_model(layers, args), device, args)
    timed_passes()
    first = seconds(lambda: run(0))
    found = {**parts(first), "first": first, "second": 0.0, "step": 0.0}
    if case != "explain":
        known = counters["stats"]["unique_graphs"]
        found["second"] = seconds(lambda: run(1))
        assert counters["stats"]["unique_graphs"] == known, "documents of other lengths were compiled anew"
        found["step"] = statistics.median(seconds(lambda: run(1)) for _ in range(5))
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def make_model(layers: int, args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    width = 2048 if args.gpu else 64
    heads = max(4, width // 128)
    given = {
        "vocab_size": 320, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(2, width // 512), "use_cache": False,
        "max_position_embeddings": args.tokens, "attn_implementation": args.attention,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    dtype = torch.bfloat16 if args.gpu else torch.float32
    with torch.device("cuda" if args.gpu else "cpu"):
        return AutoModelForCausalLM.from_config(MODELS[args.model](given)).to(dtype)


def prepare(case: str, model: Any, device: str, args: argparse.Namespace) -> Callable[[int], Any]:
    """A callable that runs a step, forward and backward, on the batch of a number."""
    plain = case in ("plain", "blocks")
    batches = [make_batch(args.tokens, seed, device if plain else "cpu") for seed in range(2)]  # `shard` moves its own
    if case == "explain":
        unit = cp.Sharding(4, TOKENS, cp.PositionIds("position_ids"))
        return lambda i: cp.explain(model, unit)(**batches[i])
    if plain:
        for module in model.model.layers if case == "blocks" else [model]:
            module.compile()
        return lambda i: model(**batches[i]).loss.backward()
    sharding = cp.Sharding(one_rank(device), TOKENS, cp.PositionIds("position_ids"), inner=args.inner)
    if case == "uncut":
        compiled.block_weights = lambda _: {}
    if case in ("whole", "uncut"):
        run: Any = torch.compile(model, backend="cp_rewrite", options={"sharding": sharding}, fullgraph=True)
    else:
        if case == "apart":
            compiled.description = lambda *_: object()
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.gpu else None
        run = cp.parallelize(model, sharding.mesh, sharding, mp_policy=half)

    taken = {*inspect.signature(model.forward).parameters, "shift_labels"}

    def step(i: int) -> None:
        with sharding.shard(batches[i], shift_labels=True) as local:
            loss = run(**{name: local[name] for name in local if name in taken}).loss
        loss.backward()
        if case in ("whole", "uncut"):
            cp.sum_gradients(model.parameters(), sharding)

    return step


def make_batch(tokens: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    """A packed row of documents whose lengths are drawn."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randperm(tokens - 1, generator=generator)[:7].sort().values + 1
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long), append=torch.tensor([tokens]))
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    ids = torch.randint(0, 256, positions.shape, generator=generator)
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    return {name: value.to(device) for name, value in batch.items()}


def one_rank(device: str) -> Any:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,), mesh_dim_names=("cp",))


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed_passes() -> None:
    """Let the passes' seconds stand among torch's own."""
    plain = passes.run_passes

    def run_passes(state: passes.State) -> passes.State:
        start = time.perf_counter()
        state = plain(state)
        compilation_time_metrics.setdefault("passes", []).append(time.perf_counter() - start)
        return state

    passes.run_passes = run_passes
    agree = trial._agree

    def timed_trial(*facts: Any) -> bool:
        start = time.perf_counter()
        right = agree(*facts)
        compilation_time_metrics.setdefault("kernels", []).append(time.perf_counter() - start)
        return right

    trial._agree = timed_trial


def parts(first: float) -> dict[str, float]:
    """Seconds of a first step by who spent them, as torch's own clocks have it."""

    def spent(name: str) -> float:
        return sum(compilation_time_metrics.get(name, []))

    inductor, aot = (
        spent("compile_fx_inner"),
        spent("create_aot_dispatcher_function") + spent("backward._backward_impl"),
    )
    capture = spent("_compile.compile_inner") - spent("OutputGraph.call_user_compiler")
    cache = counters["aot_autograd"]
    found = {"capture": capture, "passes": spent("passes"), "AOT": max(aot - inductor, 0.0), "Inductor": inductor}
    found["kernels"] = spent("kernels")
    return {
        **found, "rest": first - sum(found.values()),
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_initialized() else 0.0,
        "miss": cache["autograd_cache_miss"] + cache["autograd_cache_bypass"], "hit": cache["autograd_cache_hit"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
