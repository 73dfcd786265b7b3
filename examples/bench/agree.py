"""Cost per batch of all ranks comparing what they were given: `python examples/bench/agree.py`. No GPU needed.

Prints the median over 300 batches of the slowest rank, and that of `shard` with and without it, for processes of this
machine that meet over TCP, as `torchrun` starts them.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from cp_rewrite.agree import turns

PACKS = {"27 documents, 32K tokens": [1213] * 27, "129 documents, 128K tokens": [1016] * 129}


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure(sharding: cp.Sharding, lengths: list[int]) -> tuple[float, float, float]:
    """Milliseconds of the comparison alone, of `shard` with it, of `shard` without it."""
    batch = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}

    def shard(sharding: cp.Sharding) -> None:
        with sharding.shard(batch):
            pass

    with sharding.shard(batch) as local:
        alone = milliseconds(lambda: turns.on_batch(sharding, local.plan, batch), 300)
    without = dataclasses.replace(sharding, check_batches=False)
    return alone, milliseconds(lambda: shard(sharding), 60), milliseconds(lambda: shard(without), 60)


def run_rank(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    sharding = cp.Sharding(mesh, {"position_ids": 1}, cp.PositionIds("position_ids"))
    for name, lengths in PACKS.items():
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, measure(sharding, lengths))
        if rank == 0:
            worst = " | ".join(f"{max(column):.2f}" for column in zip(*everyone, strict=True))
            print(f"| {world_size} | {name} | {worst} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    print(
        "| ranks | batch | compare, ms | shard, ms | shard without, ms |\n| --- | --- | --- | --- | --- |", flush=True
    )
    for world_size in (2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        mp.spawn(run_rank, (world_size, port), nprocs=world_size)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
