"""One plan over all ranks beside data parallelism, where each rank trains on a row of its own: tokens/s, same batches.

    torchrun --nproc-per-node 2 examples/bench/joined_rows.py --width 2048 --layers 16 --tokens 32768

The model is that of examples/train_fsdp.py under FSDP2. Rows are packed from documents of web_mix's lengths; one that
does not fit goes on in the next row, as a document of its own. A step is forward, backward and AdamW; a rank waits
for the slowest one in it. Losses of the first step, on the same weights and tokens, are printed side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from packs import LENGTHS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import cp_rewrite as cp
from examples.train_fsdp import TOKENS, make_model, on_gpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank's row")
    parser.add_argument("--steps", type=int, default=12, help="timed, each on other rows")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--mix", default="web_mix")
    args = parser.parse_args()
    if on_gpus():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    packed = rows_of(args.mix, args.tokens, size * (args.steps + args.warmup))
    if rank == 0:
        print(f"{size} ranks, {args.steps} batches of {size} rows of {args.tokens} tokens, {args.mix}")
        print("| | s a step | tokens/s | of dp | imbalance, mean | first loss |\n|---|---|---|---|---|---|", flush=True)
    base = 0.0
    for name in (f"dp {size}", "one plan"):
        seconds, imbalance, loss = timed(name == "one plan", packed[rank::size], args)
        base = base or seconds
        rate = size * args.tokens / seconds
        if rank == 0:
            print(
                f"| {name} | {seconds:.3f} | {rate:,.0f} | {base / seconds:.3f} | {imbalance:.3f} | {loss:.5f} |",
                flush=True,
            )
    dist.destroy_process_group()


def timed(joined: bool, rows: list[dict[str, Tensor]], args: argparse.Namespace) -> tuple[float, float, float]:
    """(seconds of a step, mean imbalance of attention's work over ranks, loss of the first step)"""
    size, device = dist.get_world_size(), "cuda" if on_gpus() else "cpu"
    mesh = init_device_mesh(device, (size, 1), mesh_dim_names=("dp", "cp"))
    flat = init_device_mesh(device, (size,), mesh_dim_names=("cp",))
    inner = "inductor" if on_gpus() else "aot_eager"
    packing = cp.PositionIds("position_ids")
    sharding = cp.Sharding(
        flat if joined else mesh["cp"], TOKENS, packing, inner=inner, rows="own" if joined else "same"
    )
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpus() else None
    model = cp.parallelize(make_model(args), flat if joined else mesh, sharding, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpus())
    tiles, losses, start = list[float](), list[float](), 0.0
    for number, block in enumerate(sharding.batches(rows, shift_labels=True)):
        if number == args.warmup:
            synchronize()
            start = time.perf_counter()
        with block as local:
            loss: Any = model(**local).loss
            tiles.append(local.plan.imbalance() if joined else work(rows[number]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not number:
            losses = over_ranks(loss.item())
    synchronize()
    seconds = (time.perf_counter() - start) / args.steps
    if not joined:
        works = np.array([over_ranks(each) for each in tiles])
        tiles = (works.max(1) / works.mean(1)).tolist()
    return max(over_ranks(seconds)), float(np.mean(tiles[args.warmup :])), float(np.mean(losses))


def work(row: dict[str, Tensor]) -> float:
    """Query-key pairs of a row."""
    return float((row["position_ids"] + 1).sum())


def over_ranks(value: float) -> list[float]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def synchronize() -> None:
    if on_gpus():
        torch.cuda.synchronize()
    dist.barrier()


def rows_of(mix: str, tokens: int, count: int) -> list[dict[str, Tensor]]:
    bins = json.loads(LENGTHS.read_text())[mix]["bins"]
    weights = np.array([count for _, _, count in bins], dtype=np.float64)
    rng, rows, left = np.random.default_rng(0), list[dict[str, Tensor]](), 0
    for number in range(count):
        lengths: list[int] = []
        while missing := tokens - sum(lengths):
            if not left:
                low, high, _ = bins[rng.choice(len(bins), p=weights / weights.sum())]
                left = max(1, int(rng.integers(low, high + 1)))
            lengths.append(min(left, missing))
            left -= lengths[-1]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        ids = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(number))
        rows.append({"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)})
    return rows


if __name__ == "__main__":
    main()
