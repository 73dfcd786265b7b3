"""Kernels that are compiled side by side, with a stand-in of Triton that notes in files what it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cp_rewrite.kernels.states.side_by_side import compile_side_by_side

_JIT = """
import pathlib, uuid

class JITFunction:
    def __init__(self, name):
        self.name = name

    def run(self, x, *, grid, warmup, **variant):
        done = f"{'compiled' if warmup else 'launched'} {self.name} {x} {variant}"
        (pathlib.Path(__file__).parent / uuid.uuid4().hex).write_text(done)
        if variant.get("block") == 4:
            raise RuntimeError("too large")
"""
_AUTOTUNER = """
class Config:
    def __init__(self, block):
        self.block = block

    def all_kwargs(self):
        return {"block": self.block}

class Autotuner:
    arg_names = ["x"]

    def __init__(self, fn, blocks):
        self.fn, self.configs = fn, [Config(block) for block in blocks]

    def prune_configs(self, kwargs):
        return [config for config in self.configs if config.block < 8 * self.nargs["x"]]

    def run(self, *args, **kwargs):
        raise AssertionError("tuned")
"""
_CALLS = """
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

def call(times):
    tuned, plain = Autotuner(JITFunction("tuned"), [1, 2, 4, 8]), JITFunction("plain")
    for _ in range(times):
        tuned.run(1, grid=(1,), warmup=False)
        plain.run(2, grid=(1,), warmup=False)
        plain.run(3, grid=(1,), warmup=False)
"""


@pytest.mark.parametrize("processes", [1, 3])
def test_each_variant_is_compiled_once_and_none_is_launched(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "triton" / "runtime"
    runtime.mkdir(parents=True)
    for folder in (tmp_path / "triton", runtime):
        (folder / "__init__.py").write_text("")
    for file, text in ((runtime / "jit.py", _JIT), (runtime / "autotuner.py", _AUTOTUNER)):
        file.write_text(text)
    (tmp_path / "calls_of_a_test.py").write_text(_CALLS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processes))
    compile_side_by_side("calls_of_a_test:call", 2)
    done = sorted(file.read_text() for file in runtime.iterdir() if file.is_file() and not file.suffix)
    tuned = [f"compiled tuned 1 {{'block': {block}}}" for block in (1, 2, 4)]
    assert done == ["compiled plain 2 {}", "compiled plain 3 {}", *tuned]
