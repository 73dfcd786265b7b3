"""Recurrences by kernels: when they run, and beside the reference in fp32, whole and on the pieces of ranks."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.kernels.states import select
from cp_rewrite.ops.states import maps, trial
from cp_rewrite.ops.states.maps import Options
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.plan_input import STATES, States
from cp_rewrite.planning.states import state_tables
from tests.ops.test_states_pieces import Ranks

ops: Any = torch.ops.cp_rewrite
HOPPER = DeviceFacts((9, 0), frozenset({"fla.ops.cp", "flash_qla", "cuda.core"}))
HALF = torch.bfloat16
KIND = {name: kind for kind, names in select.CLASSES.items() for name in names}
NAMES = list(KIND)


def test_kernels_say_every_reason_why_they_cannot_run() -> None:
    for name in NAMES:
        assert not select.reasons(name, HALF, *((16, 8192) if name == select.OURS else (128, 128)), HOPPER)
    found = "; ".join(select.reasons("delta.Kimi", torch.float32, 512, 128, DeviceFacts(None)))
    for part in ("got float32", "got 512", "CUDA GPU", "fla-core"):
        assert part in found
    found = "; ".join(select.reasons("fused.Fused", HALF, 128, 64, DeviceFacts((10, 0), frozenset({"fla.ops.cp"}))))
    assert found == (
        "head dims of 128 only, got 128 and 64; needs Hopper, this GPU has compute capability 10.0; "
        "flash_qla is not installed (pip install flash-qla)"
    )
    found = "; ".join(select.reasons(select.OURS, torch.float64, 65, 8192, DeviceFacts((7, 5))))
    assert found == (
        "bfloat16, float16 and float32 only, got float64; at most 64 numbers of a state for each channel, got 65; "
        "needs a CUDA GPU of compute capability 8.0 or newer; "
        "cuda.core is not installed (pip install 'cp_rewrite[cuda]')"
    )


def test_fused_kernels_are_for_many_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "device_facts", lambda *_: HOPPER)
    inputs = [torch.zeros(1, 1024, 8, 128, dtype=HALF)] * 3
    assert select.kernels_for("gated_delta_rule", inputs, 4) == ["fused.Fused", "delta.Delta"]
    assert select.kernels_for("gated_delta_rule", inputs, 5) == ["delta.Delta"]
    assert select.kernels_for("gated_delta_rule", inputs, 3) == ["delta.Delta"]


def test_selective_scans_take_kernels_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "device_facts", lambda *_: DeviceFacts((8, 0), frozenset({"cuda.core"})))
    for numbers, dtype, found in ((16, HALF, [select.OURS]), (64, torch.float32, [select.OURS]), (65, HALF, [])):
        inputs = [torch.zeros(1, 9, width, dtype=dtype) for width in (70, 70, 70, numbers, numbers)]
        assert select.kernels_for("selective_scan", inputs, 1) == found
    assert not select.kernels_for("ssd", [torch.zeros(1, 9, 8, 16, dtype=HALF)] * 5, 1)


def test_on_a_cpu_the_reference_runs() -> None:
    inputs = [torch.zeros(1, 9, width, dtype=HALF) for width in (70, 70, 70, 16, 16)]
    assert not select.kernels_for("selective_scan", inputs, 1)


def draw(kind: str, rows: int, tokens: int, heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator, device="cuda")

    if kind == "ssd":
        rate = -torch.linspace(0.5, 4.0, heads, device="cuda")
        found = [normal(heads, 64), 0.2 * F.softplus(normal(heads)), rate, normal(2, dim), normal(2, dim)]
        return [found[0].to(HALF), found[1], rate, *(x.to(HALF) for x in found[3:])]
    if kind == "selective_scan":
        x, dt, write, look = normal(130), 0.2 * F.softplus(normal(130)), normal(16), normal(16)
        rate = -torch.randn(130, 16, generator=generator, device="cuda").exp()
        return [x.to(HALF), dt, rate, write.to(HALF), look.to(HALF)]
    shared = heads // 2 if kind == "gated_delta_rule" else heads
    decay = -0.01 * F.softplus(normal(heads, *([dim] if kind == "kimi_delta" else [])))
    if kind == "kimi_delta":  # one channel forgets all at once
        decay[..., -1, -1] *= 1000
    q, k, v = (normal(n, dim).to(HALF) for n in (shared, shared, heads))
    return [q, k, v, decay, normal(heads).sigmoid().to(HALF)]


def poisoned(rows: Sequence[Documents], inputs: Sequence[Tensor]) -> list[Tensor]:
    """With NaN in the tokens behind the documents."""
    found = [x.clone() for x in inputs]
    for b, row in enumerate(rows):
        for x in found:
            if x.ndim > 2:
                x[b, int(row.lengths.sum()) :] = torch.nan
    return found


def options_of(kind: str, dim: int) -> tuple[float, bool] | tuple[()]:
    return () if kind in ("ssd", "selective_scan") else (dim**-0.5, True)


def differentiated(run: Any, inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """The result and the gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(leaves)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """By relative norms: of the result, and of each gradient."""
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)]
    print(f"{name:<44}", " ".join(f"{error:.1e}" for error in errors))
    assert all(torch.isfinite(x).all() for x in found)
    assert max(errors) < 2e-2


