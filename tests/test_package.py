"""The package as installed: one copy of the passes, the CUDA sources; planning without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
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


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("--version", {"torch", "numpy", "cp_rewrite.planning.plan"}),
        ("plan --lengths 500,300,224 --world-size 2", {"torch"}),
    ],
)
def test_the_command_line_answers_without_what_is_slow_to_import(words: str, left_out: set[str]) -> None:
    code = (
        "import runpy, sys; sys.argv[1:] = sys.argv[1].split()\n"
        "try: runpy.run_module('cp_rewrite', run_name='__main__')\n"
        f"finally: assert not {left_out} & {{*sys.modules}}"
    )
    subprocess.run([sys.executable, "-c", code, words], cwd=ROOT, check=True)


def test_public_names_are_there_once_one_is_asked_for() -> None:
    """Whatever was imported before; a name that there is not is an error that names it."""
    code = (
        "import cp_rewrite.entry, cp_rewrite as cp; assert callable(cp.backend); assert {*cp.__all__} <= {*vars(cp)}\n"
        "try: cp.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_wheel_holds_passes_and_sources_and_runs_where_it_is_installed(tmp_path: Path) -> None:
    """Built from the source distribution, as an index gets both, and installed beside what it depends on."""
    subprocess.run([sys.executable, "-m", "build", "-q", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert [*tmp_path.glob("*.tar.gz")]
    names = zipfile.ZipFile(wheel).namelist()
    for expected in ("passes/match/__init__.py", "csrc/sum_rows.cu", "ops/attention.py", "py.typed"):
        assert f"cp_rewrite/{expected}" in names
    assert not [name for name in names if name.startswith(("passes/", "csrc/", "tests/"))]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*command: str | Path) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=elsewhere, capture_output=True, text=True, check=True
        ).stdout.strip()

    said(tmp_path / "env/bin/pip", "install", "-q", "--no-deps", "--no-index", wheel)
    assert "balanced" in said(tmp_path / "env/bin/cp_rewrite", *"plan --lengths 500,300,224 --world-size 2".split())
    file = said(tmp_path / "env/bin/python", "-c", "import cp_rewrite; print(cp_rewrite.__file__)")
    assert Path(file).is_relative_to(packages)
