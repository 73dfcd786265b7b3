"""Every exchange on every pack, beside what the cost model says of it and what `exchange="auto"` takes.

    torchrun --nproc-per-node 4 examples/bench/exchanges.py [--heads 32 --heads-kv 32] [--only "web_mix,one"]

Times are those of `attention.py`, of `balanced` and one layer's attention through autograd, as a model runs it; percent
is of its ideal. "loss" is what the chosen exchange takes beyond the fastest.
"""

from __future__ import annotations

import argparse
import gc

import torch
from attention import begin, measure, scaled
from methods import CAUSAL, Alone, Setup, on_device
from packs import Pack, packs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cp_rewrite.documents import Documents
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.scatter_heads import HeadScatter
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.choose_exchange import choose_exchange, push_seconds
from cp_rewrite.planning.cost import exchange_seconds, load_of
from cp_rewrite.planning.devices import Device, Model
from cp_rewrite.planning.routes import grid
from cp_rewrite.planning.routes.by_exchange import ROUTES, Exchange
from cp_rewrite.planning.routes.head_deal import HeadDeal
from cp_rewrite.planning.routes.route import KERNEL_TABLES
from cp_rewrite.sharding import split_exchange

Groups = tuple[tuple[int, str], tuple[int, str]]
"""(ranks, group) of the outer and of the inner dim of a grid."""


class Exchanged:
    """One layer's attention by an exchange, through autograd."""

    def __init__(self, plan: BatchPlan, setup: Setup, name: str, groups: Groups) -> None:
        self.name, self.setup = name, setup
        scattered, kind = split_exchange(name)
        route, schedule = ROUTES[kind], plan.schedule(CAUSAL)
        self.heads: HeadScatter | None = None
        if scattered:
            inner = setup.world_size if name == "a2a" else groups[1][0]
            arrays = grid.grid_route(plan, CAUSAL, route, setup.rank, inner)
            deal = HeadDeal.best(setup.heads, setup.heads_kv, inner)
            self.heads = HeadScatter(deal, (setup.dim, setup.dim), setup.group if name == "a2a" else groups[1][1])
            outer = ("", 1) if name == "a2a" else (groups[0][1], groups[0][0])
        else:
            arrays, outer = (
                schedule.attention(setup.rank) | route.arrays(schedule, setup.rank),
                (setup.group, setup.world_size),
            )
        self.exchange = Exchange(kind, *outer)
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
        return torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout, retain_graph=True)


def names(setup: Setup) -> list[str]:
    found = ["push", "needed", "all_gather", "p2p", "a2a"]
    return found + ["a2a+push", "a2a+p2p"] * (setup.world_size >= 4 and setup.world_size % 2 == 0)


def run_pack(pack: Pack, setup: Setup, groups: Groups, device: Device) -> None:
    plan = plan_batch([Documents.from_lengths(pack.lengths)], setup.world_size)
    model = Model((setup.heads, setup.heads_kv), setup.dim)
    load = load_of(plan.schedule(CAUSAL))
    predicted = exchange_seconds(load, device, model) | {"push": push_seconds(load, device, model)}
    chosen = choose_exchange(model, setup.world_size, CAUSAL, device, one_sided=True).exchange
    repeats = min(9, max(5, round(1.2e14 / (14 * setup.heads * setup.dim * pack.pairs))))
    if setup.rank == 0:
        print(f"\n### {pack.name}, {setup.heads}/{setup.heads_kv} heads\n")
        print(
            "| | forward ms | backward ms | both ms | % of ideal f/b/both | predicted ms |\n|---|---|---|---|---|---|"
        )
    alone, both = Alone(pack, setup), dict[str, float]()
    for name in names(setup):
        method = Exchanged(plan, setup, name, groups)
        times, whole = measure(method, alone, repeats, capture=False)
        ideal = scaled(whole, setup.world_size)
        both[name] = times.both / ideal.both
        pairs = ((times.forward, ideal.forward), (times.backward, ideal.backward), (times.both, ideal.both))
        cells = [f"{time:.3f}" for time, _ in pairs] + ["/".join(f"{100 * best / time:.0f}" for time, best in pairs)]
        cells += [f"{1e3 * predicted[name]:.3f}" if name in predicted else "–"]
        if setup.rank == 0:
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        del method
        gc.collect()
        torch.cuda.empty_cache()
    best = min(both, key=both.__getitem__)
    if setup.rank == 0:
        print(f"\nchosen {chosen}, best {best}, loss {100 * (both[chosen] / both[best] - 1):.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="web_mix,one,64 x,32 x", help="packs whose name holds one of these texts")
    setup, options = begin(parser)
    mesh = init_device_mesh("cuda", (setup.world_size // 2, 2), mesh_dim_names=("outer", "inner"))
    sizes, groups = (setup.world_size // 2, 2), [mesh.get_group(name).group_name for name in ("outer", "inner")]
    device = Device.like(torch.cuda.get_device_name())
    for pack in packs(setup.world_size):
        if any(text in pack.name for text in options.only.split(",")):
            run_pack(pack, setup, ((sizes[0], groups[0]), (sizes[1], groups[1])), device)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
