"""Pages of README and docs/ as a reader follows them: blocks from top to bottom, in one folder and one namespace.

A block in its fence says what it needs beyond a CPU and what is installed here, `title="needs GPUs"`, and is then left
out. A block behind "Put this into `FILE`" is written there. Lines of shell that install, clone or make are checked, the
others run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r'^```(python|sh)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """`needs`: why it is left out here, or ''. `file`: where the reader is told to put it, or ''."""

    language: str
    code: str
    needs: str = ""
    file: str = ""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: str) -> list[Block]:
    text, found = (ROOT / page).read_text(), list[Block]()
    for fence in _FENCE.finditer(text):
        told = re.search(r"Put this into `([\w.]+)`", text[: fence.start()].rstrip().rpartition("\n\n")[2])
        found.append(Block(fence[1], fence[3], fence[2] or "", told[1] if told else ""))
    return found


def follow(page: str, folder: Path, names: dict[str, Any], languages: Sequence[str] = ("python", "sh")) -> list[str]:
    """Run a page's blocks in a folder; what its lines of shell printed. `names`: what its Python begins with, and after
    it has."""
    said: list[str] = []
    for block in blocks_of(page):
        if block.needs or block.language not in languages:
            continue
        if block.file:
            (folder / block.file).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, page, "exec"), names)
        else:
            printed = [run_line(line.partition(" #")[0], folder) for line in block.code.splitlines()]
            said += [text for text in printed if text]
    return said


def run_line(line: str, folder: Path) -> str:
    """Output of a line of shell; '' where it installs or makes."""
    if re.match(r"git clone|(\S*python3? -m venv|\S*pip install)|make ", line):
        check_setup(line)
        return ""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    programs = Path(sys.executable).parent
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "PET_STANDALONE": "1",  # torchrun's: a port of its own, as several may run here
    }  # fmt: skip
    command = line.replace(".venv/bin/", "")
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
    return done.stdout


def check_setup(line: str) -> None:
    """Assert that the extras and the targets of make that a line names are there."""
    project, makefile = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    for extras in re.findall(r"\.\[([\w,]+)\]", line):
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(",")), line
    for target in re.findall(r"make (\S+)", line):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
