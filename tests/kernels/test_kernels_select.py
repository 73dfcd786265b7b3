"""Every reason why a kernel can't run is given, for any GPU, on a machine without one."""

from __future__ import annotations

import dataclasses
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from cp_rewrite.kernels import select
from cp_rewrite.kernels.flash import fa3, fa4_internals
from cp_rewrite.kernels.select import (
    ORDER,
    AttentionSpec,
    Capabilities,
    DeviceFacts,
    capabilities,
    choose_kernel,
    device_facts,
    reasons,
)

SPEC = AttentionSpec(torch.bfloat16, 128, 128, 64, 8)
ALL = frozenset({"flash_attn.cute", "flash_attn_interface"})
SMALL_BUILD = frozenset({"fa3_backward", "fa3_no_FP16", "fa3_no_SOFTCAP", "fa3_no_HDIM192", "fa3_no_HDIM256"})
BLACKWELL = DeviceFacts((10, 0), ALL)
HOPPER = DeviceFacts((9, 0), ALL, frozenset({"fa3_backward"}))


def test_facts_for_attention_import_no_library_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(select, "_importable", asked.append)
    device_facts.__wrapped__(torch.device("cpu"))
    assert asked
    assert {*asked} == ALL


def test_order_on_hopper() -> None:
    assert choose_kernel(SPEC, HOPPER).kernel == "fa3+fa4"
    assert choose_kernel(SPEC, dataclasses.replace(HOPPER, modules=ALL - {"flash_attn_interface"})).kernel == "fa4"
    assert choose_kernel(SPEC, dataclasses.replace(HOPPER, modules=ALL - {"flash_attn.cute"})).kernel == "fa3"
    assert choose_kernel(SPEC, DeviceFacts((9, 0))).kernel == "aten_flash"
    assert choose_kernel(SPEC, DeviceFacts(None)).kernel == "reference"


@pytest.mark.parametrize(
    ("name", "change", "facts", "reason"),
    [
        ("fa4", {"dtype": torch.float32}, HOPPER, "bfloat16 and float16 only, got float32"),
        ("fa4", {"head_dim": 100}, HOPPER, "multiples of 8"),
        ("fa4", {"head_dim": 192}, HOPPER, "equal head dims of keys and values"),
        ("fa4", {}, DeviceFacts((8, 0), ALL), "needs Hopper or Blackwell, this GPU has compute capability 8.0"),
        ("fa4", {}, DeviceFacts((9, 0)), "flash_attn.cute is not installed"),
        ("fa4", {"head_dim": 160, "head_dim_v": 160}, BLACKWELL, "on Blackwell"),
        ("fa3", {}, DeviceFacts((9, 0), ALL), "no backward"),
        ("fa3", {}, DeviceFacts((10, 0), ALL), "needs Hopper"),
        ("fa3", {"dtype": torch.float16}, DeviceFacts((9, 0), ALL, SMALL_BUILD), "this build has no float16"),
        ("fa3", {"softcap": 30.0}, DeviceFacts((9, 0), ALL, SMALL_BUILD), "this build has no soft cap"),
        ("fa3", {"head_dim_v": 136}, DeviceFacts((9, 0), ALL, SMALL_BUILD), "head dims up to 128, got (128, 136)"),
        ("fa3", {"head_dim": 256, "head_dim_v": 256, "deterministic": True}, HOPPER, "no deterministic backward"),
        ("fa4", {"causal": False, "heads_kv": 8, "head_dim_v": 64}, HOPPER, "can be wrong without a causal mask"),
        ("fa4", {"head_dim": 72, "head_dim_v": 72}, HOPPER, "no multiple of 32, got (72, 72)"),
        ("fa4", {"head_dim": 72, "head_dim_v": 72}, BLACKWELL, "no multiple of 32, got (72, 72)"),
        ("fa4", {"heads_kv": 64, "head_dim_v": 96}, BLACKWELL, "gradients of v on Blackwell can be wrong"),
        ("fa4", {"heads_kv": 64, "head_dim": 64, "head_dim_v": 32}, BLACKWELL, "gradients of v on Blackwell"),
        ("aten_flash", {"head_dim": 192}, HOPPER, "must be equal"),
        ("aten_flash", {"softcap": 30.0}, HOPPER, "no soft cap"),
        ("aten_flash", {}, DeviceFacts(None), "needs a CUDA GPU"),
        ("aten_flash", {}, DeviceFacts((7, 5)), "Ampere or newer"),
    ],
)
def test_reasons(name: str, change: dict[str, object], facts: DeviceFacts, reason: str) -> None:
    assert any(reason in why for why in reasons(name, dataclasses.replace(SPEC, **change), facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [(128, 128), (128, 64), (64, 64), (96, 96), (96, 32), (192, 128), (256, 256)])
def test_head_dims_that_are_right_on_blackwell(dims: tuple[int, int]) -> None:
    spec = dataclasses.replace(SPEC, heads_kv=SPEC.heads, head_dim=dims[0], head_dim_v=dims[1])
    assert not reasons("fa4", spec, BLACKWELL)


def test_all_reasons_are_told() -> None:
    spec = dataclasses.replace(SPEC, dtype=torch.float32, head_dim=100)
    assert len(reasons("fa4", spec, DeviceFacts((8, 0)))) == 5


def test_a_named_kernel_never_falls_back() -> None:
    choice = choose_kernel(SPEC, DeviceFacts((9, 0)), "fa4")
    assert choice.kernel is None
    assert [name for name, _ in choice.rejected] == ["fa4"]
    assert "flash_attn.cute is not installed" in str(choice)


def test_forward_only_needs_no_backward() -> None:
    facts = DeviceFacts((9, 0), ALL)
    for change in ({"causal": False, "head_dim_v": 64}, {"head_dim": 72, "head_dim_v": 72}):
        assert not reasons("fa4", dataclasses.replace(SPEC, **change, needs_backward=False), facts)  # type: ignore[arg-type]
    full = dataclasses.replace(SPEC, heads=8, heads_kv=8, causal=False)
    assert not reasons("fa4", full, facts)
    assert not reasons("fa4", dataclasses.replace(full, causal=True, head_dim_v=64), facts)
    assert not reasons("fa3", dataclasses.replace(SPEC, needs_backward=False), facts)
    assert not reasons("fa4", dataclasses.replace(SPEC, head_dim=192, needs_backward=False), facts)
    assert not reasons("fa4", dataclasses.replace(SPEC, head_dim_v=96, needs_backward=False), BLACKWELL)


def test_a_pair_runs_what_both_of_its_parts_can() -> None:
    assert choose_kernel(SPEC, HOPPER, "fa3+fa4").kernel == "fa3+fa4"
    assert choose_kernel(SPEC, DeviceFacts((9, 0), ALL), "fa3+fa4").kernel == "fa3+fa4"  # whose backward is not FA3's
    for change, missing, reason in (
        ({}, "flash_attn.cute", "flash_attn.cute is not installed"),
        ({}, "flash_attn_interface", "flash_attn_interface is not installed"),
        ({"head_dim": 72, "head_dim_v": 72}, "", "no multiple of 32"),
        ({"softcap": 30.0}, "", "a soft cap may differ"),
    ):
        facts = dataclasses.replace(HOPPER, modules=ALL - {missing})
        found = choose_kernel(dataclasses.replace(SPEC, **change), facts, "fa3+fa4")  # type: ignore[arg-type]
        assert found.kernel is None
        assert reason in str(found)
    forward_only = dataclasses.replace(SPEC, needs_backward=False, head_dim=72, head_dim_v=72)
    assert choose_kernel(forward_only, HOPPER, "fa3+fa4").kernel == "fa3+fa4"
    pair = select.load("fa3+fa4")
    assert (pair.forward, pair.backward) == (select.load("fa3").forward, select.load("fa4").backward)
    assert capabilities("fa3+fa4") == capabilities("fa4")
    # `auto` takes it where it was measured to be faster, and where it can run.
    assert choose_kernel(dataclasses.replace(SPEC, head_dim=64, head_dim_v=64), HOPPER).kernel == "fa4"
    assert choose_kernel(SPEC, dataclasses.replace(HOPPER, modules=frozenset({"flash_attn.cute"}))).kernel == "fa4"


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match="kernel must be auto or one of"):
        choose_kernel(SPEC, HOPPER, "cudnn")