def on_pieces(kind: str, plan: BatchPlan, read: States, inputs: list[Tensor], dout: Tensor, dim: int) -> list[Tensor]:
    """All ranks' rows of the result and of gradients, put together. One rank at a time runs: Triton tunes."""
    ranks, turn = Ranks(plan.world_size), threading.RLock()

    def exchange(*args: Any) -> Tensor:
        turn.release()
        try:
            return ranks.exchange(*args)
        finally:
            turn.acquire()

    def work(rank: int) -> list[Tensor]:
        with turn, torch.device("cuda"):
            place = torch.from_numpy(plan.filled_indices(rank)).cuda()
            row = torch.arange(len(plan.rows))[:, None]
            local = [x if x.ndim < 3 else x[row, place] for x in (*inputs, dout)]
            arrays = state_tables(plan, read, rank)
            tables = [torch.from_numpy(arrays[x.name]) for x in STATES]
            tables = [t if x.on_host else t.cuda() for t, x in zip(tables, STATES, strict=True)]
            op, group = getattr(ops, f"{kind}_on_pieces"), "played" if plan.world_size > 1 else ""
            out, *kept = op(*local[:-1], tables, *options_of(kind, dim), group)
            # Not by autograd: it runs the backwards of all ranks in the one thread of their device.
            how = options_of(kind, dim) or (1.0, False)
            back = ops.states_on_pieces_backward
            return [out, *back(local[-1].to(out.dtype), *kept, local[:-1], tables, kind, *how, group)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "all_to_all_rows", exchange)
        found = ranks.run(work)
    total = [torch.zeros(x.shape, device="cuda") for x in (dout, *inputs)]
    for rank, results in enumerate(found):
        held = plan.local_indices(rank)
        row, at = (torch.from_numpy(x).cuda() for x in np.nonzero(held >= 0))
        token = torch.from_numpy(held[held >= 0]).cuda()
        for whole, part in zip(total, results, strict=True):
            if part.ndim < 3:
                whole += part
            else:
                whole[row, token] += part[row, at]
    return total


def one_rank(kind: str, rows: list[Documents], inputs: list[Tensor], dout: Tensor, dim: int) -> list[Tensor]:
    """The result and gradients on one rank, by autograd."""
    plan = plan_batch(rows, 1)
    place, row = torch.from_numpy(plan.filled_indices(0)).cuda(), torch.arange(len(rows), device="cuda")[:, None]
    arrays, op, how = state_tables(plan, States(True), 0), getattr(ops, f"{kind}_on_pieces"), options_of(kind, dim)
    tables = [torch.from_numpy(arrays[x.name]).to("cpu" if x.on_host else "cuda") for x in STATES]
    *local, dout = (x if x.ndim < 3 else x[row, place] for x in (*inputs, dout))
    return differentiated(lambda x: op(*x, tables, *how, "")[0], local, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["balanced", "contiguous", "dual_chunk"])
@pytest.mark.parametrize(
    "lengths", [[1, 700, 1, 1, 63, 65, 300, 128, 1], [1260], [1] * 1260], ids=["odd", "one", "ones"]
)
def test_kernels_give_what_the_reference_gives(
    name: str, layout: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"fused": "flash_qla", "selective": "cuda"}.get(name.partition(".")[0], "fla")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    kind = KIND[name]
    monkeypatch.setattr(trial, "kernels_for", lambda _, x, runs: [name] * (x[0].dtype == HALF))
    heads, dim = 4, 128
    rows = [Documents.from_lengths(lengths, 1271), Documents.from_lengths([1266], 1271)]
    inputs = draw(kind, 2, 1271, heads, dim)
    # What grows with results: of random signs alone, the gradient of A, a sum over tokens, may nearly cancel.
    whole = getattr(ops, kind)(*(x.float() for x in inputs), None, *options_of(kind, dim))
    dout = (whole / whole.std() + torch.randn_like(whole)).to(HALF)
    for read in (States(True), States(False, True)):
        plan = plan_batch(rows, 3, layout)
        how = Options(dim**-0.5, True) if options_of(kind, dim) else Options()
        assert trial.right_kernels(kind, inputs, 1, how) == name
        *given, of_out = poisoned(rows, [*inputs, dout])
        found = on_pieces(kind, plan, read, given, of_out, dim)
        # The reference, in fp32, on the same numbers.
        expected = on_pieces(kind, plan, read, [x.float() for x in given], of_out.float(), dim)
        compare(f"{name} {layout} {'documents' if read.resets else 'rows'}", found, expected)
    found, expected = (one_rank(kind, rows, given, dout, dim) for given in (inputs, [x.float() for x in inputs]))
    compare(f"{name} one rank", found, expected)
    offsets = torch.tensor([0, 1, 700, 701, 1271, 2000], dtype=torch.int32, device="cuda")
    for where in (None, offsets):
        op, how = getattr(ops, kind), options_of(kind, dim)
        found, expected = (
            differentiated(lambda x, where=where, op=op, how=how: op(*x, where, *how), given, dout)
            for given in (inputs, [x.float() for x in inputs])
        )
        compare(f"{name} whole", found, expected)
