"""Balance, traffic and time that the planner reaches on packs of documents; and a simulation of 8 to 512 ranks.

    python examples/bench/plan.py                  # every bar, some minutes
    python examples/bench/plan.py --seeds 3 --packs 300
    python examples/bench/plan.py --simulate       # only the table of 8 to 512 ranks
    python examples/bench/plan.py --variants       # only what each variant of `balanced` is worth

Packs are drawn from the length mixes of examples/doc_lengths.json: draw lengths, cut documents longer than a quarter of
the pack, fill the pack in order, cut the last document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.choose_exchange import fill_seconds
from cp_rewrite.planning.cost.load import kernel_seconds
from cp_rewrite.planning.cost.tiles import imbalance
from cp_rewrite.planning.layouts import balanced
from cp_rewrite.planning.layouts.by_name import lay_out
from cp_rewrite.planning.plan import Plan, plan
from cp_rewrite.planning.routes.gathered import needed_route

MIXES = ("web_mix", "prolong", "long_tail")
SIMPLE = ("contiguous", "head_tail", "dual_chunk")
LENGTHS = json.loads((Path(__file__).parent.parent / "doc_lengths.json").read_text())


def draw_pack(mix: str, tokens: int, seed: int) -> list[int]:
    """Document lengths of one pack of `tokens` tokens."""
    rng = random.Random(seed)
    bins = LENGTHS[mix]["bins"]
    weights = [count for _, _, count in bins]
    pack: list[int] = []
    left = tokens
    while left:
        low, high, _ = rng.choices(bins, weights)[0]
        length = (low + high) // 2 if mix == "web_mix" else rng.randint(low, high)
        while length and left:
            part = min(length, tokens // 4, left)
            pack.append(part)
            length, left = length - part, left - part
    return pack


def bar(name: str, value: float, limit: float, form: str = "{:.3f}") -> None:
    """One line: what was measured, against its bar."""
    verdict = "ok" if value <= limit else "MISSED"
    print(f"  {name:58s} {form.format(value):>9s}  bar {form.format(limit):>7s}  {verdict}", flush=True)


def show_balance(seeds: int) -> None:
    print(f"\nBalance and traffic, causal, {seeds} seeds: mean (worst) over packs; share of an all-gather's rows")
    print("  mix        P  tokens/rank  imbalance        area   received mean   worst rank    expanded  pieces  pad")
    bars: list[tuple[str, float, float]] = []
    received: dict[tuple[str, int], float] = {}
    for mix in MIXES:
        for world_size in (4, 8):
            for local in (8192, 32768, 131072):
                plans = [plan(draw_pack(mix, local * world_size, 42 + s), world_size) for s in range(seeds)]
                columns = np.array([_figures(p) for p in plans])
                mean, most = columns.mean(0), columns.max(0)
                print(
                    f"  {mix:9s} {world_size:2d}  {local:11d}  {mean[0]:.3f} ({most[0]:.3f})  {mean[1]:.3f}"
                    f"   {mean[2]:6.1%} ({most[2]:5.1%})  {mean[3]:6.1%} ({most[3]:5.1%})  {mean[4]:6.2f} R"
                    f"  {mean[5]:6.1f}  {int(most[6]):3d}",
                    flush=True,
                )
                name = f"{mix}, cp {world_size}, {local // 1024}K"
                bars.append((f"imbalance, worst pack: {name}", most[0], 1.02))
                bars.append((f"rows of fill: {name}", most[6], 0))
                if world_size == 4 and mix != "long_tail":
                    received[mix, local] = mean[2]
                    if local == 8192:
                        bars.append((f"received, mean over ranks and packs: {name}", mean[2], 0.17))
                        bars.append((f"received, worst rank of the worst pack: {name}", most[3], 0.42))
                    else:
                        bars.append(
                            (f"received, less than at fewer tokens: {name}", mean[2], received[mix, local // 4])
                        )
    print()
    for line in bars:
        bar(*line)


def _area_imbalance(p: Plan) -> float:
    """`imbalance` with work in pairs of a query and a key that it sees, under a causal mask: a kernel without tiles."""
    pieces = p.schedule.pieces
    queries, keys = pieces.q1 - pieces.q0, pieces.keys
    pairs = queries * keys - queries * (queries - 1) // 2
    return imbalance(np.bincount(pieces.rank, pairs, p.world_size).astype(np.float64))


def _figures(p: Plan) -> tuple[float, ...]:
    mean, worst = p.recv_fraction
    expanded = float(p.expanded_rows.max()) / p.order.local_size
    return p.imbalance, _area_imbalance(p), mean, worst, expanded, float(p.pieces.mean()), p.fill_rows


def show_single_document() -> None:
    print("\nOne causal document")
    for world_size in (2, 4, 8):
        for tokens in (32768, 131072, 32768 + 37):
            p = plan([tokens], world_size)
            bar(f"received, mean over ranks: cp {world_size}, {tokens} tokens", p.recv_fraction[0], 0.75 + 1e-3)
            bar(f"imbalance: cp {world_size}, {tokens} tokens", p.imbalance, 1.02)


def show_speed() -> None:
    print("\nTime to plan (token order, `balanced`), CPU time of one core: median (worst) over packs, in ms")
    for name, world_size, tokens, limit in (
        ("32K tokens", 4, 32768, 5.0),
        ("64K tokens", 8, 65536, 20.0),
        ("512K tokens", 4, 524288, 20.0),
        ("512K tokens", 8, 524288, 20.0),
    ):
        times = [_cpu_ms(draw_pack("web_mix", tokens, 42 + s), world_size) for s in range(9)]
        bar(f"{name}, web_mix, cp {world_size} (worst {max(times):.1f})", float(np.median(times)), limit, "{:.1f}")
    rng = np.random.default_rng(42)
    cuts = np.sort(rng.choice(np.arange(1, 524288), 499, replace=False))
    lengths = np.diff([0, *cuts.tolist(), 524288]).tolist()
    times = [_cpu_ms(lengths, world_size) for world_size in (4, 8) for _ in range(5)]
    bar(f"512K tokens in 500 documents, cp 4 and 8 (worst {max(times):.1f})", float(np.median(times)), 20.0, "{:.1f}")
    p = plan(lengths, 8)
    start = time.process_time()
    tables = [p.schedule.attention(0), needed_route(p.schedule, 0)]
    print(f"  kernel tables and `needed` route of one rank, 64K rows: {1e3 * (time.process_time() - start):.1f} ms")
    print(f"  pickle of the plan: {len(pickle.dumps(p))} bytes, {sum(map(len, tables))} tables")


def _cpu_ms(lengths: list[int], world_size: int) -> float:
    documents = Documents.from_lengths(lengths)
    start = time.process_time()
    lay_out(documents, world_size, "balanced", PackedMask())
    return 1e3 * (time.process_time() - start)


def draw_odd_pack(rng: random.Random, tokens: int) -> list[int]:
    """Packs that a planner may stumble over."""

    def giant_and_tiny() -> list[int]:
        giant = rng.randint(tokens // 2, tokens - 1)
        return [giant, *(rng.randint(1, 40) for _ in range((tokens - giant) // 21))]

    def equal() -> list[int]:
        count = rng.randint(1, 200)
        return [max(1, tokens // count)] * count

    kinds: tuple[Callable[[], list[int]], ...] = (
        giant_and_tiny,
        equal,
        lambda: [tokens // 2, tokens - tokens // 2],
        lambda: [1] * rng.randint(1, min(tokens, 2000)),
        lambda: [rng.randint(1, 60)],
        lambda: [rng.randint(1, tokens), rng.randint(1, tokens), *[1] * rng.randint(0, 200)],
        lambda: [rng.randint(1, tokens // 2) for _ in range(rng.randint(1, 12))],
    )
    return rng.choice(kinds)()


def odd_plans(packs: int) -> Iterator[dict[str, Plan]]:
    rng = random.Random(42)
    masks = [PackedMask()] * 4 + [
        PackedMask(causal=False),
        PackedMask(window=(1023, 0)),
        PackedMask(causal=False, window=(512, 512)),
    ]
    for i in range(packs):
        world_size, tokens = rng.choice((2, 3, 4, 5, 8)), rng.choice((512, 2048, 8192, 32768, 65536))
        mask = rng.choice(masks)
        lengths = draw_odd_pack(rng, tokens) if i % 2 else draw_pack(rng.choice(MIXES), tokens, i)
        yield {layout: plan(lengths, world_size, layout, mask) for layout in (*SIMPLE, "balanced")}


def show_never_worse(packs: int) -> None:
    print(f"\nBalanced against the best simple layout on {packs} packs, half of them odd, in predicted `needed` time")
    ratios, free = np.empty(packs), np.empty(packs)
    equal = np.zeros(packs, dtype=np.bool_)
    for i, plans in enumerate(odd_plans(packs)):
        ours = plans["balanced"]
        best = min((plans[name] for name in SIMPLE), key=_seconds)
        equal[i] = best.order.local_size == ours.order.local_size
        ratios[i] = _seconds(ours) / _seconds(best)
        free[i] = _attention_seconds(ours) / min(_attention_seconds(plans[name]) for name in SIMPLE)
    worse = ratios > 1 + 1e-9
    print(f"  time over the best simple one's: median {np.median(ratios):.3f}, worst {ratios.max():.3f}")
    bar("packs on which a layout of as many rows per rank is cheaper", int((worse & equal).sum()), 0, "{:.0f}")
    bar("packs on which a layout of more rows per rank is cheaper", int((worse & ~equal).sum()), 0, "{:.0f}")
    cheaper = int((free > 1 + 1e-9).sum())
    print(f"  the same if rows that pad ranks cost nothing outside attention: {cheaper} packs, worst {free.max():.3f}")


def _seconds(p: Plan) -> float:
    return p.seconds["needed"]


def _attention_seconds(p: Plan) -> float:
    return p.seconds["needed"] - fill_seconds(p.load, p.device, p.model)


def variant_packs(seeds: int) -> Iterator[tuple[int, list[int]]]:
    """(ranks, lengths): drawn packs, many short documents, one document, equal ones."""
    for world_size, local in itertools.product((2, 4, 8), (8192, 32768)):
        tokens = world_size * local
        for seed in range(seeds):
            yield from ((world_size, draw_pack(mix, tokens, 42 + seed)) for mix in MIXES)
            ends = np.random.default_rng(seed).integers(1, 400, tokens // 50).cumsum()
            yield world_size, np.diff(ends[ends < tokens], prepend=0, append=tokens).tolist()
        yield from ((world_size, [length] * (tokens // length)) for length in (128, 512, tokens // 2, tokens))


def show_variants(seeds: int) -> None:
    packs = [(*pack, heads) for pack in variant_packs(seeds) for heads in ((64, 8), (32, 32))]

    def seconds(kept: tuple[balanced.Whole, ...]) -> NDArray[np.float64]:
        with patch.object(balanced, "VARIANTS", kept):
            return np.array([_seconds(plan(lengths, ranks, heads=heads)) for ranks, lengths, heads in packs])

    every = balanced.VARIANTS
    today = seconds(every)
    print(f"\nTime without some variants of `balanced`, over the time with all, on {len(packs)} packs and heads")
    print("\n| variants | mean | worst | more than 1% slower |\n|---|---|---|---|")
    without = {f"all but {n + 1}": (*every[:n], *every[n + 1 :]) for n in range(len(every))}
    first = {f"first {n}": every[:n] for n in range(1, len(every) - 1)}
    for name, kept in (without | first).items():
        ratio = seconds(kept) / today
        print(f"| {name} | {ratio.mean():.4f} | {ratio.max():.3f} | {int((ratio > 1.01).sum())} |", flush=True)


def _efficiency(p: Plan) -> float:
    """Time of the uncut kernels shared evenly, with nothing moved, over the time of the best exchange."""
    return kernel_seconds(p.load.whole_tiles / p.world_size, 0, p.device, p.model) / p.seconds[p.exchange]


def simulate() -> None:
    print("\n| ranks | tokens/rank | mix | layout | imbalance | MB in a node | across | exchange | ms | efficiency |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for world_size, local in ((8, 8192), (64, 8192), (64, 32768), (512, 8192), (512, 32768)):
        layouts = (
            ("contiguous", "dual_chunk", "balanced") if world_size * local <= 1 << 19 else ("contiguous", "balanced")
        )
        for mix in MIXES:
            lengths = draw_pack(mix, local * world_size, 42)
            for layout in layouts:
                p = plan(lengths, world_size, layout, ranks_per_node=8)
                across = p.node_rows.mean() * p.model.kv_bytes / 1e6
                inside = (p.recv_rows - p.node_rows).mean() * p.model.kv_bytes / 1e6
                print(
                    f"| {world_size} | {local} | {mix} | {layout} | {p.imbalance:.3f} | {inside:.0f} | {across:.0f} "
                    f"| {p.exchange} | {1e3 * p.seconds[p.exchange]:.2f} | {_efficiency(p):.0%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--packs", type=int, default=10000)
    parser.add_argument("--simulate", action="store_true", help="only the table of 8 to 512 ranks")
    parser.add_argument("--variants", action="store_true", help="only what each variant of `balanced` is worth")
    arguments = parser.parse_args()
    if arguments.variants:
        return show_variants(arguments.seeds)
    if not arguments.simulate:
        show_balance(arguments.seeds)
        show_single_document()
        show_speed()
        show_never_worse(arguments.packs)
    simulate()


if __name__ == "__main__":
    main()
