"""Every op against its schema, its fake and dense attention; every exchange over gloo against one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.select import Capabilities, Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.exchange import exchange_kv
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.routes.push import push_route
from tests.helpers.amount import drawn
from tests.helpers.packed import dense_attention, in_documents, make_schedule, run_rank, tensors
from tests.helpers.pool import Pool
from tests.helpers.tolerances import assert_close

MASKS = (
    PackedMask(),
    PackedMask(causal=False),
    PackedMask(window=(3, 0)),
    PackedMask(causal=False, window=(2, 4)),
    PackedMask(causal=False, window=(None, 2)),
    PackedMask(packed=False),
)
ops: Any = torch.ops.cp_rewrite
ALONE = Exchange("local", "", 1)


def make_qkv(rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, heads[0], dims[0]), (rows, heads[1], dims[0]), (rows, heads[1], dims[1])]
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def one_rank(lengths: list[int], mask: PackedMask) -> tuple[list[Documents], Any]:
    rows = [Documents.from_lengths(lengths)]
    return rows, make_schedule(rows, 1, "contiguous", mask)[0]


@pytest.mark.parametrize("transposed", [False, True])
def test_row_ops_pass_opcheck(transposed: bool) -> None:
    x = torch.randn(6, 8).t() if transposed else torch.randn(8, 6)
    rows = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    lists = torch.tensor([0, -1, -1, -1, 3, 4, 5], dtype=torch.int32)
    ptr = torch.tensor([6, 6, 6, 7], dtype=torch.int32)
    opcheck(ops.gather_rows.default, (x, rows))
    opcheck(ops.sum_rows.default, (x, ptr, lists, 3))


@pytest.mark.parametrize(
    ("transposed", "keep_kv", "with_sinks"),
    [
        pytest.param(*case, marks=pytest.mark.slow if sum(case) % 2 else ())
        for case in itertools.product([False, True], repeat=3)
    ],
)
def test_attention_passes_opcheck(transposed: bool, keep_kv: bool, with_sinks: bool) -> None:
    sinks = torch.linspace(-1, 1, 4) if with_sinks else None
    _, schedule = one_rank([5, 0, 7, 1], PackedMask())
    tables, route = tensors(schedule, 0, "local")
    q, k, v = make_qkv(13, (4, 2), (8, 6), torch.float32)
    if transposed:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    kv = exchange_kv(k, v, route, ALONE)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    attributes = (0.3, 0.0, "reference", False, keep_kv, "local", "", 1, sinks)
    opcheck(ops.packed_attention.default, (q, k, v, kv, *tables, route, *attributes))
    out, lse = ops.packed_attention(q, k, v, kv, *tables, route, *attributes)
    saved = [x.detach() for x in (out, q, kv, out, lse)]
    opcheck(ops.packed_attention_backward.default, (*saved, *tables, 2, 6, 0.3, 0.0, "reference", False, True))


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_pushed_attention_traces_with_its_gradients(
    keep_kv: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on GPUs only; what compilers see of it, shapes, dtypes and gradients, is told on the CPU."""
    monkeypatch.setattr("cp_rewrite.ops.attention.capabilities", lambda _: Capabilities(overlaps_exchange=True))
    schedule, _ = make_schedule([Documents.from_lengths([5, 0, 17, 3])], 2, "balanced", PackedMask())
    route = [torch.from_numpy(array) for array in push_route(schedule, 0).values()]
    tables = [torch.from_numpy(array) for array in schedule.attention(0).values()]
    inputs = [*make_qkv(schedule.local_rows, (4, 2), (8, 6), torch.bfloat16), *([torch.zeros(4)] if sinks else [])]

    def step(leaves: list[Tensor], tables: list[Tensor], route: list[Tensor]) -> tuple[Tensor, ...]:
        q, k, v, *own = leaves
        exchange = Exchange("push", "group", 2)
        out, lse = attend(q, k, v, tables, route, exchange, Params(0.3), "fa4", keep_kv, own[0] if own else None)
        return out, lse, *torch.autograd.grad(out.float().sum(), leaves)

    leaves = [x.requires_grad_() for x in inputs]
    traced = make_fx(step, tracing_mode="fake")(leaves, tables, route)
    found = [node.meta["val"] for node in traced.graph.find_nodes(op="output")[0].args[0]]
    rows, wide = schedule.local_rows, torch.float32
    assert [(x.shape, x.dtype) for x in found[:2]] == [((rows, 4, 6), torch.bfloat16), ((4, rows), wide)]
    assert [(x.shape, x.dtype) for x in found[2:]] == [(x.shape, x.dtype) for x in inputs]
    names = [str(node.target) for node in traced.graph.nodes if "cp_rewrite.push" in str(node.target)]
    assert names == ["cp_rewrite.pushed_attention.default", "cp_rewrite.pushed_attention_backward.default"]
    (backward,) = traced.graph.find_nodes(op="call_function", target=ops.pushed_attention_backward.default)
    assert (backward.args[4] is not None) == keep_kv


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_gradcheck(mask: PackedMask) -> None:
    """With a soft cap: test_gradcheck.py has attention without one."""
    _, schedule = one_rank([5, 1, 2], mask)
    q, k, v = (x.requires_grad_() for x in make_qkv(8, (2, 1), (2, 1), torch.float64))
    params = Params(0.5, 1.5)
    assert torch.autograd.gradcheck(lambda q, k, v: run_rank(q, k, v, schedule, 0, ALONE, params), (q, k, v))


