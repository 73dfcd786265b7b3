"""Attention kernels and the choice of one: an ordered list of backends, each of which says every reason why it can't
run.

    Tables, Params                  inputs of a kernel besides q, k and v: pieces, made once per batch and shared by all
                                    layers; and numbers
    ORDER, PAIRS                    the backends
    AttentionSpec, DeviceFacts      demands of an attention, and facts about a device
    Capabilities                    abilities beyond those that all kernels have
    choose_kernel                   the first backend that can, or the one that is named

Facts about the device are values, so choices for any GPU are made, and tested, on a machine without one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.planning.names import SIZES_ARE_BOUNDS, LaunchRow


@dataclass(frozen=True, eq=False)
class Tables:
    """The pieces of one rank as tensors. R local query rows, E expanded key rows.

    Launch 0 is described by `cu_seqlens_q` and `cu_seqlens_k`, which cover all R rows in order: rows of no document,
    and pieces of another launch, are entries with zero keys. Other launches run over their rows of `pieces`.

    Args:
        cu_seqlens_q: (N + 1,) int32 on the device, running sum of query rows per entry, from 0 to R.
        cu_seqlens_k: (N + 1,) int32 on the device, running sum of expanded key rows per entry, from 0 to at most E.
        pieces: (N', 7) int64 on the CPU, a `PieceRow` each. Those without a query or a key only fill it up.
        launches: (G, 4) int64 on the CPU, G >= 1, a `LaunchRow` each.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    pieces: Tensor
    launches: Tensor

    @property
    def first_launch(self) -> LaunchRow[int]:
        """The row of launch 0."""
        return LaunchRow(*self.launches[0].tolist())

    @property
    def sizes_are_bounds(self) -> bool:
        """The sizes in `launches` are bounds for all batches of a capacity: a launch made of them, captured in a CUDA
        graph, then serves other batches, and kernels must not look at `pieces`."""
        return len(self.launches) > 1 and LaunchRow(*self.launches[1].tolist()).max_q == SIZES_ARE_BOUNDS


@dataclass(frozen=True)
class Params:
    """Args: scale: softmax scale. softcap: logits become softcap * tanh(logits / softcap), 0.0 means none.
    deterministic: the backward must be bitwise repeatable. unrounded: the backward gives fp32 gradients of keys and
    values; only where `Capabilities.unrounded_gradients` says that the kernel can."""

    scale: float
    softcap: float = 0.0
    deterministic: bool = False
    unrounded: bool = False


ORDER = ("fa4", "fa3", "aten_flash", "reference")
"""Backends, best first: modules of this package with `reasons`, `forward` and `backward`, and with `capabilities`
where they have any. `reference` takes all."""
PAIRS: Mapping[str, frozenset[tuple[int, int]]] = {"fa3+fa4": frozenset({(9, 128)})}
"""The forward of one and the backward of another -> (generation of GPUs, head dim) where this was measured to be faster
than either, and `auto` takes it. Both hand on natural logarithms of sums, -inf where a row sees no key."""


@dataclass(frozen=True)
class AttentionSpec:
    """Demands of an attention on a kernel.

    Args:
        dtype: of q, k and v. head_dim: of q and k. head_dim_v: of v. heads, heads_kv: of q, and of k and v.
        causal: a side of the mask is the diagonal.
        needs_backward: gradients are wanted: forward and backward run on one backend.
        deterministic: the backward must be bitwise repeatable. softcap: of the logits, 0.0 for none.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    heads: int
    heads_kv: int
    causal: bool = True
    needs_backward: bool = True
    deterministic: bool = False
    softcap: float = 0.0

    def unless_half(self) -> list[str]:
        """A reason, unless the dtype is one that flash kernels take."""
        if self.dtype in (torch.bfloat16, torch.float16):
            return []
        return [f"bfloat16 and float16 only, got {str(self.dtype).removeprefix('torch.')}"]


@dataclass(frozen=True)
class DeviceFacts:
    """Args: capability: of the CUDA device, (9, 0) for Hopper; None without one. modules: which of the libraries that
    kernels need can be imported. features: what these were built with, or without (`fa3.features`)."""

    capability: tuple[int, int] | None
    modules: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    @property
    def major(self) -> int:
        return 0 if self.capability is None else self.capability[0]

    def missing(self, module: str, remedy: str) -> list[str]:
        """A reason, unless `module` can be imported."""
        return [] if module in self.modules else [f"{module} is not installed ({remedy})"]

    def unless_capability(self, majors: Container[int], name: str) -> list[str]:
        """A reason, unless the device is a CUDA GPU of one of these generations."""
        if self.capability is None:
            return ["needs a CUDA GPU"]
        if self.major in majors:
            return []
        return [f"needs {name}, this GPU has compute capability {self.capability[0]}.{self.capability[1]}"]


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a kernel beyond those that all have.

    Args:
        overlaps_exchange: rows can travel while it computes; see `flash/varlen.py`.
        unrounded_on: generations of GPUs (9 for Hopper) on which it hands out its fp32 sums of gradients of keys, where
            query heads share keys.
    """

    overlaps_exchange: bool = False
    unrounded_on: frozenset[int] = frozenset()

    def unrounded_gradients(self, q_RHD: Tensor, heads_kv: int) -> bool:
        """True if gradients of keys can be had before they are rounded (`Params.unrounded`, `BackwardOverlap.mxint15`).
        The same on all GPUs of one kind."""
        return q_RHD.shape[1] != heads_kv and device_facts(q_RHD.device).major in self.unrounded_on


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that runs, None when none can; and why each kernel that was asked can't, by name."""

    kernel: str | None
    rejected: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [f"{name}: {'; '.join(why)}" for name, why in self.rejected]
        return "\n".join([f"kernel {self.kernel}" if self.kernel else "no kernel", *lines])


def choose_kernel(spec: AttentionSpec, facts: DeviceFacts, kernel: str = "auto") -> KernelChoice:
    """The first backend or pair that can run `spec`, or the one named, which never falls back.

    Raises:
        ValueError: an unknown name.
    """
    if kernel != "auto" and kernel not in (*ORDER, *PAIRS):
        raise ValueError(f"kernel must be auto or one of {', '.join((*ORDER, *PAIRS))}; got {kernel!r}")
    here = facts.major, spec.head_dim
    faster = [pair for pair, measured in PAIRS.items() if here in measured]
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for name in (*faster, *ORDER) if kernel == "auto" else (kernel,):
        why = reasons(name, spec, facts)
        if not why:
            return KernelChoice(name, tuple(rejected))
        rejected.append((name, tuple(why)))
    return KernelChoice(None, tuple(rejected))


def reasons(name: str, spec: AttentionSpec, facts: DeviceFacts) -> list[str]:
    """Every reason why backend `name` can't run `spec`; empty: it can."""
    if name == "reference":
        return []
    forward, _, backward = name.partition("+")
    if not backward:
        return load(name).reasons(spec, facts)
    found = load(forward).reasons(replace(spec, needs_backward=False), facts)
    found += load(backward).reasons(spec, facts) if spec.needs_backward else []
    return found + (["a soft cap may differ between two libraries"] if spec.softcap else [])


@cache
def capabilities(name: str) -> Capabilities:
    """Abilities of backend `name` here beyond those that all have."""
    return getattr(load(name), "capabilities", Capabilities)()


@cache
def load(name: str) -> Any:
    """The module that implements a kernel, or the functions of a pair's; imported when asked for, so that schemas need
    none of its libraries."""
    if "+" in name:
        forward, backward = map(load, name.split("+"))
        ways = {"forward": forward.forward, "backward": backward.backward}
        return SimpleNamespace(**ways, capabilities=backward.capabilities)
    folder = "cp_rewrite.kernels" if name == "reference" else "cp_rewrite.kernels.flash"
    return importlib.import_module(f"{folder}.{name}")


_LIBRARIES = ("flash_attn.cute", "flash_attn_interface")


@cache
def device_facts(device: torch.device, libraries: tuple[str, ...] = _LIBRARIES) -> DeviceFacts:
    """The facts of this machine. libraries: those that are asked for, attention's unless others are named: to find a
    module imports the packages that it is in."""
    there = device.type == "cuda" and torch.cuda.is_available()  # not where tensors are fake
    capability = torch.cuda.get_device_capability(device) if there else None
    modules = frozenset(name for name in libraries if _importable(name))
    features = frozenset[str](load("fa3").features() if "flash_attn_interface" in modules else ())
    return DeviceFacts(capability, modules, features)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
