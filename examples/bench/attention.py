"""Attention over packed documents on several GPUs: ours in every layout and exchange, beside other ways around the
same kernel.

    torchrun --nproc-per-node 2 examples/bench/attention.py --quick             one table: what a user runs
    torchrun --nproc-per-node 4 examples/bench/attention.py [--heads 32 --heads-kv 32] [--others Flex]
    torchrun --nproc-per-node 2 examples/bench/attention.py --masks             chunks, prefixes, images and trees
    torchrun --nproc-per-node 2 examples/bench/attention.py --tiny              the table on CPUs: that it runs

"compiled layer" is what a user runs: a layer's attention, rewritten by the backend and compiled once for all packs, on
batches that `shard` cuts and plans, by autograd; queries, keys and values come in, no projection is timed. The others
call ops and kernels: "its ops" those that the compiled layer runs, by its exchange and kernel, on its plan; named ones
on plans that are made in the same way. "host ahead" is a call in a model where other work keeps the GPU busy: it sleeps
while the host enqueues the layer.

Per pack and method: forward, backward and both, in ms, in percent of ideal (the single-GPU time of the same kernel on
the whole pack, divided by the ranks, called in turns with the method) and the TFLOP/s of each GPU; medians, and of each
call the slowest rank. "graph" is both, replayed from a CUDA graph, where the host costs nothing; of the compiled layer
both with the host ahead. Where FlashAttention 3 and 4 are both installed, "% of fastest" is against the faster of them
on this pack: each direction by itself, and for both together the fastest of 3, 4 and the pair of 3's forward and 4's
backward.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from methods import Alone, Compiled, Gathered, Layer, Method, Ours, Pushed, Setup, Ulysses, ops_of
from packs import Pack, drawn_packs, mask_packs, packs, table_packs
from rivals import FlexFlash, FlexTriton, RingLlama3, RingZigzag, TorchContextParallel

from cp_rewrite.kernels.select import PAIRS, AttentionSpec, DeviceFacts, choose_kernel, device_facts, reasons

HEAD_START = 4_000_000
"""Cycles that a GPU sleeps before it is timed, some 2 ms: in training, too, the host runs ahead."""
AHEAD = 8_000_000
"""Cycles that it sleeps before a call that is enqueued meanwhile."""
SHAPES = ((64, 8), (32, 32))
"""Heads of `--quick`."""
Factory = Callable[[Pack, Setup], Method]


def ours(layout: str, exchange: str, alone: bool = False) -> Factory:
    return lambda pack, setup: Ours(pack, setup, layout, exchange, alone=alone)


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
    """Milliseconds of the slowest rank. graph: of both directions where the host costs nothing, in a replay or ahead of
    the GPU, over the one GPU's beside it; None: not measured. memory: peak, in MiB."""

    forward: float
    backward: float
    both: float
    graph: float | None
    memory: float


def on_gpus() -> bool:
    """True if this run is no `--tiny` one."""
    return dist.get_backend() != "gloo"


def slowest(value: float) -> float:
    holder = torch.tensor([value], device="cuda" if on_gpus() else "cpu", dtype=torch.float64)
    dist.all_reduce(holder, dist.ReduceOp.MAX)
    return float(holder)


def in_turns(
    run: Callable[[], object], whole: Callable[[], object], repeats: int, asleep: int = 0
) -> tuple[float, float]:
    """Milliseconds of both, called in turns without a pause: a GPU's clock follows its heat and power, which change
    within a tenth of a second. Ranks meet before each pair; of each call the slowest rank counts; medians. `asleep`:
    cycles that the GPU sleeps before each pair."""
    if not on_gpus():
        return in_turns_on_cpus(run, whole, repeats)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeats)]
    meeting = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(HEAD_START)
    for start, middle, stop in events:
        if asleep:
            torch.cuda._sleep(asleep)
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


def in_turns_on_cpus(run: Callable[[], object], whole: Callable[[], object], repeats: int) -> tuple[float, float]:
    times: list[list[float]] = []
    for _ in range(repeats):
        dist.barrier()
        moments = [time.perf_counter()]
        for call in (run, whole):
            call()
            moments.append(time.perf_counter())
        times.append([1e3 * (b - a) for a, b in pairwise(moments)])
    found = torch.tensor(times)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    mine, best = found.median(0).values.tolist()
    return mine, best


