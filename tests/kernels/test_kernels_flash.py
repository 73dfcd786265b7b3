"""FlashAttention 4 and 3 as we call them, over stand-ins: in which order a backward and an exchange beside it run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.flash import fa3, fa4, fa4_internals
from cp_rewrite.kernels.flash.launches import Launch
from cp_rewrite.kernels.flash.overlap import BackwardOverlap
from cp_rewrite.kernels.params import Params
from cp_rewrite.kernels.tables import Tables
from cp_rewrite.masks import PackedMask
from tests.helpers.kernel_cases import make_case

LIBRARY = """
def _bwd_preprocess(out, *, fake_mode):
    log.append("sums of out * dout")

def _bwd_postprocess_convert(accumulated, output, scale, cu_seqlens, *, fake_mode):
    log.append(f"round {accumulated}")

def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, dq=None, dk=None, dv=None,
                    grouped=True, **_):
    assert q.dtype == dk.dtype == dv.dtype and k.shape == dk.shape and v.shape == dv.shape
    _bwd_preprocess(out, fake_mode=False)
    log.append("kernel")
    _bwd_postprocess_convert("dq", dq, softmax_scale, "cu_q", fake_mode=False)
    if grouped:
        _bwd_postprocess_convert("dk", dk, softmax_scale, "cu_k", fake_mode=False)
        _bwd_postprocess_convert("dv", dv, 1.0, "cu_k", fake_mode=False)
"""
APART = ["sums of out * dout", "kernel", "round dq", "round dk", "round dv"]
OVERLAPPED = ["sums of out * dout", "keys needed", "kernel", "round dk", "round dv", "gradients written", "round dq"]


def install(monkeypatch: pytest.MonkeyPatch, grouped: bool = True) -> dict[str, Any]:
    """The library's globals; `log` among them."""
    library = ModuleType("interface")
    vars(library)["log"] = list[str]()
    exec(LIBRARY.replace("grouped=True", f"grouped={grouped}"), vars(library))
    monkeypatch.setattr(fa4, "_interface", lambda: library)
    return vars(library)


def run(
    x: torch.Tensor, grads: tuple[torch.Tensor, torch.Tensor], overlap: BackwardOverlap | None, unrounded: bool = False
) -> None:
    launch: dict[str, Any] = {"window": (None, 0), "max_q": 2, "max_k": 2, "causal": True, "cu_seqlens_q": x}
    now: Launch = SimpleNamespace(**launch, cu_seqlens_k=x, overlap=overlap)  # type: ignore[assignment]
    fa4._backward(x, x, x, x, x, x, x.clone(), *grads, now, Params(0.3, unrounded=unrounded))


@pytest.mark.parametrize("grouped", [True, False])
def test_rows_travel_around_the_kernel(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, grouped)
    before, log = dict(library), library["log"]
    x = torch.zeros(2, 1, 8).bfloat16()
    overlap = BackwardOverlap((x, x), lambda: log.append("keys needed"), lambda: log.append("gradients written"))
    for each, expected in ((None, APART), (overlap, OVERLAPPED), (None, APART)):
        log.clear()
        run(x, (x.clone(), x.clone()), each)
        assert log == [step for step in expected if grouped or step not in ("round dk", "round dv")]
    assert library == before


