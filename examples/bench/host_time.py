"""Where the host's time goes: compiled attention layers over a packed row, forward and backward, and what the GPU does.

    torchrun --nproc-per-node 2 examples/bench/host_time.py [--profile FOLDER] [--heads 32 --heads-kv 32]
    torchrun --nproc-per-node 2 examples/bench/host_time.py --tiny       on CPUs, where the host does all: that it runs

The time until a step's forward, and its backward, have been enqueued, while the GPU sleeps: medians of the slowest
rank. Per layer is what four layers more take. "GPU" is what the GPU needs for it, where the host is ahead. The last
line says from how many tokens on, of web_mix, the GPU needs longer than the host. "kernel alone": FlashAttention 4's
public function over one GPU's rows, forward and backward, without a compiler and without an exchange: what the library
itself takes. `--profile` writes what functions and ops took, and when each GPU kernel ran.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import io
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention import begin, ends_all_ranks, on_gpus, slowest
from methods import Setup
from packs import Pack, draw, packs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import cp_rewrite as cp

ASLEEP = 60_000_000
"""Cycles that the GPU sleeps while the host enqueues a step: some 30 ms."""


class Attention(nn.Module):
    """Layers of nothing but attention: queries, keys and values are the input times a number for each channel."""

    def __init__(self, layers: int, heads: int, heads_kv: int, dim: int) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.dim = heads, heads_kv, dim
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(heads + 2 * heads_kv, dim)) for _ in range(layers))

    def forward(self, x: Tensor, doc_ids: Tensor) -> Tensor:
        index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
        mask = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (index[:, None] >= index[None, :])
        for weight in self.weights:
            q, k, v = weight.split([self.heads, self.heads_kv, self.heads_kv])
            rows = x.unflatten(-1, (self.heads, self.dim))
            few = rows[:, :, : self.heads_kv]
            q, k, v = ((part * each).transpose(1, 2) for part, each in ((rows, q), (few, k), (few, v)))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
            x = x + out.transpose(1, 2).flatten(2)
        return x


class Step:
    """Forward and backward of a compiled model on one batch."""

    def __init__(self, layers: int, setup: Setup, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)  # the same on all ranks
        model = Attention(layers, setup.heads, setup.heads_kv, setup.dim).to(setup.device, setup.dtype)
        names, kernel = {"x": 1, "doc_ids": 1}, cast("cp.sharding.Kernel", setup.kernel)
        inner = "inductor" if on_gpus() else "aot_eager"
        self.setup, self.sharding = (
            setup,
            cp.Sharding(mesh, names, cp.DocumentIds("doc_ids"), kernel=kernel, inner=inner),
        )
        self.compiled: Any = torch.compile(model, backend=cp.backend(self.sharding), fullgraph=True)

    def take(self, pack: Pack) -> None:
        """Have `repeat` run on this pack."""
        self.lengths, setup = pack.lengths, self.setup
        doc_ids = torch.repeat_interleave(torch.arange(len(pack.lengths)), torch.tensor(pack.lengths))[None]
        rows = setup.draw(pack.tokens, setup.heads).flatten(1)[None]
        self.batch = {"x": rows, "doc_ids": doc_ids.to(setup.device)}

    def run(self, local: dict[str, Any]) -> tuple[float, float]:
        """Seconds to enqueue the forward and the backward."""
        start = time.perf_counter()
        out = self.compiled(**local)
        middle = time.perf_counter()
        out.backward(out.detach())
        return middle - start, time.perf_counter() - middle

    def repeat(self, count: int, prof: cProfile.Profile | None = None) -> Seconds:
        """Medians."""
        with self.sharding.shard(self.batch, lengths=self.lengths) as local:
            return medians(lambda: self.run(local), count, prof)


Seconds = tuple[float, float, float]
"""Of the host forward and backward, and of the GPU for both."""


def medians(run: Callable[[], tuple[float, float]], count: int, prof: cProfile.Profile | None = None) -> Seconds:
    """Medians of what `run` gives while the GPU sleeps, and of what the GPU then needs; of the slowest rank."""
    if not on_gpus():
        columns = zip(*((*x, sum(x)) for x in (run() for _ in range(2))), strict=True)
        forward, backward, both = (slowest(statistics.median(column)) for column in columns)
        return forward, backward, both
    times: list[tuple[float, float]] = []
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    with torch.autograd.set_multithreading_enabled(False):  # on this thread, where the profiler looks
        for start, stop in events:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(ASLEEP)
            start.record()
            if prof is not None:
                prof.enable()
            times.append(run())
            if prof is not None:
                prof.disable()
            stop.record()
        torch.cuda.synchronize()
    forward, backward = (slowest(statistics.median(column)) for column in zip(*times, strict=True))
    return forward, backward, slowest(statistics.median(a.elapsed_time(b) for a, b in events) / 1e3)


def enough_tokens(found: Sequence[tuple[int, float, float]]) -> str:
    """A line that says from where on the host is not the limit.

    Args:
        found: (tokens of a GPU, seconds a layer of the host, of the GPU), from few tokens to many.
    """
    if not found:
        return ""
    if found[0][1] <= found[0][2]:
        return f"the host is not the limit from {found[0][0]:,} tokens a GPU on, or from fewer"
    for (few, host, gpu), (many, more_host, more_gpu) in pairwise(found):
        before, behind = host - gpu, more_host - more_gpu
        if behind <= 0:
            tokens = few + (many - few) * before / (before - behind)
            return f"the host is not the limit from about {tokens:,.0f} tokens a GPU on"
    return f"the host is the limit up to {found[-1][0]:,} tokens a GPU, or more"


def kernel_alone(pack: Pack, setup: Setup) -> Seconds:
    """FlashAttention 4's own forward and backward over one GPU's share of a pack's rows."""
    rows = pack.tokens // setup.world_size
    ends = [end for end in itertools.accumulate(pack.lengths) if end < rows]
    cu_seqlens = torch.tensor([0, *ends, rows], dtype=torch.int32, device="cuda")
    longest = int(cu_seqlens.diff().max())
    heads = setup.heads, setup.heads_kv, setup.heads_kv
    q, k, v = (setup.draw(rows, count).requires_grad_() for count in heads)
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        out, *_ = attend(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True,
        )  # fmt: skip
        middle = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), out.detach())
        return middle - start, time.perf_counter() - middle

    medians(run, 5)
    return medians(run, 15)