@pytest.mark.parametrize("block", [1, 1 << 22], ids=["row_by_row", "at_once"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_reference_matches_dense(monkeypatch: pytest.MonkeyPatch, mask: PackedMask, block: int) -> None:
    monkeypatch.setattr(reference, "_BLOCK", block)
    rows, schedule = one_rank([5, 0, 7, 1, 23], mask)
    q, k, v = (x.requires_grad_() for x in make_qkv(36, (4, 2), (8, 6), torch.float64))
    params = Params(8**-0.5)
    ours, dense = run_rank(q, k, v, schedule, 0, ALONE, params), dense_attention(q, k, v, rows, mask, params)
    dout = torch.randn_like(dense)
    pairs = zip(torch.autograd.grad(ours, (q, k, v), dout), torch.autograd.grad(dense, (q, k, v), dout), strict=True)
    assert_close(ours, dense)
    for mine, theirs in pairs:
        assert_close(mine, theirs)


def test_poisoned_padding_stays_out() -> None:
    documents = Documents.from_cu_seqlens([0, 5, 12], 20, [0, 8, 20])
    schedule, _ = make_schedule([documents], 1, "contiguous", PackedMask())
    q, k, v = make_qkv(20, (4, 2), (8, 8), torch.float32)
    padding = torch.from_numpy(documents.document_ids() < 0)
    outputs: list[list[Tensor]] = []
    for poison in (0.0, torch.nan):
        inputs = [x.clone() for x in (q, k, v)]
        for x in inputs:
            x[padding] = poison
        inputs = [x.requires_grad_() for x in inputs]
        out = run_rank(*inputs, schedule, 0, ALONE, Params(0.3))  # type: ignore[arg-type]
        dout = torch.ones_like(out)
        dout[padding] = poison
        outputs.append([out, *torch.autograd.grad(out, inputs, dout)])
    for clean, poisoned in zip(*outputs, strict=True):
        assert torch.equal(clean, poisoned)
    out, *gradients = outputs[1]
    check_gaps(out, padding, gradients)


def check_gaps(out: Tensor, gaps: Tensor, gradients: Sequence[Tensor]) -> None:
    """Rows of no document: the output of the last token before, of the first where there is none; no gradients."""
    assert all((x[gaps] == 0).all() for x in gradients), "gradients of padding rows are not exact zeros"
    rows = (~gaps).nonzero().flatten()
    donors = rows[(torch.searchsorted(rows, gaps.nonzero().flatten()) - 1).clamp(min=0)] if len(rows) else rows
    assert torch.equal(out[gaps][: len(donors)], out[donors])


def rank_gradients(mesh: DeviceMesh, case: dict[str, Any], exchange: str, keep_kv: bool) -> list[Any]:
    """out, dq, dk, dv of one rank, and its token indices."""
    rank, world_size = mesh.get_local_rank(), mesh.size()
    schedule, indices = make_schedule(case["rows"], world_size, case["layout"], case["mask"])
    index = (indices[rank] + np.arange(len(case["rows"]))[:, None] * case["rows"][0].total).reshape(-1)
    holes = indices[rank].reshape(-1) < 0
    hole = torch.from_numpy(holes)
    local = [x[np.where(holes, 0, index)] for x in (*case["qkv"], case["dout"])]
    for x in local:
        x[hole] = torch.nan
    q, k, v = (x.requires_grad_() for x in local[:3])
    how = Exchange(exchange, mesh.get_group().group_name, world_size)
    runs: list[list[Tensor]] = []
    for _ in range(2):
        out = run_rank(q, k, v, schedule, rank, how, case["params"], keep_kv)
        runs.append([out, *torch.autograd.grad(out, (q, k, v), local[3])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "two runs differ"
    assert all((x[hole] == 0).all() for x in runs[0][1:]), "gradients of fill are not exact zeros"
    assert torch.isfinite(runs[0][0]).all()
    return [x.detach()[~hole] for x in runs[0]] + [index[~holes]]


def check_against_dense(pool: Pool, case: dict[str, Any], world_size: int, exchange: str, keep_kv: bool) -> None:
    q, k, v = (x.clone().requires_grad_() for x in case["qkv"])
    dense = dense_attention(q, k, v, case["rows"], case["mask"], case["params"])
    expected = [dense, *torch.autograd.grad(dense, (q, k, v), case["dout"])]
    actual = [torch.full_like(x, torch.nan) for x in expected]
    for *parts, index in pool.run(world_size, rank_gradients, case, exchange, keep_kv):
        for whole, part in zip(actual, parts, strict=True):
            whole[index] = part
    if case["mask"].packed:
        actual[0] = in_documents(actual[0], case["rows"])
    for mine, theirs, name in zip(actual, expected, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(mine, theirs, what=f"{name} {case['layout']} {exchange} {case['mask']}")


def make_case(lengths: list[list[int]], layout: str, mask: PackedMask, dtype: torch.dtype) -> dict[str, Any]:
    total = max(1, max(sum(row) for row in lengths))
    rows = [Documents.from_lengths(row, total) for row in lengths]
    qkv = make_qkv(len(rows) * total, (4, 2), (8, 6), dtype)
    dout = torch.randn(len(rows) * total, 4, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return {"rows": rows, "layout": layout, "mask": mask, "qkv": qkv, "dout": dout, "params": Params(0.4)}


def in_pairs() -> list[Any]:
    """Masks, layouts and exchanges: any two of them meet in one case; the others are slow."""
    return [
        pytest.param(mask, layout, exchange, marks=pytest.mark.slow if (i + j + k) % 3 else ())
        for i, mask in enumerate(MASKS)
        for j, layout in enumerate(LAYOUTS)
        for k, exchange in enumerate(("all_gather", "needed", "p2p"))
    ]


@pytest.mark.parametrize(("mask", "layout", "exchange"), in_pairs(), ids=str)
def test_exchanges_match_dense(pool: Pool, mask: PackedMask, layout: str, exchange: str) -> None:
    case = make_case([[13, 0, 1, 7, 29, 2]], layout, mask, torch.float64)
    check_against_dense(pool, case, 3, exchange, keep_kv=layout == "balanced")


lengths_strategy = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 11, 17, 31, 64]), min_size=1, max_size=9)


@drawn(25)
@given(
    lengths=st.lists(lengths_strategy, min_size=1, max_size=2),
    world_size=st.sampled_from([2, 3, 4]),
    layout=st.sampled_from(LAYOUTS),
    mask=st.sampled_from(MASKS),
    exchange=st.sampled_from(["all_gather", "needed", "p2p"]),
)
def test_exchanges_match_dense_on_drawn_lengths(
    pool: Pool, lengths: list[list[int]], world_size: int, layout: str, mask: PackedMask, exchange: str
) -> None:
    check_against_dense(pool, make_case(lengths, layout, mask, torch.float32), world_size, exchange, keep_kv=False)
