"""Look at a machine for what stands in the way: `python -m cp_rewrite doctor`. Problems come first, with what to do."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cp_rewrite.agree.turns import version_of
from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.select import ORDER, PAIRS, AttentionSpec, DeviceFacts, device_facts, reasons

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
    """Which attention kernels serve a GPU with these facts, or why not. On a GPU, slow ones alone are a problem."""
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
    """Why nothing can be written into a folder, which is made if it is not there; None: it can."""
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
