"""The selective scan on one GPU, beside mamba_ssm's kernels. Ranks: `states.py --kinds selective_scan`.

    python examples/bench/selective.py [--channels 8192] [--tokens 8192,32768,131072]
    python examples/bench/selective.py --tiny     on a CPU, by the reference: that it runs

Forward alone and with the backward, bf16, 16 numbers a channel. mamba_ssm knows no documents: it runs all tokens as
one. Its rows are (1, channels, tokens), ours (1, tokens, channels). Both are called in turns; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from packs import Pack, draw
from torch import Tensor

from cp_rewrite.ops.states import ops as pieces
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.plan_input import STATES, States
from cp_rewrite.planning.states import state_tables

ops: Any = torch.ops.cp_rewrite
assert pieces
Ways = tuple[Callable[[], object], Callable[[], object]]
"""Forward alone, and with the backward."""


def inputs_of(tokens: int, channels: int, device: str) -> list[Tensor]:
    """x, dt, A, B, C, and a gradient of the result."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(width: int) -> Tensor:
        return torch.randn(1, tokens, width, generator=generator, device=device)

    rate = -torch.arange(1.0, 17, device=device).repeat(channels, 1)
    found = normal(channels), 0.02 * F.softplus(normal(channels)), rate, normal(16), normal(16), normal(channels)
    return [x if x is rate else x.bfloat16() for x in found]


def ways_of(run: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor) -> Ways:
    leaves = [x.clone().requires_grad_() for x in inputs]

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*leaves)

    return forward, lambda: torch.autograd.grad(run(*leaves), leaves, dout)


def ours(pack: Pack, given: Sequence[Tensor]) -> Ways:
    """The op on the pieces of one rank, by the tables of its plan."""
    arrays = state_tables(plan_batch([pack.documents], 1), States(resets=True), 0)
    tables = [torch.from_numpy(arrays[t.name]).to("cpu" if t.on_host else given[0].device) for t in STATES]
    return ways_of(lambda *x: ops.selective_scan_on_pieces(*x, tables, "")[0], given[:-1], given[-1])


def by_mamba(given: Sequence[Tensor]) -> Ways:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    *inputs, dout = (x if x.ndim < 3 else x.mT.contiguous() for x in given)
    return ways_of(selective_scan_fn, inputs, dout)


def in_turns(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each, medians."""
    for run in [*runs] * 2:
        run()
    if not torch.cuda.is_available():
        return [float("nan")] * len(runs)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)] for _ in range(repeats)]
    for first, *rest in events:
        first.record()
        for run, event in zip(runs, rest, strict=True):
            run()
            event.record()
    torch.cuda.synchronize()
    times = [[a.elapsed_time(b) for a, b in pairwise(line)] for line in events]
    return torch.tensor(times).median(0).values.tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=8192)
    parser.add_argument("--tokens", default="8192,32768,131072")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    channels, sizes = (8, [96]) if args.tiny else (args.channels, [int(x) for x in args.tokens.split(",")])
    beside = importlib.util.find_spec("mamba_ssm") is not None
    print("| pack | forward | mamba_ssm | ratio | both | mamba_ssm | ratio |")
    for tokens in sizes:
        lengths = draw("web_mix", tokens, 176)
        given = inputs_of(tokens, channels, "cpu" if args.tiny else "cuda")
        for pack in (Pack(f"one document, {tokens}", (tokens,)), Pack(f"{len(lengths)} documents, {tokens}", lengths)):
            ways = [ours(pack, given), *([by_mamba(given)] if beside else [])]
            cells: list[str] = []
            for runs in zip(*ways, strict=True):
                mine, *theirs = in_turns(runs, args.repeats)
                cells += [f"{mine:.2f}", *([f"{theirs[0]:.2f}", f"{theirs[0] / mine:.2f}"] if theirs else ["–", "–"])]
            print(f"| {pack.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
