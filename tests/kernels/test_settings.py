"""Settings among which Triton tunes kernels of fla, with stand-ins of Triton's classes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cp_rewrite.kernels.states.settings import BEST, Setting, best_of, tune_among_best


class Interface:
    """`KernelInterface`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


class Tuner(Interface):
    """`Autotuner`."""

    early_config_prune: Any = None

    @property
    def base_fn(self) -> Any:
        return self.fn


def config(setting: Setting) -> SimpleNamespace:
    constants, warps, stages = setting
    return SimpleNamespace(kwargs=dict(constants), num_warps=warps, num_stages=stages)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tuner]:
    """Kernels of two packages of fla with the same name, and one that no setting is known of."""
    name = "recompute_w_u_fwd_kernel"
    found = dict[str, Tuner]()
    for package, kernel in (("gated_delta_rule", name), ("delta_rule", name), ("common", "another_kernel")):
        module = ModuleType(f"fla.ops.{package}.wy_fast")
        found[package] = Tuner(SimpleNamespace(__name__=kernel, __module__=module.__name__))
        vars(module)[kernel] = Interface(found[package])
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module, given in (("jit", {"KernelInterface": Interface}), ("autotuner", {"Autotuner": Tuner})):
        monkeypatch.setitem(sys.modules, f"triton.runtime.{module}", SimpleNamespace(**given))
    monkeypatch.delenv("CP_REWRITE_TUNE_ALL", raising=False)
    return found


def test_kernels_are_tuned_among_known_settings(kernels: dict[str, Tuner]) -> None:
    """Also when fla leaves out some by itself, and when they are asked for twice; all where heads are wider, and where
    fla has none of the known ones."""
    best = BEST["recompute_w_u_fwd_kernel"]
    others: list[Setting] = [((), 1, 1), ((), 2, 2)]
    tuner = kernels["gated_delta_rule"]
    tuner.early_config_prune = lambda configs, given, **_: [c for c in configs if c.num_warps != 1]
    tune_among_best()
    tune_among_best()
    variants = [config(setting) for setting in (*others, *best)]
    narrow, wide = ({"K": 128, "V": width} for width in (128, 256))
    assert tuner.early_config_prune(variants, {"q": None}, **narrow) == variants[2:]
    assert tuner.early_config_prune(variants, {"q": None}, **wide) == variants[1:]
    assert tuner.early_config_prune(variants[:2], narrow) == variants[1:2]
    assert kernels["delta_rule"].early_config_prune is None
    assert kernels["common"].early_config_prune is None


def test_all_variants_are_tuned_where_that_is_asked_for(
    kernels: dict[str, Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CP_REWRITE_TUNE_ALL", "1")
    tune_among_best()
    assert kernels["gated_delta_rule"].early_config_prune is None


def test_the_fewest_settings_are_kept_that_serve_all_arguments(tmp_path: Path) -> None:
    """Variants a and b are fastest once each, and c is near both; d alone serves the second kernel's arguments."""
    a, b, c, d = (((("BV", width),), 4, 2) for width in (16, 32, 64, 128))
    times = {"both": [{a: 1.0, b: 2.0, c: 1.02}, {a: 2.0, b: 1.0, c: 1.01}], "one": [{a: 9.0, d: 1.0, c: float("inf")}]}
    for name, calls in times.items():
        for i, call in enumerate(calls):
            folder = tmp_path / f"{name}{i}"
            folder.mkdir()
            timings = [[vars(config(setting)) | {"maxnreg": None}, [took, 0.0, 0.0]] for setting, took in call.items()]
            (folder / f"{name}.autotune.json").write_text(json.dumps({"key": [i], "configs_timings": timings}))
    assert best_of([tmp_path]) == {"both": (c,), "one": (d,)}
