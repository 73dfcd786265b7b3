"""The choice of kernels for a recurrence on GPUs: those of FlashQLA and of fla (flash-linear-attention), in half
precision, and for selective scans ours.

    Verdict, verdict_of    which of them gave what the reference gives
    Runs                   packed sequences as they take them: all rows, run after run, see `planning/states.py`
    CLASSES, kernels_for   those that can run a recurrence, best first
    reasons                why one can't

Shapes: R rows, E runs, C chunks, N cut pieces.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels.cuda import DTYPES
from cp_rewrite.kernels.select import DeviceFacts, device_facts

from .settings import tune_among_best

_ROOT = Path(__file__).parents[2]
_COMPILER = ("TRITON_", "FLA_", "LLVM_", "MLIR_", "NVPTX_", "DISABLE_", "TILELANG_", "TL_", "CP_REWRITE_TUNE")
"""Environment variables that begin so may change what is compiled."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of an earlier trial. folder: where it is kept; None: nowhere."""

    folder: Path | None

    @property
    def right(self) -> bool:
        return self.folder is not None and (self.folder / "right").exists()

    def keep(self) -> None:
        """The kernels are right."""
        if self.folder is not None:
            (self.folder / "right").touch()


@contextmanager
def verdict_of(*facts: object) -> Generator[Verdict]:
    """The verdict of a trial with these facts, if there was one. Inside, processes that ask for the same wait.

    A trial, and Triton's tuning inside of it, takes minutes. What was right is kept in Triton's cache, beside what
    tuning chose: later processes run the same kernels, and try none. What was wrong is tried again. Processes of one
    machine try one after another, so that only the first one tunes.
    """
    folder = _folder(facts)
    with ExitStack() as stack:
        if folder is not None:
            try:
                fcntl.flock(stack.enter_context((folder / "lock").open("w")), fcntl.LOCK_EX)
            except OSError:  # two could tune at once, and choose differently
                folder = None
        yield Verdict(folder)


def _folder(facts: tuple[object, ...]) -> Path | None:
    """None where Triton keeps no choices, or nobody knows which versions run."""
    try:
        if not import_module("fla.utils").autotune_cache_kwargs.get("cache_results"):
            return None
        digest = hashlib.sha256(repr((*facts, *_versions())).encode()).hexdigest()
        return Path(import_module("triton.runtime.cache").get_cache_manager(digest).cache_dir)
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None


def _versions() -> list[object]:
    places = "kernels/states/*.py", "ops/states/*.py", "csrc/*.cuh", "csrc/selective_*.cu"
    sources = [file for place in places for file in _ROOT.glob(place)]
    ours = hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(sources))).hexdigest()
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_COMPILER))
    triton = import_module("triton").__version__
    names = "fla-core", "flash-qla", "tilelang", "cuda-core", "nvidia-cuda-nvrtc"
    libraries = [_version(name) for name in names]
    return [torch.__version__, triton, *libraries, ours, settings]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


CHUNK = 64
"""Rows of a chunk: `chunk_size` of fla."""
_FEW = 4
"""Runs that are passed through one by one."""


