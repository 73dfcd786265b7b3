"""The kernels of the selective scan (`csrc/selective_*.cu`) on the CPU, threads played by fibers: the op by them,
beside a walk over the tokens in fp64."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.kernels.states import select
from cp_rewrite.ops.states import maps, trial
from cp_rewrite.ops.states.maps import Options
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.plan_input import States
from tests.helpers.amount import drawn
from tests.helpers.recurrences import oracle
from tests.kernels.emulated import COMPILER, HERE, compile_cpp
from tests.ops.test_states_pieces import Ranks, any_plan, expected_of, on_rank

ops: Any = torch.ops.cp_rewrite
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class Emulated:
    """Kernels of CUDA sources as `cuda.kernel` and `cuda.launch` give and launch them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.built = folder, dict[tuple[object, ...], Any]()
        self.launched: list[str] = []
        self.turn = threading.Lock()
        for file in (*cuda.SOURCES.glob("selective*"), cuda.SOURCES / "rows.cuh"):
            text = re.sub(r'asm\("cvt\.rn\.bf16[^;]*;"[^;]*\);', "y = to_bf16(x);", file.read_text())
            text = re.sub(r'asm\("ex2[^;]*;"[^;]*\);', "y = exp2f(x);", text)
            (folder / file.name).write_text(re.sub(r'asm\("cvt[^;]*;"[^;]*\);', "abort();", text))

    def kernel(self, name: str, _: object, macros: cuda.Macros) -> tuple[str, Any]:
        with self.turn:
            known = self.built.get((name, macros))
            if known is None:
                path = self.folder / f"{name}{len(self.built)}.so"
                defined = [f"-D{key}={value}" for key, value in (("KERNEL", name), *macros)]
                compile_cpp("-shared", "-fPIC", *defined, f"-I{self.folder}", HERE / "selective.cpp", "-o", path)
                known = self.built[name, macros] = name, ctypes.CDLL(str(path)).run
            return known

    def launch(self, kernel: tuple[str, Any], grid: int, block: int, _: object, *args: int) -> None:
        name, run = kernel
        codes = cuda.parameter_codes((cuda.SOURCES / f"{name}.cu").read_text(), name)
        assert len(codes) == len(args)
        with self.turn:
            self.launched.append(name)
            run(ctypes.c_uint32(grid), ctypes.c_uint32(block), (ctypes.c_uint64 * len(args))(*args))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("selective"))


@pytest.fixture
def kernels(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    replace_kernels(monkeypatch, emulated)
    return emulated


def replace_kernels(patch: pytest.MonkeyPatch, emulated: Emulated) -> None:
    """Selective scans of numbers narrower than fp64 run by emulated kernels."""
    patch.setattr(cuda, "kernel", emulated.kernel)
    patch.setattr(cuda, "launch", emulated.launch)
    patch.setattr(trial, "_agree", lambda *_: True)
    facts = DeviceFacts((9, 0), frozenset({"cuda.core"}))
    patch.setattr(select, "device_facts", lambda *_: facts)


def draw(channels: int, numbers: int, rows: int, tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    at = rows, tokens
    steps = 0.3 * F.softplus(normal(*at, channels))
    return [normal(*at, channels), steps, -normal(channels, numbers).exp(), normal(*at, numbers), normal(*at, numbers)]


def compare(
    plan: BatchPlan, read: States, inputs: list[Tensor], limit: float, kernels: Emulated, seed: int = 0
) -> None:
    """Ranks' results and gradients by the kernels, and those of one process in fp64, by relative norms."""
    leaves = [x.double().requires_grad_() for x in inputs]
    expected = expected_of("selective_scan", plan, read, leaves)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed)).to(inputs[0].dtype)
    expected.backward(dout.double())
    ranks, group = Ranks(plan.world_size), "played" if plan.world_size > 1 else ""
    kernels.launched.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "all_to_all_rows", ranks.exchange)
        results = ranks.run(lambda rank: on_rank("selective_scan", plan, read, inputs, dout, group, rank))
    assert {"selective_out", "selective_back"} <= set(kernels.launched)
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (expected, *inputs)]
    for rank, (out, grads) in enumerate(results):
        place = plan.local_indices(rank)
        row, at = np.nonzero(place >= 0)
        for whole, part in zip(found, (out, *grads), strict=True):
            if part.ndim < 3:
                whole += part
            else:
                whole[row, place[row, at]] = part[row, at].double()
    for x, right in zip(found, [expected.detach(), *(x.grad for x in leaves)], strict=True):
        assert right is not None
        assert float((x - right).norm()) <= limit * float(right.norm())


