"""A machine, looked at for what stands in the way, and measured for the cost model.

`examine` is `python -m cp_rewrite doctor`: problems come first, with what to do. `measure` is `python -m cp_rewrite
calibrate`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from cp_rewrite.agree.turns import version_of
from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.select import ORDER, PAIRS, AttentionSpec, DeviceFacts, device_facts, reasons
from cp_rewrite.planning.cost.constants import BACKWARD_FLOPS
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.plan import plan
from cp_rewrite.sharding import speeds_of

_PACKAGES = ("torch", "triton", "transformers", "trl", "flash-attn-4", "cuda-core", "matplotlib")
_SHARED_BYTES = 1 << 30
"""Least size of /dev/shm: NCCL takes some 10 MiB per pair of ranks there, workers of a DataLoader more."""


@dataclass(frozen=True)
class Finding:
    """One fact of the machine. `remedy`: what to do, where it is a problem; "" where it is none."""

    name: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name:14} {self.value}" + (f"\n{'':14} -> {self.remedy}" if self.remedy else "")


def examine() -> list[Finding]:
    """All findings of this machine, problems first."""
    found = [*_versions(), *_gpus(), *_kernels(), *_links(), *_limits()]
    return sorted(found, key=lambda finding: not finding.remedy)


def _versions() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for name in _PACKAGES:
        version = version_of(name)
        fits = name != "torch" or (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 16)
        yield Finding(name, version or "not installed", "" if fits else "use torch 2.11 to 2.15 (docs/versions.md)")


def _gpus() -> Iterator[Finding]:
    """GPUs, driver, nvcc. A machine without a GPU is no problem: dry runs, tests and small models run there."""
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield Finding("nvcc", (said("nvcc", "--version") or "not found: not needed").splitlines()[-1])
    if torch.cuda.is_available():
        count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
        yield Finding("GPUs", f"{count} × {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        yield Finding("driver", f"{(driver or 'unknown').splitlines()[0]}, CUDA {torch.version.cuda}")
        return
    remedy = ""
    if driver is not None:
        remedy = f"torch {torch.__version__} sees none: install a build of torch for CUDA, or a newer driver"
    yield Finding("GPUs", f"none that torch sees; driver {(driver or 'not found').splitlines()[0]}", remedy)


def _kernels() -> Iterator[Finding]:
    """The attention kernels, asked as a bf16 model with heads of 128 does; and those of this package."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    yield from kernel_findings(device_facts(device))
    against = cuda.reasons()
    yield Finding("row kernels", "; ".join(against) or "found", "pip install '.[cuda]'" if against and on_gpu else "")
    folder = cuda.cache_dir()
    if (error := why_not_writable(folder)) is None:
        yield Finding("kernel cache", f"{folder} can be written")
    else:
        yield Finding("kernel cache", f"{folder}: {error}", "set CP_REWRITE_CACHE to a folder that can be written")


def kernel_findings(facts: DeviceFacts) -> Iterator[Finding]:
    """The attention kernels that serve a GPU with these facts, or why not. On a GPU, slow ones alone are a problem."""
    spec = AttentionSpec(torch.bfloat16, 128, 128, heads=32, heads_kv=8)
    against = {name: reasons(name, spec, facts) for name in (*PAIRS, *ORDER)}
    fast = [name for name in (*PAIRS, *ORDER) if not against[name] and name not in ("aten_flash", "reference")]
    slow = facts.capability is not None and not fast
    remedy = "pip install '.[fa4]', for FlashAttention 4 (docs/reference/install.md)"
    for name, why in against.items():
        yield Finding(f"kernel {name}", "; ".join(why) or "can run", remedy if slow and name == "fa4" else "")


def _links() -> Iterator[Finding]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "not in this build of torch"
    yield Finding("NCCL", nccl)
    yield Finding("gloo", "found" if dist.is_gloo_available() else "not in this build of torch")
    count = torch.cuda.device_count()
    if count > 1:
        apart = [f"{i}-{j}" for i in range(count) for j in range(i) if not torch.cuda.can_device_access_peer(i, j)]
        remedy = "keys then travel by NCCL, before and after the kernel; ask for GPUs of one NVLink domain"
        value = f"no access between {', '.join(apart)}" if apart else "each GPU maps the memory of each other"
        yield Finding("peer access", value, remedy if apart else "")
        yield Finding("links", "\n" + (said("nvidia-smi", "topo", "-m") or "nvidia-smi not found"))


def _limits() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        remedy = "" if size >= _SHARED_BYTES else "give the container more: docker run --shm-size=16g, or --ipc=host"
        yield Finding("/dev/shm", f"{size / 2**30:.1f} GiB", remedy)
    yield Finding("CPUs", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")


def why_not_writable(folder: Path) -> str | None:
    """The reason why nothing can be written into a folder, which is made if it is not there; None: it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def said(*command: str) -> str | None:
    """A program's output; None where it is not there, fails, or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def measure(name: str | None = None) -> Device | None:
    """The device of this process, measured; None on ranks other than 0. `name`: its name; None: what torch calls it.

    On one process: kernel and memory speed. Under `torchrun --nproc-per-node N -m cp_rewrite calibrate` also a link:
    inside a node, or between nodes where torchrun spans several. What is not measured keeps the value of the known
    device that the name tells. The kernel is the one that plain scaled_dot_product_attention picks: on Hopper cuDNN's,
    which is close to the best variable-length kernels.
    """
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