@dataclass(frozen=True)
class Runs:
    """The runs of R rows.

    Args:
        offsets: (E + 1,) int32. chunks: (C, 2) int32, run of each chunk and its number in the run.
        entered, left: (run, cut piece) of runs whose pieces are cut at their start, and at their end.
        bounds: (first row, row behind the last) of each run. gaps: of those that are no piece, none empty.
        states: (E,) int32, the cut piece of each run, N for none.
        spans: the first chunk of each run, and C.
    """

    offsets: Tensor
    chunks: Tensor
    entered: list[tuple[int, int]]
    left: list[tuple[int, int]]
    bounds: list[tuple[int, int]]
    gaps: list[tuple[int, int]]
    states: Tensor
    spans: list[int]

    @staticmethod
    def of_tables(runs: Tensor, offsets: Tensor, chunks: Tensor, states: Tensor) -> Runs:
        """Runs by the tables of a plan. runs: on the host."""
        table: list[list[int]] = runs.tolist()
        bounds = [(first, stop) for first, stop, *_ in table]
        spans = [0, *accumulate(-(-(stop - first) // CHUNK) for first, stop in bounds)]
        entered, left = ([(i, row[at]) for i, row in enumerate(table) if row[at] >= 0] for at in (2, 3))
        gaps = [(first, stop) for first, stop, piece, _ in table if piece == -2 and first < stop]
        return Runs(offsets, chunks[: spans[-1]], entered, left, bounds, gaps, states, spans)

    @property
    def cut_at_ends(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """`left`, in two: of sequences' first pieces, and of those that a state enters too."""
        entered = {run for run, _ in self.entered}
        first, middle = ([item for item in self.left if (item[0] in entered) is late] for late in (False, True))
        return first, middle

    @property
    def packed(self) -> dict[str, Any]:
        """Arguments of nearly all functions of fla."""
        return self.solved | {"chunk_size": CHUNK}

    @property
    def solved(self) -> dict[str, Any]:
        """Arguments of functions that see the size of chunks in what was solved in them."""
        return {"cu_seqlens": self.offsets, "chunk_indices": self.chunks}

    def alone(self, run: int) -> dict[str, Any]:
        """`packed` of one run, and where its first chunk is among its own."""
        first, stop = self.span(run)
        none = self.offsets.new_zeros(2)
        return {
            "cu_seqlens": self.offsets[run : run + 2], "chunk_indices": self.chunks[first:stop], "chunk_offsets": none,
            "chunk_size": CHUNK,
        }  # fmt: skip

    def apart(self, runs: Sequence[int]) -> Tensor:
        """Offsets by which every other sequence is one of `runs`, given in ascending order: the last comes first, so
        that those between end before they start, and are of no length."""
        return self.numbers([bound for run in reversed(runs) for bound in self.bounds[run]])

    def numbers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """The values on the device of the rows, int32, without waiting for it."""
        cuda = self.offsets.is_cuda
        return torch.tensor(values, dtype=torch.int32, pin_memory=cuda).to(self.offsets.device, non_blocking=True)

    def span(self, run: int) -> tuple[int, int]:
        """The first chunk of a run, and the one behind its last."""
        return self.spans[run], self.spans[run + 1]

    def all_at_once(self, cut: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
        """True if a pass over all runs tells sooner what `cut` ones do than passes over these: they are many; or they
        are most of the rows, and it is the only pass, since no state enters or leaves `others`."""
        rows = sum(self.bounds[run][1] - self.bounds[run][0] for run, _ in cut)
        return len(cut) > _FEW or (not others and 2 * rows > self.bounds[-1][1])

    def states_of(self, cut: Tensor, which: list[tuple[int, int]]) -> Tensor | None:
        """(E, *state) of all runs, of those (N, *state) of cut pieces; None where all are 0."""
        if not which:
            return None
        return torch.cat([cut, cut.new_zeros(1, *cut.shape[1:])]).index_select(0, self.states)

    def clean(self, x: Tensor) -> Tensor:
        """x (1, R, …) with 0 in rows of no piece."""
        return self.without_gaps(x.clone()) if self.gaps else x

    def without_gaps(self, x: Tensor) -> Tensor:
        """x (1, R, …), in place, 0 in rows of no piece."""
        for start, stop in self.gaps:
            x[:, start:stop] = 0
        return x


_LIBRARIES = ("fla.ops.cp", "flash_qla", "cuda.core")
_FUSED = "fused.Fused"
OURS = "selective.Selective"
"""Of these classes the one whose kernels stand in `csrc/`: nothing tunes them, and NVRTC compiles them in seconds."""
CLASSES = {
    "gated_delta_rule": (_FUSED, "delta.Delta"), "kimi_delta": ("delta.Kimi",), "ssd": ("ssd.Ssd",),
    "selective_scan": (OURS,),
}  # fmt: skip
"""Recurrence that has kernels -> the classes of this package that call them, best first."""
SOLVED = {"gated_delta_rule": 1, "kimi_delta": 2}
"""How many tensors (B, T_l, H, 64) the forward of such a class solves and the backward reads, of those with any."""
_LONG, _MANY = 256, 32
"""Rows of a run, in the mean, and runs times heads from which on `_FUSED` is chosen: it makes three states of each run
and head, in fp32, and gives each pair one multiprocessor (on an H200, at 8 heads a row in one run was 0.8 times as
fast as by fla, in two runs 1.0, 16 heads in one 1.2)."""


def runs_by_kernels(kind: str, inputs: Sequence[Tensor], there: DeviceFacts | None = None) -> bool:
    """True if a recurrence of these inputs has kernels here, or has them, in half precision, on another machine."""
    return bool(_able(kind, inputs, there))


def kernels_for(kind: str, inputs: Sequence[Tensor], runs: int) -> list[str]:
    """The `CLASSES` that can run a recurrence of these inputs. runs: sequences that their rows are in."""
    found = _able(kind, inputs)
    if _FUSED in found:
        (rows, tokens), heads = inputs[0].shape[:2], inputs[2].shape[2]
        if rows * tokens < _LONG * runs or heads * runs < _MANY:
            found.remove(_FUSED)
    return found


def _able(kind: str, inputs: Sequence[Tensor], there: DeviceFacts | None = None) -> list[str]:
    channels, values = (3, 0) if kind in ("ssd", "selective_scan") else (1, 2)
    dims = inputs[channels].shape[-1], inputs[values].shape[-1]
    facts = device_facts(inputs[0].device, _LIBRARIES) if there is None else there
    dtype = inputs[0].dtype if there is None else torch.bfloat16
    return [name for name in CLASSES.get(kind, ()) if not reasons(name, dtype, *dims, facts)]


def reasons(name: str, dtype: torch.dtype, channels: int, values: int, facts: DeviceFacts) -> list[str]:
    """Every reason why a class of `CLASSES` can't run; empty: it can. channels, values: the dims of a state."""
    found: list[str] = []
    if name == OURS:
        if dtype not in DTYPES:
            found.append(f"bfloat16, float16 and float32 only, got {str(dtype).removeprefix('torch.')}")
        if channels > 64:
            found.append(f"at most 64 numbers of a state for each channel, got {channels}")
        if facts.major < 8:
            found.append("needs a CUDA GPU of compute capability 8.0 or newer")
        return found + facts.missing("cuda.core", "pip install 'cp_rewrite[cuda]'")
    if dtype not in (torch.bfloat16, torch.float16):
        found.append(f"bfloat16 and float16 only, got {str(dtype).removeprefix('torch.')}")
    found += facts.missing("fla.ops.cp", "pip install fla-core")
    if name == _FUSED:
        if (channels, values) != (128, 128):
            found.append(f"head dims of 128 only, got {channels} and {values}")
        return found + facts.unless_capability((9,), "Hopper") + facts.missing("flash_qla", "pip install flash-qla")
    if channels > 256:
        found.append(f"at most 256 channels of keys, got {channels}")
    if facts.major < 8:
        found.append("needs a CUDA GPU of compute capability 8.0 or newer")
    return found


@cache
def load(name: str) -> Any:
    """A class of `CLASSES`, imported when asked for, with its libraries."""
    module, _, of_it = name.partition(".")
    found = getattr(importlib.import_module(f"cp_rewrite.kernels.states.{module}"), of_it)
    if name != OURS and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        tune_among_best()
    return found
