"""Measuring what the cost model needs to know about a device and its links.

On one process: kernel and memory speed. Under `torchrun --nproc-per-node N -m cp_rewrite calibrate` also a link: inside
a node, or between nodes where torchrun spans several. What is not measured keeps the value of the known device that the
name tells. The kernel is the one that plain scaled_dot_product_attention picks: on Hopper cuDNN's, which is close to
the best variable-length kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from cp_rewrite.planning.cost.constants import BACKWARD_FLOPS
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.plan import plan
from cp_rewrite.sharding import speeds_of


def measure(name: str | None = None) -> Device | None:
    """The device of this process, measured; None on ranks other than 0. `name`: its name; None: what torch calls it."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        name = name or torch.cuda.get_device_name().lower().replace(" ", "-")
    known = replace(speeds_of(torch.device(kind)), name=name or kind)
    if kind == "cuda":
        known = replace(known, device_bytes=torch.cuda.get_device_properties().total_memory)
    device = _measure_device(known, kind)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        device = _measure_links(device, kind)
        return device if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _measure_device(device: Device, kind: str) -> Device:
    """The kernel, a copy and a launch."""
    tokens, heads, dim = (8192, 16, 128) if kind == "cuda" else (1024, 4, 64)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, tokens, dim, device=kind, dtype=dtype, requires_grad=True) for _ in range(3))
    flops = plan([tokens], 1).load.whole_tiles * Model((heads, heads), dim).tile_flops

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
        backward=BACKWARD_FLOPS * flops / backward,
        memory=2 * source.numel() / copy,
        launch=launch,
    )


def _measure_links(device: Device, kind: str) -> Device:
    """The link that limits collectives over all processes: their time at a large size less that at almost none."""
    size, ranks = 1 << (26 if kind == "cuda" else 22), dist.get_world_size()
    mine = torch.empty(size * ranks, dtype=torch.uint8, device=kind)
    everything = torch.empty_like(mine)
    after, before = (dist.get_rank() + 1) % ranks, (dist.get_rank() - 1) % ranks

    def gather(part: int) -> None:
        dist.all_gather_into_tensor(everything[: part * ranks], mine[:part])

    def exchange(part: int) -> None:
        dist.all_to_all_single(everything[: part * ranks], mine[: part * ranks])

    def shift(part: int) -> None:
        calls = [dist.P2POp(dist.isend, mine[:part], after), dist.P2POp(dist.irecv, everything[:part], before)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    few = _seconds(lambda: gather(64), kind, calls=20)
    gathered, exchanged, shifted = (
        max(_seconds(partial(call, size), kind, calls=10) - few, 1e-9) for call in (gather, exchange, shift)
    )
    speed = size * (ranks - 1) / gathered
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))) == ranks:
        others = {"all_to_all": size * (ranks - 1) / exchanged, "ring": size / shifted}
        return replace(device, link=speed, latency=few, **others)
    return replace(device, node_link=speed, node_latency=few)


def _seconds(call: Callable[[], object], kind: str, calls: int = 5) -> float:
    """Seconds of one call: the mean of a group of calls, of the best of three groups, after two calls to warm up."""
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
