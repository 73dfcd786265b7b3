"""How fast rows go to peers, and gradients come back, beside the copy engine, measured in the same run.

    torchrun --nproc-per-node 4 examples/bench/peers.py [--sweep]

All ranks write at once. "one peer": each rank writes all rows to the next; "all peers": an equal part to each. GB/s are
bytes that arrive per rank over the time of the whole call, in which ranks also wait for each other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from attention import HEAD_START, slowest
from torch import Tensor

from cp_rewrite.kernels import peers
from cp_rewrite.kernels.peers import LaunchShape
from cp_rewrite.kernels.rows import gather_rows

COLUMNS = 2048
SHAPES = [
    LaunchShape(blocks, warps, in_flight=n)
    for blocks, warps in ((0, 16), (0, 24), (8, 16), (8, 32), (16, 8), (16, 16), (16, 24))
    for n in (2, 4, 8)
]
"""Launch shapes that --sweep tries."""


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Per call of a queue that the host fills while the GPU sleeps, after a first one that compiles and maps memory;
    slowest rank."""
    run()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    torch.cuda.synchronize()
    return slowest(start.elapsed_time(stop) / repeats)


def index(values: Tensor) -> Tensor:
    return values.int().cuda()


@dataclass(frozen=True)
class Lists:
    """Lists that a call of each direction reads, on the device. Every rank has `rows` rows and as many expanded ones;
    all of them go to the next rank, or an equal part to every peer."""

    push: tuple[Tensor, ...]
    back: tuple[Tensor, ...]

    @classmethod
    def make(cls, rank: int, world_size: int, rows: int, spread: bool) -> Lists:
        steps = torch.arange(1, world_size if spread else 2)
        part = rows // len(steps)
        source = torch.arange(part * len(steps))
        step = source // part + 1
        targets = ((rank + step) % world_size << 32) | source
        partners = [sum(1 << (rank + sign * int(step)) % world_size for step in steps) for sign in (-1, 1)]
        ends = index(torch.tensor([0, 0, len(source)]))  # all of them late
        capacity, expanded = torch.tensor([rows]), torch.zeros(rows, dtype=torch.int8)
        partners = index(torch.tensor(partners))
        pointers = index(torch.arange(rows + 1).clamp(max=len(source)))
        targets = targets.cuda()
        return cls(
            (index(source), targets, ends, expanded, partners, capacity), (partners, capacity, pointers, targets)
        )


def push(k: Tensor, v: Tensor, lists: tuple[Tensor, ...], group: str, shape: LaunchShape) -> None:
    call = peers.Push(k, v, *lists, group=group)
    call.to_peers(shape)
    call.own_rows()


def rates(rank: int, world_size: int, rows: int, spread: bool, group: str, shape: LaunchShape) -> tuple[float, float]:
    """GB/s of push and of return."""
    k, v = (torch.randn(rows, 8, 128, device="cuda").bfloat16() for _ in range(2))
    lists = Lists.make(rank, world_size, rows, spread)

    nbytes = rows * COLUMNS * 2
    pushed = nbytes / milliseconds(lambda: push(k, v, lists.push, group, shape), 10) / 1e6
    expanded = torch.randn(rows, COLUMNS, device="cuda").bfloat16()
    peers.Return(expanded, *lists.back, group=group).rows.copy_(expanded)

    def back() -> None:
        call = peers.Return(expanded, *lists.back, group=group)
        call.written()
        call.sum_up(k, v, slice(0, 0))

    return pushed, nbytes / milliseconds(back, 10) / 1e6


def copy_engine_rate(rank: int, world_size: int, rows: int, group: str) -> float:
    """GB/s of a plain copy from the next rank's memory."""
    mine = symmetric.empty(rows, COLUMNS, dtype=torch.bfloat16, device=torch.device("cuda", rank))
    handle = symmetric.rendezvous(mine, group)
    peer = handle.get_buffer((rank + 1) % world_size, (rows, COLUMNS), torch.bfloat16)
    target = torch.empty_like(mine)
    return mine.nbytes / milliseconds(lambda: target.copy_(peer), 10) / 1e6


def plain_read_rate(rank: int, world_size: int, rows: int, group: str) -> float:
    """GB/s of the row gather kernel reading the next rank's memory: no copy-in, no wait for peers."""
    mine = symmetric.empty(rows, COLUMNS, dtype=torch.bfloat16, device=torch.device("cuda", rank))
    handle = symmetric.rendezvous(mine, group)
    peer = handle.get_buffer((rank + 1) % world_size, (rows, COLUMNS), torch.bfloat16)
    order = index(torch.arange(rows))
    return mine.nbytes / milliseconds(lambda: gather_rows(peer, order), 10) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="vary warps and loads in flight")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    rows: list[tuple[str, float, float]] = []
    for count in (4096, 32768):
        rows.append((f"copy engine, one peer, {count} rows", copy_engine_rate(rank, world_size, count, group), 0.0))
        plain = plain_read_rate(rank, world_size, count, group)
        rows.append((f"gather kernel on a peer's memory, {count} rows", plain, 0.0))
        for shape in SHAPES if options.sweep else (peers.WHOLE_GPU, peers.FEW_BLOCKS):
            for spread in (False, True):
                name = f"{'all peers' if spread else 'one peer'}, {count} rows, {shape}"
                rows.append((name, *rates(rank, world_size, count, spread, group, shape)))
    k = torch.randn(2, 8, 128, device="cuda").bfloat16()
    nothing, ends, two = index(torch.zeros(2)), index(torch.zeros(3)), torch.tensor([2])
    everyone = index(torch.full((2,), (1 << world_size) - 1))
    empty = nothing, nothing.long(), ends, torch.zeros(2, dtype=torch.int8), everyone, two
    push(k, k, empty, group, peers.WHOLE_GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            push(k, k, empty, group, peers.WHOLE_GPU)
    empty_push = milliseconds(graph.replay, 5) / 20
    if rank == 0:
        print(f"{world_size} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print("| rows of 4 KB | push GB/s | return GB/s |\n|---|---|---|")
        for name, pushed, returned in rows:
            print(f"| {name} | {pushed:.0f} | {returned:.0f} |")
        print(f"an empty push (launches, and waits for all ranks): {1e3 * empty_push:.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
