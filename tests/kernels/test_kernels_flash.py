"""FlashAttention 4 and 3 as we call them, over stand-ins: in which order a backward and an exchange beside it run."""

from __future__ import annotations

from collections.abc import Sequence
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
from cp_rewrite.kernels.flash.varlen import BackwardOverlap, Launch
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.masks import PackedMask
from tests.helpers.kernel_cases import make_case

LIBRARY = """
import torch

def kernel(name):
    def run(*args):
        log.append(name)
        seen.append(args)
    return run

def python(name):
    log.append(f"python of {name}")

def _bwd_preprocess(out, dout, dots, lse, lse_2, sums, cu_seqlens, *, fake_mode):
    _bwd_preprocess.compile_cache["key"](out, dout, dots, lse, lse_2, sums, cu_seqlens, None, 1.0)

def _bwd_postprocess_convert(sums, output, scale, cu_seqlens, *, fake_mode):
    which = ("dk", "dv")[int(scale == 1.0)] if cu_seqlens is lengths[1] else "dq"
    _bwd_postprocess_convert.compile_cache[which](sums, output, scale, cu_seqlens, None)

def _flash_attn_fwd(q, k, v, softmax_scale=None, softcap=None, out=None, lse=None, cu_seqlens_q=None, cu_seqlens_k=None,
                    **_):
    python("forward")
    k = k.clone() if copies else k
    _flash_attn_fwd.compile_cache["key"](q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale,
                                         cu_seqlens_q, cu_seqlens_k, None)

def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, dq=None, dk=None, dv=None,
                    cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False, **_):
    assert q.dtype == dk.dtype == dv.dtype and k.shape == dk.shape and v.shape == dv.shape
    python("backward")
    k = k.clone() if copies else k
    lengths[:] = cu_seqlens_q, cu_seqlens_k
    dots, lse_2, sums = torch.ones(1, 4), torch.ones(1, 4), torch.ones(1, 32)
    keys = (torch.zeros(1, 64), torch.zeros(1, 64)) if grouped else (dk, dv)
    order = torch.zeros(4) if deterministic else None
    _bwd_preprocess(out, dout, dots, lse, lse_2, sums, cu_seqlens_q, fake_mode=False)
    _flash_attn_bwd.compile_cache["key"](q.detach(), k.detach(), v.detach(), dout, lse_2, dots, sums, *keys,
                                         softmax_scale, cu_seqlens_q, cu_seqlens_k, order)
    _bwd_postprocess_convert(sums, dq, softmax_scale, cu_seqlens_q, fake_mode=False)
    if grouped:
        _bwd_postprocess_convert(keys[0], dk, softmax_scale, cu_seqlens_k, fake_mode=False)
        _bwd_postprocess_convert(keys[1], dv, 1.0, cu_seqlens_k, fake_mode=False)

_flash_attn_fwd.compile_cache = {"key": kernel("forward")}
_bwd_preprocess.compile_cache = {"key": kernel("sums of out * dout")}
_flash_attn_bwd.compile_cache = {"key": kernel("kernel")}
_bwd_postprocess_convert.compile_cache = {name: kernel(f"round {name}") for name in ("dq", "dk", "dv")}
"""
PARAMS = Params(0.3)
BACKWARD = ["python of backward", "sums of out * dout", "kernel", "round dk", "round dv", "round dq"]
OVERLAPPED = [*BACKWARD[:2], "keys needed", *BACKWARD[2:5], "gradients written", "round dq"]


def install(monkeypatch: pytest.MonkeyPatch, grouped: bool = True, copies: bool = False) -> dict[str, Any]:
    """The library's globals; `log` and `seen` among them: which kernels ran, and over what."""
    library = ModuleType("interface")
    vars(library).update(log=list[str](), seen=list[Any](), lengths=[None, None], grouped=grouped, copies=copies)
    exec(LIBRARY, vars(library))
    monkeypatch.setattr(fa4, "_interface", lambda: library)
    monkeypatch.setattr(fa4, "was_read", lambda: True)
    return vars(library)


def make_launch() -> Launch:
    lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    return Launch(*lengths, None, 2, (0, 2), (None, 0), 256, 256)


def make(count: int) -> list[Tensor]:
    return [torch.rand(2, 1, 8).bfloat16() for _ in range(count)]


def run(launch: Launch, grads: Sequence[Tensor], params: Params = PARAMS) -> list[Tensor]:
    """q, k, v, out, dout and lse of a backward with these dk and dv."""
    q, k, v, out, dout = make(5)
    lse = torch.rand(1, 4)[:, :2]
    fa4._backward(dout, q, k, v, out, lse, torch.empty_like(q), grads[0], grads[1], launch, params)
    return [q, k, v, out, dout, lse]


