"""Train a small Llama on packed documents, once on one process and once context-parallel, and compare.

    python examples/train_packed.py --world-size 2

Prints both loss curves, the largest difference of loss and of any gradient, the report and the graph diff,
and saves a picture of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import cp_rewrite as cp

HERE = Path(__file__).parent
TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


def main() -> None:
    args = parse_args()
    console = Console(width=140)
    args.out.mkdir(parents=True, exist_ok=True)
    single = train(0, 1, args, "1 process  ")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, folder), nprocs=args.world_size)
        parallel = torch.load(Path(folder) / "result.pt", weights_only=True)
    losses(console, single, parallel, args.world_size)
    model, batch = make_model(), make_batches(args)[0]
    sharding = cp.Sharding(args.world_size, TOKENS, cp.PositionIds("position_ids"), args.layout, args.exchange)
    report = cp.explain(model, sharding, shift_labels=True)(**batch)
    console.rule("report")
    console.print(str(report), highlight=False, markup=False)
    console.rule("graph diff")
    console.print(report.diff, highlight=False, markup=False, soft_wrap=True)
    lengths = cp.Documents.from_position_ids(batch["position_ids"][0].numpy()).lengths.tolist()
    plan = cp.plan(lengths, args.world_size, layout=args.layout, heads=(8, 2), head_dim=16)
    console.rule("plan")
    console.print(str(plan), highlight=False, markup=False)
    plan.plot(args.out / "plan.png")
    console.print(f"picture of the plan: {args.out / 'plan.png'}")
    worst = max(relative(a, b) for a, b in zip(single["losses"], parallel["losses"], strict=True))
    if worst > 1e-5:
        raise SystemExit(f"losses differ by {worst:.1e}, more than 1e-5")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2, help="context-parallel processes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=768, help="tokens per packed row")
    parser.add_argument("--layout", default="balanced", help="contiguous | head_tail | dual_chunk | balanced")
    parser.add_argument("--exchange", default="auto", help="all_gather | needed | auto")
    parser.add_argument("--inner", default="aot_eager", help="inductor (needs a C++ compiler) | aot_eager | eager")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    return parser.parse_args()


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def make_batches(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """One packed row per step: document lengths drawn from a real mix and scaled to the row."""
    bins = json.loads((HERE / "doc_lengths.json").read_text())["web_mix"]["bins"]
    rng = np.random.default_rng(42)
    weights = np.array([count for _, _, count in bins], dtype=float)
    middles = np.array([(low + high) // 2 for low, high, _ in bins])
    batches: list[dict[str, torch.Tensor]] = []
    for _ in range(args.steps):
        lengths: list[int] = []
        while sum(lengths) < args.tokens:
            drawn = int(rng.choice(middles, p=weights / weights.sum())) // 8 + 1
            lengths.append(min(drawn, args.tokens // 4, args.tokens - sum(lengths)))
        position_ids = torch.cat([torch.arange(length) for length in lengths])
        # Each document counts upwards from its own start: something that attention to the document can learn.
        starts = torch.cat([torch.full((length,), int(rng.integers(512))) for length in lengths])
        input_ids = (starts + 3 * position_ids) % 512
        labels = torch.where(position_ids == 0, -100, input_ids)
        batches.append({"input_ids": input_ids[None], "position_ids": position_ids[None], "labels": labels[None]})
    return batches


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.world_size)
    result = train(rank, args.world_size, args, f"{args.world_size} processes")
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    dist.destroy_process_group()


def train(rank: int, world_size: int, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Losses of all steps and gradients of the first: of the plain model alone, or compiled and sharded."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sharding, compiled = None, model
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
        sharding = cp.Sharding(
            mesh["cp"], TOKENS, cp.PositionIds("position_ids"), args.layout, args.exchange, inner=args.inner
        )
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    result: dict[str, Any] = {"losses": [], "gradients": {}}
    for batch in tqdm(make_batches(args), desc=name, disable=rank > 0):
        if sharding is None:
            loss = model(**batch).loss
            loss.backward()
        else:
            with sharding.shard(batch, shift_labels=True) as local:
                loss = sharding.whole(compiled(**local).loss)
            loss.backward()
            cp.sum_gradients(model.parameters(), sharding)
        result["losses"].append(loss.item())
        result["gradients"] = result["gradients"] or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return result


def losses(console: Console, single: dict[str, Any], parallel: dict[str, Any], world_size: int) -> None:
    table = Table("step", "1 process", f"{world_size} processes", "relative difference", title="loss")
    for step, (one, many) in enumerate(zip(single["losses"], parallel["losses"], strict=True)):
        table.add_row(str(step), f"{one:.6f}", f"{many:.6f}", f"{relative(one, many):.1e}")
    console.print(table)
    worst = max((norm_error(g, parallel["gradients"][n]), n) for n, g in single["gradients"].items())
    console.print(f"largest relative difference of a gradient (step 0): {worst[0]:.1e}, {worst[1]}")


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(a)


def norm_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
