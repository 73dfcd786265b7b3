"""Measuring what the cost model needs to know about a device and its links.

On one process: kernel and memory speed. Under `torchrun --nproc-per-node N -m cp_rewrite calibrate` also the links of
a node; node_link keeps its default, or is measured when torchrun spans nodes. The kernel is the one that plain
scaled_dot_product_attention picks: on Hopper cuDNN, which is close to the best varlen kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from cp_rewrite.planning.devices import DEVICES, Device
from cp_rewrite.planning.tiles import TILE, window_tiles


def measure(name: str | None = None) -> Device | None:
    """The device of this process, measured; None on ranks other than 0."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    base = _nearest(kind)
    device = _measure_device(replace(base, name=name or _name(kind)), kind)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        device = _measure_links(device, kind)
        return device if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _name(kind: str) -> str:
    return torch.cuda.get_device_name().lower().replace(" ", "-") if kind == "cuda" else "cpu"


def _nearest(kind: str) -> Device:
    """The known device that stands in for what is not measured."""
    if kind == "cpu":
        return DEVICES["cpu"]
    name = _name(kind)
    return next((device for key, device in DEVICES.items() if key in name), DEVICES["h100"])


def _measure_device(device: Device, kind: str) -> Device:
    tokens, heads, dim = (8192, 16, 128) if kind == "cuda" else (1024, 4, 64)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, tokens, dim, device=kind, dtype=dtype, requires_grad=True) for _ in range(3))
    rows = np.array([tokens])
    flops = float(window_tiles(rows, rows, -np.ones_like(rows), 0 * rows)[0]) * 4.0 * TILE * TILE * dim * heads

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = attention()
    grad = torch.ones_like(out)

    def both() -> None:
        torch.autograd.grad(attention(), (q, k, v), grad)

    forward = _seconds(attention, kind)
    backward = max(_seconds(both, kind) - forward, 0.1 * forward)
    source = torch.empty(1 << (28 if kind == "cuda" else 24), dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), kind)
    tiny = torch.zeros(2, device=kind)
    launch = _seconds(lambda: tiny.add_(1), kind, calls=200)
    return replace(
        device,
        forward=flops / forward,
        backward=2.5 * flops / backward,
        memory=2 * source.numel() / copy,
        launch=launch,
    )


def _measure_links(device: Device, kind: str) -> Device:
    size, ranks = 1 << (26 if kind == "cuda" else 22), dist.get_world_size()
    mine = torch.empty(size, dtype=torch.uint8, device=kind)
    everything = torch.empty(size * ranks, dtype=torch.uint8, device=kind)
    large = _seconds(lambda: dist.all_gather_into_tensor(everything, mine), kind, calls=10)
    few = _seconds(lambda: dist.all_gather_into_tensor(everything[: 64 * ranks], mine[:64]), kind, calls=20)
    speed = size * (ranks - 1) / max(large - few, 1e-9)
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))) == ranks:
        return replace(device, link=speed, latency=few)
    return replace(device, node_link=speed, node_latency=few)


def _seconds(call: Callable[[], object], kind: str, calls: int = 5) -> float:
    """Median-like time of one call: the best of three groups of calls, after a warm-up."""
    call()
    call()
    best = float("inf")
    for _ in range(3):
        _wait(kind)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(kind)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
