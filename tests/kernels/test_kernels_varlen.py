"""Launches and padding of the flash backends, with a plain kernel that is as easily poisoned as a real one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import cuda, reference
from cp_rewrite.kernels.flash import varlen
from cp_rewrite.kernels.flash.varlen import BackwardOverlap, BackwardParts, ForwardOverlap, Launch, Parts, launches_of
from cp_rewrite.kernels.rows import zero_gaps
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.masks import PackedMask
from tests.helpers.amount import drawn
from tests.helpers.kernel_cases import Case, make_case
from tests.helpers.packs import documents, masks
from tests.helpers.tolerances import assert_close

PARAMS = Params(0.25)


def _entries(launch: Launch) -> Tables:
    """A launch's running sums as pieces, which the reference understands."""
    q, k = launch.cu_seqlens_q.long(), launch.cu_seqlens_k.long()
    left, right = (-1 if side is None else side for side in launch.window)
    rest = torch.tensor([left, right, 0]).expand(len(q) - 1, 3)
    return Tables(q, k, torch.cat([torch.stack([q[:-1], q[1:], k[:-1], k[1:]], 1), rest], 1), q)


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params) -> None:
    assert q.shape[0] == launch.stop == int(launch.cu_seqlens_q[-1])
    assert k.shape[0] == int(launch.cu_seqlens_k[-1])
    assert lse.stride(1) == 1
    computed = reference.forward(q, k, v, _entries(launch), params)
    # Rows without a key are garbage when their query is.
    unseen = (computed[1] == -torch.inf).T[..., None] & q.isnan().any()
    out.copy_(computed[0].masked_fill(unseen, torch.nan))
    lse.copy_(computed[1])


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    launch: Launch,
    params: Params,
) -> None:
    overlap = launch.overlap
    if overlap is not None:
        overlap.keys_needed()
        # Of exactly the keys that the launch gets.
        assert [x.data_ptr() for x in overlap.grads] == [dk.data_ptr(), dv.data_ptr()]
        assert [x.shape for x in overlap.grads] == [dk.shape, dv.shape]
        if overlap.mxint15:
            assert overlap.holder_ptr is not None
            assert overlap.holder_ptr.shape[0] == dk.shape[0] + 1
            assert int(overlap.holder_ptr[0]) == min(launch.keys[0], launch.keys[1])
    # A tile of such rows would poison its neighbours.
    assert not q.isnan().any()
    assert not dout.isnan().any()
    for target, grad in zip(
        (dq, dk, dv), reference.backward(dout, q, k, v, out, lse, _entries(launch), params), strict=True
    ):
        target.copy_(grad)
    if launch.overlap is not None:
        launch.overlap.gradients_written()


def _run(case: Case) -> tuple[Tensor, ...]:
    out, lse = varlen.run_forward(_forward, case.q, case.k, case.v, case.tables, PARAMS)
    grads = varlen.run_backward(_backward, case.dout, case.q, case.k, case.v, out, lse, case.tables, PARAMS)
    return out, lse, *grads