@pytest.mark.parametrize("grouped", [True, False])
def test_rows_travel_around_the_kernel(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the library's calls, and in those of further layers, which go straight to its kernels."""
    library = install(monkeypatch, grouped)
    before, log = dict(library), library["log"]
    grads = make(2)
    overlap = BackwardOverlap(
        (grads[0], grads[1]), lambda: log.append("keys needed"), lambda: log.append("gradients written")
    )
    for each, expected in ((None, BACKWARD), (overlap, OVERLAPPED)):
        steps = [step for step in expected if grouped or step not in ("round dk", "round dv")]
        launch = replace(make_launch(), overlap=each)
        for layer in range(3):
            log.clear()
            run(launch, grads)
            assert log == steps[layer > 0 :]
    assert library == before


@pytest.mark.parametrize("grouped", [True, False])
def test_a_layer_repeats_the_calls_of_the_first_with_its_own_tensors(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install(monkeypatch, grouped)
    log, seen = library["log"], library["seen"]
    launch = make_launch()
    own: list[list[int]] = []
    shared: list[list[Any]] = []
    for _ in range(2):
        log.clear()
        seen.clear()
        q, k, v, out = make(4)
        lse, grads = torch.rand(1, 2), make(2)
        fa4._forward(q, k, v, out, lse, launch, Params(0.3))
        assert [x.data_ptr() for x in seen[0][:5]] == [x.data_ptr() for x in (q, k, v, out, lse)]
        inputs = run(launch, grads)
        forward, first, kernel, *rounding = seen
        found = *kernel[:3], first[0], kernel[3], first[3]
        assert [x.data_ptr() for x in found] == [x.data_ptr() for x in inputs]
        dots, lse_2, sums = first[2], first[4], first[5]
        assert [x.data_ptr() for x in kernel[4:7]] == [x.data_ptr() for x in (lse_2, dots, sums)]
        assert (dots.shape, lse_2.shape, sums.shape, sums.dtype) == ((1, 4), (1, 4), (1, 32), torch.float32)
        assert rounding[-1][0].data_ptr() == sums.data_ptr()
        if grouped:
            assert all(x.shape == (1, 64) and not x.any() for x in kernel[7:9])
            assert [x[0].data_ptr() for x in rounding[:2]] == [x.data_ptr() for x in kernel[7:9]]
            assert [x[1].data_ptr() for x in rounding[:2]] == [x.data_ptr() for x in grads]
        else:
            assert [x.data_ptr() for x in kernel[7:9]] == [x.data_ptr() for x in grads]
        own.append([x.data_ptr() for x in (q, inputs[0])])
        shared.append([forward[5:], first[6:], kernel[9:], *(x[2:] for x in rounding)])
    assert log == ["forward", *(step for step in BACKWARD[1:] if grouped or step not in ("round dk", "round dv"))]
    assert own[0] != own[1]
    assert all(x is y for old, new in zip(*shared, strict=True) for x, y in zip(old, new, strict=True))


def test_calls_that_differ_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other shapes, strides or numbers; tensors that it copies; arguments that it makes at each call."""
    library = install(monkeypatch)
    log, launch = library["log"], make_launch()
    tensors = [*make(4), torch.rand(1, 2)]

    def by_library(*given: Tensor, params: Params = PARAMS) -> bool:
        log.clear()
        fa4._forward(*given, launch, params)  # type: ignore[call-arg]
        return log[0].startswith("python")

    assert by_library(*tensors)
    assert not by_library(*tensors)
    assert by_library(torch.rand(3, 1, 8).bfloat16(), *tensors[1:])
    assert by_library(torch.rand(2, 1, 16).bfloat16()[..., :8], *tensors[1:])
    assert by_library(torch.rand(17).bfloat16()[1:].view(2, 1, 8), *tensors[1:])
    assert by_library(*tensors, params=Params(0.4))
    assert not by_library(*tensors)
    assert by_library(*tensors[:4], torch.rand(1, 3)[:, 1:])
    assert not by_library(*tensors[:4], torch.rand(1, 3)[:, :2])
    library["copies"] = True
    launch.kept.clear()
    assert all(by_library(*tensors) for _ in range(3))
    grads = make(2)
    for copies, deterministic in ((True, False), (False, True)):
        library["copies"] = copies
        for _ in range(3):
            log.clear()
            run(launch, grads, Params(0.3, deterministic=deterministic))
            assert log[0] == "python of backward"


@pytest.mark.parametrize(("unrounded", "overlapped"), [(False, True), (True, True), (True, False)])
def test_parts_of_sums_are_written_here(unrounded: bool, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer writes dk and dv: the library's rounding is handed over, and rounds dq."""
    library = install(monkeypatch)
    log, rounding = library["log"], library["_bwd_postprocess_convert"]
    launch = make_launch()

    def order(convert: Any, rounded: Tensor, *rest: Any, **options: Any) -> str:
        assert rounded.dtype == grads[0].dtype or unrounded
        assert (convert, rest, options) == (rounding, (), {"fake_mode": False})
        return "order"

    def write_sums(
        order: str, dtype: torch.dtype, scale: float, cu: Tensor, sums: Tensor, out: Tensor, at: Any
    ) -> None:
        assert (order, dtype, sums.shape, at) == ("order", torch.bfloat16, (1, 64), overlap)
        assert cu is launch.cu_seqlens_k
        assert scale == (1.0 if out is grads[1] else 0.3)
        log.append("parts of dv" if out is grads[1] else "parts of dk")

    monkeypatch.setattr(fa4_internals, "_order", order)
    monkeypatch.setattr(fa4_internals, "_write_sums", write_sums)
    ptr = torch.zeros(3, dtype=torch.int32)
    for layer in range(2):
        rows = torch.zeros(2, 16)
        grads = [rows[:, :8].view(2, 1, 8), rows[:, 8:].view(2, 1, 8)] if unrounded else make(2)
        overlap = BackwardOverlap((grads[0], grads[1]), mxint15=not unrounded, holder_ptr=ptr) if overlapped else None
        log.clear()
        run(replace(launch, overlap=overlap), grads, Params(0.3, unrounded=unrounded))
        steps = ["python of backward", "sums of out * dout", "kernel", "parts of dk", "parts of dv", "round dq"]
        assert log == steps[layer:]


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