def write_profiles(step: Step, folder: Path, name: str) -> None:
    """Functions by own time and by time with what they call; ops by time on the host; the GPU's kernels in order."""
    prof, text = cProfile.Profile(), io.StringIO()
    step.repeat(20, prof)
    stats = pstats.Stats(prof, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(60)
    (folder / f"functions_{name}.txt").write_text(text.getvalue())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step.repeat(4)
    (folder / f"ops_{name}.txt").write_text(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=60))
    (folder / f"kernels_{name}.txt").write_text(time_line(seen))


def time_line(seen: Any) -> str:
    """When each GPU kernel began, on which stream, and how long it ran, in µs."""
    kind = torch.autograd.DeviceType.CUDA
    events = [event for event in seen.profiler.kineto_results.events() if event.device_type() == kind]
    events.sort(key=lambda event: event.start_ns())
    first = events[0].start_ns() if events else 0
    rows = ["     start      took"]
    for event in events:
        start, took = (event.start_ns() - first) / 1e3, event.duration_ns() / 1e3
        rows.append(f"{start:10.1f} {took:9.1f} stream {event.device_resource_id():3d} {event.name()[:90]}")
    return "\n".join([*rows, ""])


def measured(steps: dict[int, Step], pack: Pack, repeats: int) -> tuple[Seconds, Seconds]:
    """Of one layer, and of a layer more."""
    for step in steps.values():
        step.take(pack)
        step.repeat(5)  # compiles, and then plans for what runs
    one, five = (steps[layers].repeat(repeats) for layers in (1, 5))
    forward, backward, gpu = ((b - a) / 4 for a, b in zip(one, five, strict=True))
    return one, (forward, backward, gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="web_mix 8K,one", help="packs whose name holds one of these texts")
    parser.add_argument("--sizes", default="2,4,8,16,32", help="K tokens a GPU of web_mix, for the last line")
    parser.add_argument("--profile", type=Path, help="a folder")
    setup, options = begin(parser, kernel="auto", tiny=True)
    k = 8 if options.tiny else 1024
    mesh = init_device_mesh(setup.device, (setup.world_size,), mesh_dim_names=("cp",))
    if setup.rank == 0:
        print(
            "| | forward, 1 layer, ms | backward | forward, per layer | backward | both | GPU, both |\n"
            "|---|---|---|---|---|---|---|"
        )
    steps = {layers: Step(layers, setup, mesh) for layers in (1, 5)}
    chosen = [pack for pack in packs(setup.world_size, k) if any(text in pack.name for text in options.only.split(","))]
    sizes = [int(size) for size in options.sizes.split(",") if size]
    mixes = [Pack(f"web_mix {size}K/GPU", draw("web_mix", size * k * setup.world_size, 176)) for size in sizes]
    crossing: list[tuple[int, float, float]] = []
    for number, pack in enumerate([*chosen, *mixes]):
        (f1, b1, _), (f, b, gpu) = measured(steps, pack, 15)
        if pack in mixes:
            crossing.append((pack.tokens // setup.world_size, f + b, gpu))
        if options.profile and pack in chosen:
            folder = options.profile if setup.rank == 0 else Path("/dev/shm")
            folder.mkdir(parents=True, exist_ok=True)
            write_profiles(steps[5], folder, f"{number}_{setup.heads}_{setup.heads_kv}")
        table = [(pack.name, (f1, b1, f, b, f + b, gpu))]
        if "fa4" in setup.kernel and pack in chosen:
            f1, b1, gpu = kernel_alone(pack, setup)
            table.append((f"{pack.name}, kernel alone", (f1, b1, f1, b1, f1 + b1, gpu)))
        for name, figures in table if setup.rank == 0 else ():
            print(f"| {name} | {' | '.join(f'{1e3 * x:.3f}' for x in figures)} |", flush=True)
    if setup.rank == 0:
        print(f"\n{enough_tokens(crossing)}")
    if on_gpus():
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
