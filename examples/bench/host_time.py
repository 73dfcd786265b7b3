"""Where the host's time goes: compiled attention layers over a packed row, forward and backward, and what the GPU does.

    torchrun --nproc-per-node 2 examples/bench/host_time.py [--profile FOLDER] [--heads 32 --heads-kv 32]

The time until a step's forward, and its backward, have been enqueued, while the GPU sleeps: medians of the slowest
rank. Per layer is what four layers more take. "kernel alone": FlashAttention 4's public function over one GPU's rows,
forward and backward, without a compiler and without an exchange: what the library itself takes. `--profile` writes what
functions and ops took, and when each GPU kernel ran.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention import begin, ends_all_ranks, slowest
from methods import Setup
from packs import Pack, packs
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

    def __init__(self, layers: int, lengths: tuple[int, ...], setup: Setup, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)  # the same on all ranks
        model = Attention(layers, setup.heads, setup.heads_kv, setup.dim).to("cuda", setup.dtype)
        names, kernel = {"x": 1, "doc_ids": 1}, cast("cp.sharding.Kernel", setup.kernel)
        self.sharding = cp.Sharding(mesh, names, cp.DocumentIds("doc_ids"), kernel=kernel)
        self.compiled: Any = torch.compile(model, backend=cp.backend(self.sharding), fullgraph=True)
        doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].cuda()
        self.batch = {"x": setup.draw(sum(lengths), setup.heads).flatten(1)[None], "doc_ids": doc_ids}
        self.lengths = lengths

    def run(self, local: dict[str, Any]) -> tuple[float, float]:
        """Seconds to enqueue the forward and the backward."""
        start = time.perf_counter()
        out = self.compiled(**local)
        middle = time.perf_counter()
        out.backward(out.detach())
        return middle - start, time.perf_counter() - middle

    def repeat(self, count: int, prof: cProfile.Profile | None = None) -> tuple[float, float]:
        """Medians."""
        with self.sharding.shard(self.batch, lengths=self.lengths) as local:
            return medians(lambda: self.run(local), count, prof)


def medians(
    run: Callable[[], tuple[float, float]], count: int, prof: cProfile.Profile | None = None
) -> tuple[float, float]:
    """(forward, backward): medians of what `run` gives while the GPU sleeps; slowest rank."""
    times: list[tuple[float, float]] = []
    with torch.autograd.set_multithreading_enabled(False):  # on this thread, where the profiler looks
        for _ in range(count):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(ASLEEP)
            if prof is not None:
                prof.enable()
            times.append(run())
            if prof is not None:
                prof.disable()
        torch.cuda.synchronize()
    forward, backward = (slowest(statistics.median(column)) for column in zip(*times, strict=True))
    return forward, backward


def kernel_alone(pack: Pack, setup: Setup) -> tuple[float, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="web_mix 8K,one", help="packs whose name holds one of these texts")
    parser.add_argument("--profile", type=Path, help="a folder")
    setup, options = begin(parser)
    mesh = init_device_mesh("cuda", (setup.world_size,), mesh_dim_names=("cp",))
    if setup.rank == 0:
        print("| | forward, 1 layer, ms | backward | forward, per layer | backward | both |\n|---|---|---|---|---|---|")
    for number, pack in enumerate(packs(setup.world_size)):
        if not any(text in pack.name for text in options.only.split(",")):
            continue
        found: list[tuple[float, float]] = []
        for layers in (1, 5):
            torch._dynamo.reset()
            step = Step(layers, pack.lengths, setup, mesh)
            step.repeat(5)
            found.append(step.repeat(15))
            if options.profile and setup.rank == 0:
                options.profile.mkdir(parents=True, exist_ok=True)
            if options.profile and layers == 5:
                folder = options.profile if setup.rank == 0 else Path("/dev/shm")
                write_profiles(step, folder, f"{number}_{setup.heads}_{setup.heads_kv}")
        (f1, b1), (f5, b5) = found
        table = [(pack.name, (f1, b1, (f5 - f1) / 4, (b5 - b1) / 4, (f5 + b5 - f1 - b1) / 4))]
        if setup.kernel == "fa4":
            f1, b1 = kernel_alone(pack, setup)
            table.append((f"{pack.name}, kernel alone", (f1, b1, f1, b1, f1 + b1)))
        for name, figures in table if setup.rank == 0 else ():
            print(f"| {name} | {' | '.join(f'{1e3 * x:.3f}' for x in figures)} |", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ends_all_ranks(main)
