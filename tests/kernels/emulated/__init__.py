"""CUDA kernels compiled for the CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("g++") or shutil.which("c++")
HERE = Path(__file__).parent


def compile_cpp(*arguments: str | Path) -> None:
    assert COMPILER is not None
    flags = ("-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", f"-I{HERE}")
    done = subprocess.run([COMPILER, *flags, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