PACKED = [Documents.from_lengths([1, 0, 7, 31, 1, 130], 173), Documents.from_lengths([171], 173)]


@needs_compiler
@pytest.mark.parametrize(("channels", "numbers"), [(1, 1), (70, 16), (130, 30), (20, 64)])
def test_kernels_give_what_one_process_does(channels: int, numbers: int, kernels: Emulated) -> None:
    compare(plan_batch(PACKED, 3), States(True), draw(channels, numbers, 2, 173), 1e-5, kernels)


@needs_compiler
def test_states_go_through_whole_rows(kernels: Emulated) -> None:
    compare(plan_batch(PACKED, 3, "dual_chunk"), States(False, True), draw(5, 16, 2, 173), 1e-5, kernels)


@needs_compiler
@pytest.mark.parametrize("wide", [(), (1, 2)], ids=["all", "dt wide"])
def test_inputs_in_half_precision(wide: Sequence[int], kernels: Emulated) -> None:
    inputs = [x if i in wide else x.bfloat16() for i, x in enumerate(draw(70, 16, 2, 173))]
    compare(plan_batch(PACKED, 2), States(True), inputs, 1e-2, kernels)


@needs_compiler
@drawn(20, 5)
@given(data=st.data())
def test_any_order_of_any_pieces(data: st.DataObject, emulated: Emulated) -> None:
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 13, 64, 67, 131]), min_size=1, max_size=5))
    plan = any_plan(data, lengths)
    if sum(lengths):
        with pytest.MonkeyPatch.context() as patch:
            replace_kernels(patch, emulated)
            inputs = draw(3, 13, 1, plan.rows[0].total, data.draw(st.integers(0, 9)))
            compare(plan, States(data.draw(st.booleans()), True), inputs, 1e-5, emulated)


@needs_compiler
def test_whole_rows(kernels: Emulated) -> None:
    inputs = draw(40, 16, 2, 90)
    for offsets in (None, [0, 0, 1, 77, 170]):
        given_ = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
        leaves = [x.clone().requires_grad_() for x in inputs]
        wide = [x.double().requires_grad_() for x in inputs]
        out, expected = ops.selective_scan(*leaves, given_), oracle("selective_scan", wide, offsets)
        (out * out.detach()).sum().backward()
        (expected * expected.detach()).sum().backward()
        for x, right in [(out, expected), *((x.grad, y.grad) for x, y in zip(leaves, wide, strict=True))]:
            assert x is not None
            torch.testing.assert_close(x.double(), right, rtol=1e-4, atol=1e-4)
    assert "selective_back" in kernels.launched


@needs_compiler
def test_results_are_bitwise_repeatable(kernels: Emulated) -> None:
    """Blocks that run in another order add up the same."""
    inputs = [x.requires_grad_() for x in draw(70, 16, 1, 130)]
    first = torch.autograd.grad(ops.selective_scan(*inputs, None).sum(), inputs)
    assert all(map(torch.equal, first, torch.autograd.grad(ops.selective_scan(*inputs, None).sum(), inputs)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numbers", [1, 5, 16, 30, 64])
def test_states_of_any_width(numbers: int, dtype: torch.dtype) -> None:
    """Beside the reference in fp64, which no kernels run."""
    pytest.importorskip("cuda.core")
    inputs = [x.cuda() if i == 2 else x.cuda().to(dtype) for i, x in enumerate(draw(333, numbers, 2, 601))]
    assert trial.right_kernels("selective_scan", inputs, 1, Options()) == select.OURS
    offsets = torch.tensor([0, 1, 8, 8, 139, 600, 1100, 1200], dtype=torch.int32, device="cuda")
    found: list[list[Tensor]] = []
    for given_ in (inputs, [x.double() for x in inputs]):
        leaves = [x.requires_grad_() for x in given_]
        out = ops.selective_scan(*leaves, offsets)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, inputs[0].detach().to(out.dtype))])
    limit = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for x, right in zip(*found, strict=True):
        assert float((x.double() - right).norm()) <= limit * float(right.norm())


def test_kernels_are_tried_on_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(trial, "kernels_for", lambda *_: [select.OURS])
    monkeypatch.setattr(trial, "_agree", lambda *facts: tried.append(facts[4]) or True)
    assert trial.right_kernels("selective_scan", draw(8192, 16, 1, 2), 1, Options()) == select.OURS
    assert tried == [((520,), (520,), (520, 16), (16,), (16,))]
