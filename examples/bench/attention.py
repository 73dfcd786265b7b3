"""Attention over packed documents on several GPUs: ours in every layout and exchange, beside other ways around the
same kernel.

    torchrun --nproc-per-node 4 examples/bench/attention.py [--quick] [--heads 32 --heads-kv 32] [--others Flex]
    torchrun --nproc-per-node 2 examples/bench/attention.py --masks     chunks, prefixes, images and trees

"compiled layer" is what a user runs: a layer's attention, rewritten by the backend, on a batch that `shard` planned, by
autograd. The others call ops and kernels, on plans that are made in the same way.

Per pack and method: forward, backward and both, in ms, in percent of ideal (the single-GPU time of the same kernel on
the whole pack, divided by the ranks, called in turns with the method) and the TFLOP/s of each GPU; medians, and of each
call the slowest rank. "graph" is both, replayed from a CUDA graph, where the host costs nothing. Where FlashAttention 3
and 4 are both installed, "% of fastest" is against the faster of them on this pack: each direction by itself, and for
both together the fastest of 3, 4 and the pair of 3's forward and 4's backward.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from methods import Alone, Compiled, Gathered, Method, Ours, Pushed, Setup, Ulysses
from packs import Pack, drawn_packs, mask_packs, packs
from rivals import FlexFlash, FlexTriton, RingLlama3, RingZigzag, TorchContextParallel

from cp_rewrite.kernels.select import PAIRS, AttentionSpec, device_facts, reasons

HEAD_START = 4_000_000
"""Cycles that a GPU sleeps before it is timed, some 2 ms: in training, too, the host runs ahead."""
Factory = Callable[[Pack, Setup], Method]


def ours(layout: str, exchange: str, **options: bool) -> Factory:
    return lambda pack, setup: Ours(pack, setup, layout, exchange, **options)


def pushed(layout: str, keep: bool = False) -> Factory:
    return lambda pack, setup: Pushed(pack, setup, layout, keep=keep)


OURS: tuple[Factory, ...] = (
    pushed("balanced"),
    pushed("balanced", keep=True),
    ours("balanced", "push", alone=True),
    ours("balanced", "push"),
    ours("balanced", "needed"),
    ours("balanced", "all_gather"),
    pushed("dual_chunk"),
    ours("dual_chunk", "all_gather"),
    pushed("head_tail"),
    pushed("contiguous"),
)
OTHERS: tuple[type[Method], ...] = (
    Gathered,
    Ulysses,
    RingLlama3,
    RingZigzag,
    TorchContextParallel,
    FlexTriton,
    FlexFlash,
)


@dataclass(frozen=True)
class Times:
    """Milliseconds of the slowest rank. graph: of a replay, over the one GPU's beside it; None where a method can't be
    captured. memory: peak, in MiB."""

    forward: float
    backward: float
    both: float
    graph: float | None
    memory: float


def slowest(value: float) -> float:
    holder = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(holder, dist.ReduceOp.MAX)
    return float(holder)


def in_turns(run: Callable[[], object], whole: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Milliseconds of both, called in turns without a pause: a GPU's clock follows its heat and power, which change
    within a tenth of a second. Ranks meet before each pair; of each call the slowest rank counts; medians."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeats)]
    meeting = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(HEAD_START)
    for start, middle, stop in events:
        dist.all_reduce(meeting)
        start.record()
        run()
        middle.record()
        whole()
        stop.record()
    torch.cuda.synchronize()
    times = torch.tensor([[a.elapsed_time(b), b.elapsed_time(c)] for a, b, c in events], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    mine, best = times.median(0).values.tolist()
    return mine, best


def measure(method: Method, ideal: Method, repeats: int, capture: bool) -> tuple[Times, Times]:
    """Times of the method, and of `ideal` called in turns with it."""

    def both(run: Method) -> Callable[[], object]:
        def step() -> None:
            run.forward()
            run.backward()

        return step

    step, whole = both(method), both(ideal)
    step()
    whole()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    memory = slowest((torch.cuda.max_memory_allocated() - before) / 2**20)
    forward, whole_forward = in_turns(method.forward, ideal.forward, repeats)
    backward, whole_backward = in_turns(method.backward, ideal.backward, repeats)
    together, whole_both = in_turns(step, whole, repeats)
    graph = None
    if capture:
        replayed, beside = in_turns(captured(step), whole, repeats)
        graph = replayed / beside
    times = Times(forward, backward, together, graph, memory)
    return times, Times(whole_forward, whole_backward, whole_both, None, 0.0)


def fastest_library(pack: Pack, setup: Setup, alone: Method, repeats: int) -> Times | None:
    """The time of the fastest library installed, over that of the kernel in `alone`; None where there is but one."""
    spec = AttentionSpec(setup.dtype, setup.dim, setup.dim, setup.heads, setup.heads_kv)
    facts = device_facts(torch.device("cuda", torch.cuda.current_device()))
    shares = [(1.0, 1.0, 1.0)]
    for kernel in ("fa3", "fa4", *PAIRS):
        if kernel != setup.kernel and not reasons(kernel, spec, facts):
            other, own = measure(Alone(pack, replace(setup, kernel=kernel)), alone, repeats, False)
            shares.append((other.forward / own.forward, other.backward / own.backward, other.both / own.both))
    forward, backward, both = map(min, zip(*shares, strict=True))
    return Times(forward, backward, both, None, 0.0) if len(shares) > 1 else None


def captured(run: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def line(name: str, pack: Pack, setup: Setup, times: Times, ideal: Times, fastest: Times | None) -> str:
    flops = 4 * setup.heads * setup.dim * pack.pairs / setup.world_size
    pairs = ((times.forward, ideal.forward), (times.backward, ideal.backward), (times.both, ideal.both))
    cells = [f"{time:.3f}" for time, _ in pairs]
    cells += [" / ".join(f"{100 * best / time:.0f}" for time, best in pairs)]
    if fastest:
        shares = fastest.forward, fastest.backward, fastest.both
        cells += [" / ".join(f"{100 * s * best / time:.0f}" for s, (time, best) in zip(shares, pairs, strict=True))]
    cells += [f"{100 / setup.world_size / times.graph:.0f}" if times.graph else "–"]
    cells += [" / ".join(f"{f * flops / time / 1e9:.0f}" for f, (time, _) in zip((1, 2.5, 3.5), pairs, strict=True))]
    cells += [f"{times.memory:.0f}"]
    return f"| {name} | {' | '.join(cells)} |"


def scaled(times: Times, ranks: int) -> Times:
    return Times(times.forward / ranks, times.backward / ranks, times.both / ranks, None, times.memory)


def made(factory: Factory, pack: Pack, setup: Setup) -> Method | str:
    """The method, or why it can't run, the same on all ranks. Any other error ends the run: where one rank fails later,
    `torchrun` ends the others, which would wait for it."""
    method, why = None, ""
    try:
        method = factory(pack, setup)
    except (ValueError, ImportError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
    everyone: list[str] = [""] * setup.world_size
    dist.all_gather_object(everyone, why)
    return next((found for found in everyone if found), None) or method or why


def run_pack(pack: Pack, setup: Setup, factories: tuple[Factory, ...]) -> float:
    """Prints the pack's table. Milliseconds of the fastest method's both directions."""
    # Some 1.2e14 FLOPs of the whole pack in every series: a fifth of a second.
    repeats = min(11, max(5, round(1.2e14 / (14 * setup.heads * setup.dim * pack.pairs))))
    alone, fastest = Alone(pack, setup), float("inf")
    library = fastest_library(pack, setup, alone, repeats)
    if setup.rank == 0:
        print(f"\n### {pack.name}: {len(pack.lengths)} documents, longest {max(pack.lengths)}, {pack.tokens} tokens\n")
        percent = "% of ideal f/b/both |" + " % of fastest f/b/both |" * bool(library)
        print(f"| | forward ms | backward ms | both ms | {percent} graph % | TFLOP/s f/b/both | MiB |")
        print(f"|---|---|---|---|---|---|---|---|{'---|' * bool(library)}")
    for factory in factories:
        method = made(factory, pack, setup)
        if isinstance(method, str):
            text = f"| {getattr(factory, '__name__', 'ours')} | can't run: {method} |"
        else:
            capture = isinstance(method, Pushed) and method.name.startswith("balanced")
            times, ideal = measure(method, alone, repeats, capture)
            text = line(method.name, pack, setup, times, scaled(ideal, setup.world_size), library)
            if not method.name.endswith("alone"):
                fastest = min(fastest, times.both)
        if setup.rank == 0:
            print(text, flush=True)
        if isinstance(method, Compiled):
            method.close()
        del method
        gc.collect()
        torch.cuda.empty_cache()
    return fastest


def run_masks(setup: Setup, wanted: Callable[[Pack], bool]) -> None:
    """The packs under masks beyond documents, and how much faster trees are than their copies."""
    factories = (*OURS[:2], OURS[2], OURS[4], OURS[5], pushed("contiguous"))
    times = {pack.name: run_pack(pack, setup, factories) for pack in mask_packs(setup.world_size) if wanted(pack)}
    for name, both in times.items():
        tree = name.removesuffix(", copies")
        if setup.rank == 0 and tree != name and tree in times:
            print(f"\n{tree}: {times[tree]:.2f} ms, {both:.2f} with copies: {both / times[tree]:.2f} times as fast")


def begin(parser: argparse.ArgumentParser, *, shape: bool = True) -> tuple[Setup, argparse.Namespace]:
    """The process group and what is measured; `parser` gets the options of its kernel and, with `shape`, its heads."""
    parser.add_argument("--kernel", default="fa4")
    if shape:
        parser.add_argument("--heads", type=int, default=64)
        parser.add_argument("--heads-kv", type=int, default=8)
        parser.add_argument("--dim", type=int, default=128)
    parser.set_defaults(**({} if shape else {"heads": 64, "heads_kv": 8, "dim": 128}))
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD.group_name
    sizes = options.heads, options.heads_kv, options.dim
    setup = Setup(dist.get_rank(), dist.get_world_size(), group, *sizes, torch.bfloat16, options.kernel)
    torch.manual_seed(setup.rank)
    if setup.rank == 0:
        name, count = torch.cuda.get_device_name(), setup.world_size
        print(
            f"{count} x {name}, torch {torch.__version__}, heads {setup.heads}/{setup.heads_kv}, head dim {setup.dim}, "
            f"kernel {setup.kernel}"
        )
    return setup, options


def ends_all_ranks(run: Callable[[], None]) -> None:
    """Run a benchmark. A rank that fails ends at once, without waiting for its part in what others have begun, and
    `torchrun` ends the others."""
    try:
        run()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="packs whose name holds this text")
    parser.add_argument("--quick", action="store_true", help="a compiled layer, balanced + push, its kernel alone")
    parser.add_argument("--ours", action="store_true", help="leave the others out")
    parser.add_argument("--others", metavar="NAMES", help="the others whose class's name holds one of these texts")
    parser.add_argument("--seed", type=int, help="of six packs beside the fixed ones; by default the date")
    parser.add_argument("--masks", action="store_true", help="masks beyond documents, trees beside copies of prompts")
    setup, options = begin(parser)
    names = options.others.split(",") if options.others else [] if options.quick or options.ours else [""]
    others = tuple(other for other in OTHERS if any(name in other.__name__ for name in names))
    factories = (Compiled, *(OURS[:4] if options.quick else OURS), *others)

    def wanted(pack: Pack) -> bool:
        return any(text in pack.name for text in options.only.split(","))

    if options.masks:
        run_masks(setup, wanted)
    seed = options.seed or int(datetime.date.today().strftime("%Y%m%d"))
    for pack in () if options.masks else packs(setup.world_size) + drawn_packs(setup.world_size, seed):
        if wanted(pack):
            run_pack(pack, setup, factories)
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