def test_a_build_says_what_it_was_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"FLASHATTENTION_DISABLE_FP16": True, "FLASHATTENTION_DISABLE_HDIM64": False}
    monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace(CONFIG={"build_flags": flags}))
    monkeypatch.setattr(fa3, "has_backward", lambda: True)
    assert fa3.features() == {"fa3_backward", "fa3_no_FP16"}
    monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace())
    assert fa3.features() == {"fa3_backward"}
    assert not reasons("fa3", SPEC, DeviceFacts((9, 0), ALL, SMALL_BUILD))


def test_facts_of_a_cpu() -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts.capability is None
    assert choose_kernel(SPEC, facts).kernel == ORDER[-1]


def test_capabilities_are_those_of_versions_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    for version, expected in ((lambda _: "4.0.0b36", True), (lambda _: "4.0.0", False), (missing, False)):
        monkeypatch.setattr(fa4_internals, "version", version)
        fa4_internals.was_read.cache_clear()
        found = fa4_internals.capabilities()
        assert found.overlaps_exchange == expected
        assert (found == Capabilities()) != expected
    monkeypatch.undo()
    fa4_internals.was_read.cache_clear()
    assert capabilities("fa3") == Capabilities(overlaps_exchange=True)
    assert all(capabilities(name) == Capabilities() for name in ("aten_flash", "reference"))


def test_unrounded_gradients_are_those_of_grouped_heads_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    able, q = Capabilities(unrounded_on=frozenset({9})), torch.zeros(2, 8, 16)
    for capability, hopper in (((9, 0), True), ((10, 0), False), (None, False)):
        monkeypatch.setattr(select, "device_facts", lambda _, found=capability: DeviceFacts(found))
        assert able.unrounded_gradients(q, 2) == hopper
        assert not able.unrounded_gradients(q, 8)
        assert not Capabilities().unrounded_gradients(q, 2)
