"""How fast rows come from peers: the pull and return kernels beside the copy engine, measured in the same run.

    torchrun --nproc-per-node 4 examples/bench/peers.py [--sweep]

All ranks read at once. "one peer": each rank reads all rows of the next; "all peers": an equal part of each. GB/s are
bytes that arrive per rank over the time of the whole call, its copy-in and its meeting included.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from attention import HEAD_START, slowest
from torch import Tensor

from cp_rewrite.kernels import symm
from cp_rewrite.kernels.rows import gather_rows

COLUMNS = 2048
SETTINGS = [
    (symm.Crew(*crew), flying) for crew in ((0, 16, 4), (0, 16, 3), (0, 8, 4), (66, 16, 8)) for flying in (2, 4)
]
BESIDE = [symm.Crew(*crew) for crew in ((8, 32, 32), (16, 16, 16), (16, 24, 24), (16, 32, 32), (24, 24, 24))]
"""What --sweep tries: blocks, warps, warps that read peers, and loads in flight."""


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


def remote_rows(rank: int, world_size: int, rows: int, spread: bool) -> Tensor:
    """(rows,) gathered rows to read: all of the next rank, or every rank's equal part but its own."""
    peers = [(rank + step) % world_size for step in range(1, world_size if spread else 2)]
    part = rows // len(peers)
    sources = torch.stack([peer * rows + torch.arange(part) for peer in peers], 1).reshape(-1)
    return torch.cat([sources, sources[: rows - len(sources)]])


def pull_rate(
    rank: int, world_size: int, rows: int, spread: bool, group: str, parts: tuple[int, ...] = (symm.ALL,)
) -> tuple[float, float]:
    """GB/s of pull, in these parts, and of return."""
    k, v = (torch.randn(rows, 8, 128, device="cuda").bfloat16() for _ in range(2))
    sources = remote_rows(rank, world_size, rows, spread)
    everything = index(torch.arange(rows))
    few, remote_jobs = everything[:2], index(torch.tensor([rows]))
    pointers = index(torch.arange(rows + 1))

    def pull() -> None:
        out = None
        for part in parts:
            lists = few, index_of_sources, pointers, everything, remote_jobs, remote_jobs
            out = symm.pull_rows(k, v, *lists, group=group, out=out, parts=part)

    index_of_sources = index(sources)
    nbytes = rows * COLUMNS * 2
    pulled = nbytes / milliseconds(pull, 10) / 1e6
    grad = torch.randn(rows, COLUMNS, device="cuda").bfloat16()
    contributions = ((sources // rows) << 32 | (sources % rows)).cuda()

    def back() -> object:
        return symm.return_rows(grad, few, pointers, contributions, rows, 8, (128, 128), group)

    return pulled, nbytes / milliseconds(back, 10) / 1e6


def copy_engine_rate(rank: int, world_size: int, rows: int, group: str) -> float:
    """GB/s of a plain copy from the next rank's memory."""
    mine = symmetric.empty(rows, COLUMNS, dtype=torch.bfloat16, device=torch.device("cuda", rank))
    handle = symmetric.rendezvous(mine, group)
    peer = handle.get_buffer((rank + 1) % world_size, (rows, COLUMNS), torch.bfloat16)
    target = torch.empty_like(mine)
    return mine.nbytes / milliseconds(lambda: target.copy_(peer), 10) / 1e6


def plain_read_rate(rank: int, world_size: int, rows: int, group: str) -> float:
    """GB/s of the row gather kernel reading the next rank's memory: no copy-in, no meeting."""
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
    rows = []
    for count in (4096, 32768):
        engine = copy_engine_rate(rank, world_size, count, group)
        plain = plain_read_rate(rank, world_size, count, group)
        rows.append((f"copy engine, one peer, {count} rows", engine, 0.0))
        rows.append((f"gather kernel on a peer's memory, {count} rows", plain, 0.0))
        default = symm._FULL, symm._IN_FLIGHT
        for crew, flying in SETTINGS if options.sweep else (default,):
            symm._FULL, symm._IN_FLIGHT = crew, flying
            for spread in (False, True):
                name = f"{'all peers' if spread else 'one peer'}, {count} rows, {crew}, {flying} in flight"
                rows.append((name, *pull_rate(rank, world_size, count, spread, group)))
        symm._FULL, symm._IN_FLIGHT = default
        for crew in BESIDE if options.sweep else (symm._BESIDE,):
            symm._BESIDE = crew
            rate = pull_rate(rank, world_size, count, True, group, (symm.OWN, symm.EARLY, symm.LATE))[0]
            rows.append((f"all peers, {count} rows, in parts, {crew}", rate, 0.0))
    empty, pointers = index(torch.zeros(2)), index(torch.zeros(3))
    k = torch.randn(2, 8, 128, device="cuda").bfloat16()
    meeting = milliseconds(lambda: symm.pull_rows(k, k, empty, empty, pointers, empty, empty[:1], empty[:1], group), 50)
    if rank == 0:
        print(f"{world_size} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print("| rows of 4 KB | pull GB/s | return GB/s |\n|---|---|---|")
        for name, pulled, returned in rows:
            print(f"| {name} | {pulled:.0f} | {returned:.0f} |")
        print(f"an empty pull (launch and meeting): {1e3 * meeting:.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
