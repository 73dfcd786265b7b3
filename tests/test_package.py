"""The package as installed: one copy of the passes, the CUDA sources; planning without torch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_passes_have_one_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "import this package as cp_rewrite.passes, not as passes" in done.stderr


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, types; p = types.ModuleType('cp_rewrite'); p.__path__ = ['cp_rewrite'];"
        "sys.modules['cp_rewrite'] = p; import cp_rewrite.masks;"
        "import pkgutil, importlib, cp_rewrite.planning as room;"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(room.__path__, 'cp_rewrite.planning.')];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_wheel_holds_passes_and_sources_inside_the_package(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for expected in (
        "cp_rewrite/passes/match/__init__.py",
        "cp_rewrite/csrc/sum_rows.cu",
        "cp_rewrite/ops/attention.py",
    ):
        assert expected in names
    assert not [name for name in names if name.startswith(("passes/", "csrc/", "tests/"))]
