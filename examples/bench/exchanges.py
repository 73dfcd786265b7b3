"""Every exchange on every pack, beside what the cost model says of it and what `exchange="auto"` takes.

    torchrun --nproc-per-node 4 examples/bench/exchanges.py [--quick] [--only "web_mix,one"] [--json FILE]

One layer's attention in the layout `balanced`, through autograd as a model runs it, of the slowest rank, medians. The
exchanges of a pack are called in turns, each behind a pause in which the host gets ahead of the GPU. "one GPU" is the
whole pack without an exchange, divided by the ranks. "loss" is what the chosen exchange takes beyond the fastest: of
all, and of those that need no memory shared by GPUs (several nodes, other links).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention import begin, ends_all_ranks
from methods import CAUSAL, Alone, Method, Setup, on_device, plan
from packs import Pack, packs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.scatter_heads import HeadScatter
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.choose_exchange import choose_exchange, exchange_seconds
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import load_of
from cp_rewrite.planning.names import split_exchange
from cp_rewrite.planning.plan_input import KERNEL_TABLES
from cp_rewrite.planning.routes import grid
from cp_rewrite.planning.routes.by_exchange import ROUTES, Exchange
from cp_rewrite.planning.routes.head_deal import HeadDeal

AHEAD = 24_000_000
"""Cycles that the GPU sleeps before each call, some 12 ms: the host enqueues all of it meanwhile."""
EXCHANGES = ("push", "needed", "all_gather", "p2p", "a2a")
GRIDS = ("a2a+push", "a2a+needed", "a2a+all_gather", "a2a+p2p")
HEADS = ((64, 8), (32, 32))
INNER = 2
"""Ranks between which a grid scatters heads."""


@dataclass(frozen=True)
class Groups:
    """Names of the groups of all ranks, and of the outer and inner ones of a grid, "" where there is none."""

    whole: str
    outer: str
    inner: str


class Exchanged:
    """One layer's attention by an exchange, through autograd."""

    def __init__(self, planned: BatchPlan, setup: Setup, name: str, groups: Groups) -> None:
        self.name, self.setup = name, setup
        scattered, kind = split_exchange(name)
        route, schedule, ranks = ROUTES[kind], planned.schedule(CAUSAL), setup.world_size
        self.heads: HeadScatter | None = None
        if scattered:
            inner, group = (ranks, groups.whole) if name == "a2a" else (INNER, groups.inner)
            arrays = grid.grid_route(planned, CAUSAL, route, setup.rank, inner)
            deal = HeadDeal.best(setup.heads, setup.heads_kv, inner)
            self.heads = HeadScatter(deal, (setup.dim, setup.dim), group)
            self.exchange = Exchange(kind, "" if name == "a2a" else groups.outer, ranks // inner)
        else:
            arrays = schedule.attention(setup.rank) | route.arrays(schedule, setup.rank)
            self.exchange = Exchange(kind, groups.whole, ranks)
        self.tables = on_device(arrays, KERNEL_TABLES)
        self.route = on_device(arrays, route.tensors + grid.ORDER * scattered)
        rows = schedule.local_rows
        self.q = setup.draw(rows, setup.heads).requires_grad_()
        self.k, self.v = (setup.draw(rows, setup.heads_kv).requires_grad_() for _ in range(2))
        self.dout = setup.draw(rows, setup.heads)

    def forward(self) -> Tensor:
        x = self.setup
        how = self.tables, self.route, self.exchange, x.params, x.kernel
        self.out: Tensor = attend(self.q, self.k, self.v, *how, heads=self.heads)[0]
        return self.out

    def backward(self) -> object:
        out = self.out
        del self.out  # held no longer than the backward needs it
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)


