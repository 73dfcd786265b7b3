"""In which order FlashAttention 4's backward and an overlapping exchange run. The library here only logs its steps."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cp_rewrite.kernels.flash import fa4, fa4_internals
from cp_rewrite.kernels.flash.launches import Launch
from cp_rewrite.kernels.flash.overlap import BackwardOverlap
from cp_rewrite.kernels.params import Params

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
        assert more == ("cu_k", ptr if overlapped else None)
        assert out is grads[sums == "dv"]
        log.append(f"parts of {sums}")

    monkeypatch.setattr(fa4_internals, "_write_sums", write_sums)
    x, ptr = torch.zeros(2, 1, 8).bfloat16(), torch.zeros(3, dtype=torch.int32)
    rows = torch.zeros(2, 16)
    grads = (rows[:, :8].view(2, 1, 8), rows[:, 8:].view(2, 1, 8)) if unrounded else (x.clone(), x.clone())
    overlap = BackwardOverlap(grads, mxint15=not unrounded, holder_ptr=ptr) if overlapped else None
    run(x, grads, overlap, unrounded)
    assert log == ["sums of out * dout", "kernel", "parts of dk", "parts of dv", "round dq"]
