"""Bandwidth of the row kernels, beside a device-to-device copy of the same payload measured in the same run.

python examples/bench/rows.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import rows
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.intervals import sum_lists
from cp_rewrite.planning.layouts.by_name import lay_out

SETS = 4
"""Payloads take turns, so that no run finds its data in the L2 cache."""


def milliseconds(run: Callable[[int], object], repeats: int = 40) -> float:
    """Median device time of `run(i)`, i counting up."""
    for i in range(SETS):
        run(i)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    # The host stays ahead of the device: launches cost nothing inside the events.
    torch.cuda._sleep(20_000_000)
    for i, (start, stop) in enumerate(events):
        start.record()
        run(i)
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def row_set(count: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(count, columns, device="cuda").to(dtype) for _ in range(SETS)]


def copy_rate(count: int, columns: int, dtype: torch.dtype) -> float:
    """GB/s, read plus written."""
    src, dst = row_set(count, columns, dtype), row_set(count, columns, dtype)
    time = milliseconds(lambda i: dst[i % SETS].copy_(src[i % SETS]))
    return 2 * src[0].nbytes / time / 1e6


def gather_rate(src: list[Tensor], index: Tensor) -> float:
    time = milliseconds(lambda i: rows.gather_rows(src[i % SETS], index))
    return (2 * index.numel() * src[0][0].nbytes + index.nbytes) / time / 1e6


def sum_rate(x: list[Tensor], owners: Tensor) -> float:
    """Row `i` is part of sum `owners[i]`."""
    size = int(owners.max()) + 1
    ptr, lists = (torch.from_numpy(each).int().cuda() for each in sum_lists(owners.cpu().numpy(), size))
    time = milliseconds(lambda i: rows.sum_rows(x[i % SETS], ptr, lists))
    written = size * x[0].shape[1] * 4
    return (x[0].nbytes + written + ptr.nbytes + lists.nbytes) / time / 1e6


def runs(count: int, length: int) -> Tensor:
    """A permutation of rows that keeps runs of `length` together, as pieces of documents do."""
    order = torch.randperm(count // length)
    return (order[:, None] * length + torch.arange(length)).reshape(-1).int().cuda()


def report(name: str, rate: float, copy: float) -> None:
    print(f"| {name} | {rate:.0f} | {copy:.0f} | {100 * rate / copy:.1f} % |", flush=True)


def table() -> None:
    print("| kernel, payload | GB/s | copy GB/s | of copy |\n|---|---|---|---|")
    bf16 = torch.bfloat16
    for count, columns in ((16384, 2048), (65536, 2048), (65536, 1024), (131072, 512)):
        src, copy = row_set(count, columns, bf16), copy_rate(count, columns, bf16)
        size = f"{count} rows x {2 * columns} B ({src[0].nbytes >> 20} MB)"
        report(f"gather, runs of 128, {size}", gather_rate(src, runs(count, 128)), copy)
        report(f"gather, any order, {size}", gather_rate(src, runs(count, 1)), copy)
        report(f"sum of 2 into fp32, {size}", sum_rate(src, runs(count, 1) // 2), copy)
    # TransformerEngine's published case: 16 documents of 4096 gathered into their order, 16 heads x 64.
    src, copy = row_set(65536, 1024, bf16), copy_rate(65536, 1024, bf16)
    for cp in (2, 4, 8):
        order = lay_out(Documents.from_lengths([4096] * 16), cp, "dual_chunk", PackedMask())
        tokens = np.concatenate([order.local_indices(rank) for rank in range(cp)])
        slots = torch.from_numpy(np.argsort(tokens)).int().cuda()
        report(f"dual_chunk reorder, cp {cp}, 16 x 4096 x 16 x 64", gather_rate(src, slots), copy)
    merge_table()


def merge_table() -> None:
    for steps in (2, 4):
        shape = steps, 8192, 32, 128
        outs = [torch.randn(shape, device="cuda") for _ in range(SETS)]
        lses = [torch.randn(steps, 32, 8192, device="cuda") for _ in range(SETS)]
        time = milliseconds(lambda i, o=outs, x=lses: rows.merge_steps(o[i % SETS], x[i % SETS]))
        moved = outs[0].nbytes * (1 + 1 / steps) + lses[0].nbytes * (1 + 1 / steps)
        copy = copy_rate(steps * 8192, 4096, torch.float32)
        report(f"merge of {steps} steps, float32, 8192 x 32 x 128", moved / time / 1e6, copy)


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    table()
