"""The largest logits per head beside the forward of attention: what a watched batch takes longer.

    python examples/bench/max_logits.py [--heads 64/8,32/32] [--tiles 128,128,8,2 --tiles 64,128,4,3]

One GPU, head dim 128, bf16, the whole of four packs: milliseconds of the forward and of the largest logits, called in
turns, their quotient, and TFLOP/s of the one product. Medians. `--tiles`: queries and keys of a tile, warps and stages,
in the place of the kernel's own.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from methods import Alone, Setup
from packs import Pack, packs

from cp_rewrite.kernels import max_logits

HEAD_START = 4_000_000
"""Cycles that the GPU sleeps before it is timed: the host is ahead of it."""
PACKS = ("web_mix 8K/GPU (27", "prolong 8K/GPU", "64 x 512", "one 32K")
"""Beginnings of the names of packs of 4 GPUs."""


def milliseconds(alone: Alone, repeats: int = 15) -> tuple[float, float]:
    """Medians of the forward, and of the largest logits."""

    def watch() -> None:
        max_logits.max_logits(alone.q, alone.k, alone.tables, alone.setup.params)

    for _ in range(3):
        alone.forward()
        watch()
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    times = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeats)]
    for start, middle, end in times:
        start.record()
        alone.forward()
        middle.record()
        watch()
        end.record()
    torch.cuda.synchronize()
    return tuple(statistics.median(t[i].elapsed_time(t[i + 1]) for t in times) for i in (0, 1))  # type: ignore[return-value]


def line(pack: Pack, alone: Alone, tiles: str) -> str:
    forward, largest = milliseconds(alone)
    setup = alone.setup
    speed = 2 * setup.heads * setup.dim * pack.pairs / largest / 1e9
    cells = f"{forward:.3f} | {largest:.3f} | {largest / forward:.2f} | {speed:.0f}"
    return f"| {pack.name}, {setup.heads}/{setup.heads_kv} | {tiles} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="64/8,32/32")
    parser.add_argument("--kernel", default="fa4")
    parser.add_argument("--tiles", action="append", default=[])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.kernel}\n")
    print("| pack, heads | tiles | forward ms | largest ms | quotient | TFLOP/s |\n|---|---|---|---|---|---|")
    own = dict(max_logits.TILES)
    for heads, heads_kv in (map(int, text.split("/")) for text in options.heads.split(",")):
        setup = Setup(0, 1, "", heads, heads_kv, 128, torch.bfloat16, options.kernel)
        for pack in (x for x in packs(4) if x.name.startswith(PACKS)):
            alone = Alone(pack, setup)
            for tiles in options.tiles or ["own"]:
                try:
                    max_logits.TILES.update(own if tiles == "own" else {128: tuple(map(int, tiles.split(",")))})  # type: ignore[dict-item]
                    print(line(pack, alone, tiles), flush=True)
                except Exception as error:  # too many for a multiprocessor
                    print(f"| {pack.name}, {heads}/{heads_kv} | {tiles} | {type(error).__name__}: {error} |")


if __name__ == "__main__":
    main()