@drawn(60)
@given(documents(60), masks(), st.integers(1, 3), st.data())
def test_launches_cover_every_piece(row: Documents, mask: PackedMask, world_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    layout = data.draw(st.sampled_from(("contiguous", "dual_chunk", "balanced")))
    case = make_case(row, mask, world_size=world_size, rank=rank, layout=layout)
    expected = case.oracle(PARAMS)
    clean = _run(case.poisoned(0.0))
    poisoned = _run(case.poisoned(torch.nan))
    for name, want, first, second in zip(("out", "lse", "dq", "dk", "dv"), expected, clean, poisoned, strict=True):
        assert torch.equal(first, second), name
        if name == "lse":
            torch.testing.assert_close(first, want)
        else:
            assert_close(first, want, what=name)
    out, lse, dq = poisoned[:3]
    assert not out[case.padding].any()
    assert not dq[case.padding].any()
    assert (lse[:, case.padding] == -torch.inf).all()


@drawn(60)
@given(documents(60), masks(), st.integers(1, 3), st.data())
def test_parts_give_what_one_piece_gives(
    row: Documents, mask: PackedMask, world_size: int, data: st.DataObject
) -> None:
    layout = data.draw(st.sampled_from(("contiguous", "dual_chunk", "balanced")))
    case = make_case(row, mask, world_size=world_size, layout=layout).poisoned(torch.nan)
    expected = _run(case)
    cu_q, cu_k = case.tables.cu_seqlens_q, case.tables.cu_seqlens_k
    n = data.draw(st.integers(1, len(cu_q) - 1))
    cut, early = (n, int(cu_q[n]), int(cu_k[n])), data.draw(st.integers(0, 1))
    several = len(launches_of(case.tables, case.q.shape[0])) > 1  # is never cut
    # What the early part reads may lie elsewhere.
    keys, near = (case.k, case.v), None
    if not several and 0 < cut[2] < int(cu_k[-1]) and data.draw(st.booleans()):
        part = slice(cut[2], None) if early else slice(cut[2])
        near, keys = tuple(x[part].clone() for x in keys), tuple(x.clone() for x in keys)
        for x in keys:
            x[part] = torch.nan
    parts = Parts(cut, early, (cu_q[n:] - cu_q[n], cu_k[n:] - cu_k[n]), near)
    overlap = None if several else ForwardOverlap(parts)
    got = varlen.run_forward(_forward, case.q, keys[0], keys[1], case.tables, PARAMS, overlap)
    calls: list[str] = []
    columns = case.k[0].numel()
    rows = torch.full((case.k.shape[0], columns + case.v[0].numel()), torch.nan, dtype=case.k.dtype)
    grads = rows[:, :columns].view(case.k.shape), rows[:, columns:].view(case.v.shape)
    used = int(case.tables.pieces[:, 3].max())

    def written() -> None:
        calls.append("written")
        assert torch.equal(rows[:used], torch.cat([x.flatten(1) for x in expected[3:]], 1)[:used])
        assert rows[used:].isnan().all()  # peers may still read there

    holder_ptr = torch.arange(rows.shape[0] + 1, dtype=torch.int32)
    back = BackwardOverlap(grads, lambda: calls.append("needed"), written, True, holder_ptr)
    dq, *_ = varlen.run_backward(_backward, case.dout, case.q, case.k, case.v, *got, case.tables, PARAMS, back)
    assert calls == ["needed", "written"]
    for name, want, found in zip(("out", "lse", "dq"), expected[:3], (*got, dq), strict=True):
        assert torch.equal(found, want), name
    if near is not None:
        _check_parts(case, parts, keys, got, expected)
    params = replace(PARAMS, unrounded=True)
    unrounded = varlen.run_backward(_backward, case.dout, case.q, case.k, case.v, *got, case.tables, params)
    for name, want, found in zip(("dq", "dk", "dv"), expected[2:], unrounded, strict=True):
        assert torch.equal(found, want), name
        assert name == "dq" or found.dtype == torch.float32


def _check_parts(
    case: Case, parts: Parts, keys: tuple[Tensor, ...], got: tuple[Tensor, Tensor], expected: tuple[Tensor, ...]
) -> None:
    """A backward in two parts, which writes the early keys' gradients elsewhere."""
    calls: list[str] = []
    found = [torch.full_like(x, torch.nan) for x in (case.k, case.v)]
    near = parts.keys(parts.early)
    early, late = (
        BackwardOverlap(
            (found[0][where], found[1][where]),
            lambda of=of: calls.append(f"{of} needed"),
            lambda of=of: calls.append(of),
        )
        for of, where in (("early", near), ("late", parts.keys(1 - parts.early)))
    )
    both = BackwardParts(parts, (early, late))
    dq, *_ = varlen.run_backward(_backward, case.dout, case.q, keys[0], keys[1], *got, case.tables, PARAMS, both)
    assert calls == ["late needed", "late", "early needed", "early"]
    used = int(case.tables.pieces[:, 3].max())
    for want, grad in zip(expected[2:], (dq, *(x[:used] for x in found)), strict=True):
        assert torch.equal(grad, want[: len(grad)])
    assert all(x[used:].isnan().all() for x in found)


@drawn(30)
@given(documents(60), masks(), st.integers(1, 3))
def test_heads_one_after_another_give_what_all_give(row: Documents, mask: PackedMask, world_size: int) -> None:
    case = make_case(row, mask, world_size=world_size).poisoned(torch.nan)
    assume(len(launches_of(case.tables, case.q.shape[0])) == 1)
    expected = _run(case)
    found = [torch.full_like(x, torch.nan) for x in expected]
    for stage in (slice(1), slice(1, 2)):
        heads = slice(2 * stage.start if stage.start else 0, 2 * stage.stop)
        rows = case.q[:, heads], case.k[:, stage], case.v[:, stage]
        into = found[0][:, heads], found[1][heads]
        varlen.run_forward(_forward, *rows, case.tables, PARAMS, into=into)
        overlap = BackwardOverlap((found[3][:, stage], found[4][:, stage]))
        dq = found[2][:, heads]
        varlen.run_backward(_backward, case.dout[:, heads], *rows, *into, case.tables, PARAMS, overlap, into=dq)
    for x, lse in ((found[0], found[1]), (found[2], None)):
        zero_gaps(x, lse, case.tables.cu_seqlens_q, case.tables.cu_seqlens_k)
    used = int(case.tables.pieces[:, 3].max())
    for name, want, got in zip(("out", "lse", "dq", "dk", "dv"), expected, found, strict=True):
        read = slice(used if name in ("dk", "dv") else None)
        assert torch.equal(want[read], got[read]), name


def test_the_late_part_follows_all_but_the_early_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic torch fills new memory by a kernel, which must not run after the late part has written there."""
    log: list[str] = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr(cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(cuda, "on", nullcontext)
    unused = torch.zeros(2, dtype=torch.int32)
    parts = Parts((1, 1, 1), 1, (unused, unused))
    overlap = ForwardOverlap(parts, side)  # type: ignore[arg-type]
    overlap.run([lambda: log.append("late part"), lambda: log.append("early part")])
    assert log == ["side waits for main", "early part", "late part", "main waits for side"]
    log.clear()
    nothing = BackwardOverlap((unused, unused))
    back = BackwardParts(parts, (nothing, nothing), side)  # type: ignore[arg-type]
    back.run([lambda _: log.append("late part"), lambda _: log.append("early part")])
    assert log == ["side waits for main", "late part", "early part", "main waits for side"]


def test_padding_at_the_end_is_left_out_without_a_copy() -> None:
    case = make_case(Documents.from_lengths([20, 13], 50), PackedMask(), world_size=1)
    (launch,) = launches_of(case.tables, case.q.shape[0])
    assert (launch.stop, launch.gaps, launch.dirty) == (33, False, False)
    assert launch.cu_seqlens_q.tolist() == [0, 20, 33]


def test_windows_that_a_documents_end_clips_get_a_launch() -> None:
    case = make_case(Documents.from_lengths([200]), PackedMask(False, (8, 4)), layout="dual_chunk")
    first, *others = launches_of(case.tables, case.q.shape[0])
    assert first.rows is None
    assert others
    assert all(launch.rows is not None and launch.window != first.window for launch in others)
    assert not first.dirty


def test_launches_are_made_once_per_batch() -> None:
    case = make_case(Documents.from_lengths([40, 24]), PackedMask(), world_size=2)
    launches = launches_of(case.tables, 32)
    assert launches_of(case.tables, 32) is launches
    case.tables.pieces.copy_(case.tables.pieces.clone())
    assert launches_of(case.tables, 32) is not launches


def test_gradients_of_keys_share_one_buffer() -> None:
    case = make_case(Documents.from_lengths([40, 24]), PackedMask(), world_size=2)
    *_, dk, dv = _run(case)
    assert dk._base is dv._base is not None
    assert dk._base.is_contiguous()


@pytest.mark.parametrize("mask", [PackedMask(), PackedMask(False, (3, 3))])
def test_no_document(mask: PackedMask) -> None:
    case = make_case(Documents.from_lengths([], 12), mask, world_size=2).poisoned(torch.nan)
    out, lse, dq, dk, dv = _run(case)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in (dq, dk, dv))