@pytest.mark.parametrize(("unrounded", "overlapped"), [(False, True), (True, True), (True, False)])
def test_parts_of_sums_are_written_here(unrounded: bool, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of dk and dv: the library's rounding is handed over, and rounds dq."""
    library = install(monkeypatch)
    log, rounding = library["log"], library["_bwd_postprocess_convert"]

    def write_sums(
        convert: Any, sums: str, rounded: torch.Tensor, out: torch.Tensor, scale: float, *more: Any, **options: Any
    ) -> None:
        assert rounded.dtype == x.dtype
        assert convert is rounding
        assert options == {"fake_mode": False}
        assert scale == (1.0 if sums == "dv" else 0.3)
        assert more == ("cu_k", overlap)
        assert out is grads[sums == "dv"]
        log.append(f"parts of {sums}")

    monkeypatch.setattr(fa4_internals, "_write_sums", write_sums)
    x, ptr = torch.zeros(2, 1, 8).bfloat16(), torch.zeros(3, dtype=torch.int32)
    rows = torch.zeros(2, 16)
    grads = (rows[:, :8].view(2, 1, 8), rows[:, 8:].view(2, 1, 8)) if unrounded else (x.clone(), x.clone())
    overlap = BackwardOverlap(grads, mxint15=not unrounded, holder_ptr=ptr) if overlapped else None
    run(x, grads, overlap, unrounded)
    assert log == ["sums of out * dout", "kernel", "parts of dk", "parts of dv", "round dq"]


class Ops:
    """`torch.ops.flash_attn_3`, computed on the CPU. Notes what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _tables(self, given: dict[str, Any]) -> Tables:
        q, k = (given[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        right = 0 if given["is_causal"] else given["window_size_right"]
        rest = torch.tensor([given["window_size_left"], right, 0]).expand(len(q) - 1, 3)
        assert given["max_seqlen_q"] >= int(q.diff().max())
        return Tables(q, k, torch.cat([torch.stack([q[:-1], q[1:], k[:-1], k[1:]], 1), rest], 1), q)

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, softmax_scale: float, softcap: float, num_splits: int,
        pack_gqa: bool | None, **given: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (softcap, num_splits, pack_gqa) == (0.0, 1, None)
        computed, lse = reference.forward(q, k, v, self._tables(given), Params(softmax_scale))
        out.copy_(computed)
        self.calls.append("forward")
        return out, lse, q, q

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, dq: Tensor, dk: Tensor,
        dv: Tensor, softmax_scale: float, deterministic: bool, **given: Any,
    ) -> None:  # fmt: skip
        grads = reference.backward(dout, q, k, v, out, lse, self._tables(given), Params(softmax_scale))
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        self.calls.append("backward")


@pytest.mark.parametrize("mask", [PackedMask(), PackedMask(causal=False), PackedMask(window=(5, 0))])
def test_fa3_is_the_reference(monkeypatch: pytest.MonkeyPatch, mask: PackedMask) -> None:
    ops = Ops()
    monkeypatch.setattr(fa3, "_ops", lambda: SimpleNamespace(fwd=ops.fwd, bwd=ops.bwd))
    case = make_case(Documents.from_lengths([30, 11, 20], total=66), mask, world_size=2)
    expected = case.oracle(Params(0.25))
    out, lse = fa3.forward(case.q, case.k, case.v, case.tables, Params(0.25))
    grads = fa3.backward(case.dout, case.q, case.k, case.v, out, lse, case.tables, Params(0.25))
    for want, got in zip(expected, (out, lse, *grads), strict=True):
        torch.testing.assert_close(got, want)
    # Beside an exchange keys are waited for before the kernel is enqueued, and gradients go home after it.
    ops.calls.clear()
    into = torch.empty_like(case.k), torch.empty_like(case.v)
    overlap = BackwardOverlap(into, partial(ops.calls.append, "keys"), partial(ops.calls.append, "gradients"))
    dq, *_ = fa3.backward(case.dout, case.q, case.k, case.v, out, lse, case.tables, Params(0.25), overlap)
    assert ops.calls == ["keys", "backward", "gradients"]
    for want, got in zip(expected[2:], (dq, *into), strict=True):
        torch.testing.assert_close(got, want)


def test_fa3_packs_heads_of_very_short_and_of_long_entries() -> None:
    launch = Launch(torch.zeros(9), torch.zeros(9), None, 0, (0, 0), (None, 0), 0, 0)
    assert [fa3._packs_heads(replace(launch, stop=8 * mean)) for mean in (255, 256, 4095, 4096)] == [
        None,
        False,
        False,
        None,
    ]
