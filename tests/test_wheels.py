"""Packages that pip takes for the extras of GPUs, as docs/reference/install.md says it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECONDS = 120


def resolved(extras: str) -> dict[str, str]:
    """Package -> version that `pip install '.[extras]'` would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    try:
        done = subprocess.run([*command, f"{ROOT}[{extras}]"], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"no index of packages answered within {SECONDS} s")
    if "Retrying" in done.stderr or "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("no index of packages is reachable")
    assert done.returncode == 0, done.stderr
    found = (package["metadata"] for package in json.loads(done.stdout)["install"])
    return {package["name"].lower().replace("_", "-"): package["version"] for package in found}


@pytest.mark.slow
@pytest.mark.parametrize("extras", ["fa4", "fa4,qla"])
def test_extras_of_gpus_resolve_to_what_the_page_says(extras: str) -> None:
    found, page = resolved(extras), (ROOT / "docs" / "reference" / "install.md").read_text()
    names = ["flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "apache-tvm-ffi"]
    names += ["flash-qla", "tilelang"] if "qla" in extras else []
    assert not {*names} - {*found}
    assert "nvidia-cutlass-dsl-libs-cu13" not in found
    assert [int(part) for part in found["torch"].split(".")[:2]] >= [2, 11]
    assert ("flash-qla" in found) == ("qla" in extras) == (found["apache-tvm-ffi"] == "0.1.12")
    assert all(f"`{name}`" in page for name in names)