def timed(methods: Sequence[Method], repeats: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of the forward and of the backward, by method."""
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in methods] for _ in range(repeats)]
    meeting = torch.zeros(1, device="cuda")
    for method in methods:
        method.forward()
        method.backward()
    for turn in events:
        for method, (start, middle, stop) in zip(methods, turn, strict=True):
            torch.cuda._sleep(AHEAD)
            dist.all_reduce(meeting)
            start.record()
            method.forward()
            middle.record()
            method.backward()
            stop.record()
            torch.cuda.synchronize()  # the host is no further ahead than that
    spans = [[(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in turn] for turn in events]
    slowest = torch.tensor(spans, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    medians = slowest.median(0).values.tolist()
    return {method.name: (times[0], times[1]) for method, times in zip(methods, medians, strict=True)}


def run_pack(pack: Pack, setup: Setup, groups: Groups, options: argparse.Namespace) -> dict[str, Any]:
    """Facts of a pack by name: its own, measured and predicted milliseconds, and what was chosen."""
    planned = plan(pack, setup)
    names = EXCHANGES + (GRIDS[:1] if options.quick else GRIDS) * (groups.outer != "")
    methods: list[Method] = [Exchanged(planned, setup, name, groups) for name in names]
    methods += [] if options.quick else [Alone(pack, setup)]
    times = timed(methods, 4 if options.quick else 5)
    model = Model((setup.heads, setup.heads_kv), setup.dim)
    load, device = load_of(planned.schedule(CAUSAL)), Device.like(torch.cuda.get_device_name())
    grids = {INNER: load_of(grid.outer_schedule(planned, CAUSAL, INNER))} if groups.outer else {}
    predicted = exchange_seconds(load, device, model, grids=grids)
    chosen = [
        choose_exchange(model, load, device, [name for name in names if taken(name)], grids=grids).exchange
        for taken in (lambda name: name not in ("needed", "a2a+push"), lambda name: "push" not in name)
    ]
    return {
        "pack": pack.name,
        "lengths": pack.lengths,
        "ranks": setup.world_size,
        "heads": (setup.heads, setup.heads_kv),
        "ms": times,
        "predicted_ms": {name: 1e3 * seconds for name, seconds in predicted.items()},
        "chosen": chosen,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds of forward and backward per exchange, and predicted ones; then what was chosen, best, and lost."""
    names = [name for name in rows[0]["ms"] if name != "one GPU"]
    lines = [
        f"| pack, heads | {' | '.join(names)} | one GPU / ranks | chosen, best, loss | without shared memory |",
        f"|{'---|' * (len(names) + 4)}",
    ]
    losses: list[float] = []
    for row in rows:
        both = {name: sum(times) for name, times in row["ms"].items()}
        alone = both.pop("one GPU", float("nan")) / row["ranks"]
        cells = [f"{both[name]:.2f} ({row['predicted_ms'].get(name, float('nan')):.2f})" for name in names]
        cells.append(f"{alone:.2f}")
        for shared, chosen in zip((True, False), row["chosen"], strict=True):
            open_to = {name: time for name, time in both.items() if shared or "push" not in name}
            best = min(open_to, key=open_to.__getitem__)
            losses.append(100 * (open_to[chosen] / open_to[best] - 1))
            cells.append(f"{chosen}, {best}, {losses[-1]:.1f} %")
        lines.append(f"| {row['pack']}, {row['heads'][0]}/{row['heads'][1]} | {' | '.join(cells)} |")
    worst, mean = (f"{max(part):.1f} %, mean {statistics.mean(part):.1f} %" for part in (losses[::2], losses[1::2]))
    return "\n".join([*lines, "", f"worst loss {worst}; without shared memory {mean}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="web_mix,one,x 512", help="packs whose name holds one of these texts")
    parser.add_argument("--quick", action="store_true", help="one draw of each mix, fewer grids, fewer calls")
    parser.add_argument("--json", type=Path, help="what was measured, for fitting the cost model")
    setup, options = begin(parser, shape=False)
    ranks, whole = setup.world_size, setup.group
    groups = Groups(whole, "", "")
    if ranks > INNER and ranks % INNER == 0:
        mesh = init_device_mesh("cuda", (ranks // INNER, INNER), mesh_dim_names=("outer", "inner"))
        groups = Groups(whole, *(mesh.get_group(name).group_name for name in ("outer", "inner")))
    chosen = [pack for pack in packs(ranks) if any(text in pack.name for text in options.only.split(","))]
    if options.quick:
        chosen = list({pack.name.split(" (")[0]: pack for pack in reversed(chosen)}.values())[::-1]
    rows: list[dict[str, Any]] = []
    for pack in chosen:
        for heads, heads_kv in HEADS:
            rows.append(run_pack(pack, replace(setup, heads=heads, heads_kv=heads_kv), groups, options))
            gc.collect()
            torch.cuda.empty_cache()
            if setup.rank == 0:
                print(f"{pack.name}, {heads}/{heads_kv} done", flush=True)
    if setup.rank == 0:
        if options.json:
            options.json.write_text(json.dumps(rows))
        print(f"\nms of forward and backward, in brackets predicted\n\n{table(rows)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