def measure(method: Method, ideal: Method, repeats: int, unhindered: bool) -> tuple[Times, Times]:
    """Times of the method, and of `ideal` called in turns with it. `unhindered`: by the host, too."""

    def both(run: Method) -> Callable[[], object]:
        def step() -> None:
            run.forward()
            run.backward()

        return step

    step, whole = both(method), both(ideal)
    step()
    whole()
    memory = slowest(peak_of(step)) if on_gpus() else 0.0
    forward, whole_forward = in_turns(method.forward, ideal.forward, repeats)
    backward, whole_backward = in_turns(method.backward, ideal.backward, repeats)
    together, whole_both = in_turns(step, whole, repeats)
    graph = None
    if unhindered and isinstance(method, Compiled):
        ahead, beside = in_turns(step, whole, repeats, AHEAD)
        graph = ahead / beside
    elif unhindered and isinstance(method, Pushed) and on_gpus():
        replayed, beside = in_turns(captured(step), whole, repeats)
        graph = replayed / beside
    times = Times(forward, backward, together, graph, memory)
    return times, Times(whole_forward, whole_backward, whole_both, None, 0.0)


def peak_of(step: Callable[[], object]) -> float:
    """MiB that a step takes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def fastest_library(pack: Pack, setup: Setup, alone: Method, repeats: int) -> Times | None:
    """The time of the fastest library installed, over that of the kernel in `alone`; None where there is but one."""
    spec, facts = facts_of(setup)
    shares = [(1.0, 1.0, 1.0)]
    for kernel in ("fa3", "fa4", *PAIRS) if on_gpus() else ():
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


def repeats_of(pack: Pack, setup: Setup) -> int:
    """Calls of a series: some 1.2e14 FLOPs of the whole pack, a fifth of a second."""
    return min(11, max(5, round(1.2e14 / (14 * setup.heads * setup.dim * pack.pairs)))) if on_gpus() else 2


def free() -> None:
    gc.collect()
    if on_gpus():
        torch.cuda.empty_cache()


def shares(times: Times, ideal: Times) -> str:
    """Percent of ideal: forward/backward/**both**."""
    forward, backward, both = (
        f"{100 * best / time:.0f}"
        for time, best in (
            (times.forward, ideal.forward), (times.backward, ideal.backward), (times.both, ideal.both),
        )
    )  # fmt: skip
    return f"{forward}/{backward}/**{both}**"


def quick_row(pack: Pack, setup: Setup, layer: Layer, others: Sequence[Factory]) -> str:
    """The line of a pack in the table of `--quick`."""
    compiled, repeats, ranks = layer.on(pack), repeats_of(pack, setup), setup.world_size
    setup = replace(setup, kernel=layer.decision.kernel)
    alone, cells = Alone(pack, setup), list[str]()

    def percent(factory: Factory, unhindered: bool) -> tuple[str, str]:
        """(forward/backward/both, without the host)."""
        method = made(factory, pack, setup)
        if isinstance(method, str):
            return "–", "–"
        times, whole = measure(method, alone, repeats, unhindered)
        ideal = scaled(whole, ranks)
        return shares(times, ideal), f"{100 / ranks / times.graph:.0f}" if times.graph else "–"

    cells += percent(lambda *_: compiled, True)
    cells += percent(lambda *_: ops_of(compiled, pack), True)
    cells += [percent(lambda *_: ops_of(compiled, pack, alone=True), False)[0]]
    cells += [percent(other, False)[0] for other in others]
    compiled.close()
    received = int(compiled.plan.schedule(pack.mask).received.sum(1).max())
    how = f"{layer.decision.exchange_name}, {setup.kernel}"
    free()
    return f"| {pack.name} | {setup.heads}/{setup.heads_kv} | {how} | {received} | {' | '.join(cells)} |"


def run_quick(
    setup: Setup, options: argparse.Namespace, found: Sequence[Pack], shapes: Sequence[tuple[int, int]],
    others: Sequence[Factory],
) -> None:  # fmt: skip
    """Prints one table over all packs and shapes."""
    names = [f"{getattr(other, '__name__', 'other')}: f/b/both |" for other in others]
    if setup.rank == 0:
        print(
            "\nPercent of ideal, forward/backward/**both**\n\n| pack | heads | runs | rows received | compiled layer | "
            f"host ahead | its ops | in a CUDA graph | kernel alone |{''.join(names)}\n|{'---|' * (9 + len(names))}"
        )
    for heads, heads_kv in shapes:
        shape = replace(setup, heads=heads, heads_kv=heads_kv)
        layer = Layer(shape, options.kernel)
        for pack in found:
            text = quick_row(pack, shape, layer, others)
            if setup.rank == 0:
                print(text, flush=True)


def run_pack(pack: Pack, setup: Setup, layer: Layer | None, factories: Sequence[Factory]) -> float:
    """Prints the pack's table. Milliseconds of the fastest method's both directions."""
    repeats = repeats_of(pack, setup)
    alone, fastest = Alone(pack, setup), float("inf")
    if layer is not None:
        factories = (lambda pack, _: layer.on(pack), *factories)
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
            unhindered = isinstance(method, Compiled) or method.name.startswith("balanced")
            times, ideal = measure(method, alone, repeats, unhindered)
            text = line(method.name, pack, setup, times, scaled(ideal, setup.world_size), library)
            if not method.name.endswith("alone"):
                fastest = min(fastest, times.both)
        if setup.rank == 0:
            print(text, flush=True)
        if isinstance(method, Compiled):
            method.close()
        del method
        free()
    return fastest


def run_masks(setup: Setup, wanted: Callable[[Pack], bool]) -> None:
    """The packs under masks beyond documents, and how much faster trees are than their copies."""
    factories = (*OURS[:2], OURS[2], OURS[4], OURS[5], pushed("contiguous"))
    times = {pack.name: run_pack(pack, setup, None, factories) for pack in mask_packs(setup.world_size) if wanted(pack)}
    for name, both in times.items():
        tree = name.removesuffix(", copies")
        if setup.rank == 0 and tree != name and tree in times:
            print(f"\n{tree}: {times[tree]:.2f} ms, {both:.2f} with copies: {both / times[tree]:.2f} times as fast")


def begin(
    parser: argparse.ArgumentParser, *, shape: bool = True, kernel: str = "fa4", tiny: bool = False
) -> tuple[Setup, argparse.Namespace]:
    """The process group and what is measured; `parser` gets the options of its kernel and, with `shape`, its heads.
    `kernel`: unless said otherwise. `tiny`: with `--tiny`, on CPUs."""
    parser.add_argument("--kernel", default=kernel)
    if shape:
        parser.add_argument("--heads", type=int, help="of queries (64)")
        parser.add_argument("--heads-kv", type=int, help="of keys and values (8)")
        parser.add_argument("--dim", type=int, default=128)
    if tiny:
        parser.add_argument("--tiny", action="store_true", help="on CPUs, to see that it runs")
    parser.set_defaults(tiny=False, **({} if shape else {"heads": None, "heads_kv": None, "dim": 128}))
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda", 0 if options.tiny else int(os.environ["LOCAL_RANK"]))
    if options.tiny:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    assert dist.group.WORLD is not None
    group, sizes = dist.group.WORLD.group_name, (options.heads or 64, options.heads_kv or 8, options.dim)
    dtype, name = (torch.float32, "CPU") if options.tiny else (torch.bfloat16, torch.cuda.get_device_name())
    setup = Setup(dist.get_rank(), dist.get_world_size(), group, *sizes, dtype, options.kernel, device.type)
    setup = replace(setup, kernel=choose_kernel(*facts_of(setup), options.kernel).kernel or options.kernel)
    torch.manual_seed(setup.rank)
    if setup.rank == 0:
        print(
            f"{setup.world_size} x {name}, torch {torch.__version__}, heads {setup.heads}/{setup.heads_kv}, head dim "
            f"{setup.dim}, kernel {setup.kernel}"
        )
    return setup, options


def facts_of(setup: Setup) -> tuple[AttentionSpec, DeviceFacts]:
    """The demands of the attention, and the device at hand."""
    device = torch.device(setup.device, torch.cuda.current_device()) if setup.device == "cuda" else torch.device("cpu")
    return AttentionSpec(setup.dtype, setup.dim, setup.dim, setup.heads, setup.heads_kv), device_facts(device)


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
    parser.add_argument("--quick", action="store_true", help="one table of what a user runs, and no more")
    parser.add_argument("--ours", action="store_true", help="leave the others out")
    parser.add_argument("--others", metavar="NAMES", help="the others whose class's name holds one of these texts")
    parser.add_argument("--seed", type=int, help="of six packs beside the fixed ones; by default the date")
    parser.add_argument("--masks", action="store_true", help="masks beyond documents, trees beside copies of prompts")
    started = time.perf_counter()
    setup, options = begin(parser, kernel="auto", tiny=True)
    options.quick |= options.tiny  # peers' memory is GPUs' alone
    names = options.others.split(",") if options.others else [] if options.quick or options.ours else [""]
    others = tuple(other for other in OTHERS if any(name in other.__name__ for name in names))
    seed, k = options.seed or int(datetime.date.today().strftime("%Y%m%d")), 8 if options.tiny else 1024
    fixed = table_packs if options.quick else packs

    def wanted(pack: Pack) -> bool:
        return any(text in pack.name for text in options.only.split(","))

    found = [*filter(wanted, fixed(setup.world_size, k) + drawn_packs(setup.world_size, seed, k))]
    if options.masks:
        run_masks(setup, wanted)
    elif options.quick:
        named = options.heads is not None or options.heads_kv is not None
        run_quick(setup, options, found, [(setup.heads, setup.heads_kv)] if named else SHAPES, others)
    else:
        layer = Layer(setup, options.kernel)
        for pack in found:
            run_pack(pack, setup, layer, (*OURS, *others))
    if setup.rank == 0:
        print(f"\nseed {seed}, {time.perf_counter() - started:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
