"""Which kernels gave what the reference gives: a trial, and Triton's tuning inside of it, takes minutes.

What was right is kept in Triton's cache, beside what tuning chose: later processes run the same kernels, and try none.
What was wrong is tried again. Processes of one machine try one after another, so that only the first one tunes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]
_COMPILER = ("TRITON_", "FLA_", "LLVM_", "MLIR_", "NVPTX_", "DISABLE_", "TILELANG_", "TL_")
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
    """The verdict of a trial with these facts, if there was one. Inside, processes that ask for the same wait."""
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
    sources = [*_ROOT.glob("kernels/states/*.py"), *_ROOT.glob("ops/states/*.py")]
    ours = hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(sources))).hexdigest()
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_COMPILER))
    triton = import_module("triton").__version__
    libraries = [_version(name) for name in ("fla-core", "flash-qla", "tilelang")]
    return [torch.__version__, triton, *libraries, ours, settings]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
