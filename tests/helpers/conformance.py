"""Runs cells of the conformance table: any exchange through the op layer, NaN in all padding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.active import ActivePlan, activate, site_inputs
from cp_rewrite.batch.handed import Handed
from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import Params
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.scatter_heads import gather_heads
from cp_rewrite.passes.plan_sites import ranks_of
from cp_rewrite.planning.batch_plan import plan_batch
from tests.helpers.conformance_cells import Cell
from tests.helpers.packed import dense_attention, dense_logits
from tests.helpers.tolerances import relative_error, tolerance


@functools.cache
def grid_mesh(kind: str, outer: int, inner: int) -> DeviceMesh:
    """Made once per process: every mesh makes process groups."""
    return DeviceMesh(kind, torch.arange(outer * inner).view(outer, inner), mesh_dim_names=("outer", "inner"))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


@dataclass(frozen=True)
class RankAttention:
    """A rank's part of one cell. run: q, k, v and sinks -> out (R, Hq, V) and lse (Hq, R). indices: (B, T_l)
    tokens of this rank, -1 for none. largest: the largest logit per head of what ran since."""

    run: Callable[..., tuple[Tensor, Tensor]]
    largest: Callable[[], Tensor]
    indices: NDArray[np.int64]


def attend_on(
    mesh: DeviceMesh | int, rows: tuple[Documents, ...], cell: Cell, params: Params, device: torch.device | None = None
) -> RankAttention:
    """Plan and tables of one cell. `local` is the exchange of a mesh of 1, `push` is `needed` between GPUs."""
    if not isinstance(mesh, int):
        device = device_of(mesh)
        if cell.exchange.startswith("a2a+"):
            mesh = grid_mesh(mesh.device_type, 2, mesh.size() // 2)
    annotated: Any = "needed" if cell.exchange in ("local", "push") else cell.exchange
    sharding = cp.Sharding(mesh, {"x": 1}, cp.DocumentIds("x"), cast(Any, cell.layout), annotated, max_logits=True)
    plan = plan_batch(rows, sharding.world_size, cell.layout, cell.mask)
    active = ActivePlan(Handed(sharding, plan), device or torch.device("cpu"))
    inputs = [active.tensor(key) for key in site_inputs(cell.mask, cell.exchange)]
    exchange, heads = ranks_of(cell.exchange, cell.heads, cell.dims, sharding)
    name = f"cell of {cell.heads} heads"  # cells that only differ in heads have equal annotations

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        how = exchange, params, cell.kernel, cell.keep_kv, sinks, heads
        with activate(active):
            found = attend(q, k, v, inputs[:4], inputs[4:], *how, name)
        if heads is None:
            return found[0], found[1]
        order, inverse = inputs[-2:]
        # The lse of this rank's heads, (hq, A R), goes back as outputs of one column do.
        return found[0], gather_heads(found[1].t().unsqueeze(2), order, inverse, heads).squeeze(2).t()

    def largest() -> Tensor:
        return cp.max_logits(sharding)[name]

    return RankAttention(run, largest, active.plan.local_indices(active.sharding.rank))


def make_inputs(cell: Cell, device: str | torch.device = "cpu") -> list[Tensor]:
    """q, k, v, dout of all rows, in the cell's dtype, and sinks."""
    generator = torch.Generator(device).manual_seed(0)
    (hq, hkv), (d, v), size = cell.heads, cell.dims, len(cell.rows) * cell.rows[0].total
    shapes = [(size, hq, d), (size, hkv, d), (size, hkv, v), (size, hq, v), (hq,)]
    made = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    return [x.to(cell.dtype) for x in made[:4]] + made[4:]


def run_cell(mesh: DeviceMesh, cell: Cell) -> dict[str, Tensor]:
    """out, dq, dk, dv and lse of this rank, rows first, for the flat global rows `index`; dsinks if any; and
    `largest`, the largest logits."""
    device = device_of(mesh)
    inputs = make_inputs(cell, device)
    if cell.mask.packed:
        for x in inputs[:4]:
            x[cell.padding_rows().to(device)] = torch.nan
    attention = attend_on(mesh, cell.rows, cell, cell.params)
    offsets = np.arange(len(cell.rows))[:, None] * cell.rows[0].total
    index = torch.from_numpy((attention.indices + offsets).reshape(-1)).to(device)
    holes = torch.from_numpy(attention.indices.reshape(-1) < 0).to(device)
    local = [x[index.clamp(min=0)] for x in inputs[:4]]
    for x in local:
        x[holes] = torch.nan
    leaves = [x.requires_grad_() for x in local[:3]] + [inputs[4].requires_grad_()] * cell.sinks
    runs: list[list[Tensor]] = []
    for _ in range(2 if cell.deterministic else 1):
        out, lse = attention.run(*leaves)
        runs.append([out, *torch.autograd.grad(out, leaves, local[3]), lse])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True)), f"two runs differ: {cell}"
    assert all((x[holes] == 0).all() for x in runs[0][1:4]), f"padding is not exact zero: {cell}"
    assert torch.isfinite(runs[0][0]).all(), f"padding is not finite: {cell}"
    rows = {name: x.detach()[~holes] for name, x in zip(("out", "dq", "dk", "dv"), runs[0][:4], strict=True)}
    rows |= {"lse": runs[0][-1].t()[~holes], "largest": attention.largest(), "index": index[~holes]}
    return {**rows, "dsinks": runs[0][4]} if cell.sinks else rows


def run_cells(mesh: DeviceMesh, cases: list[Cell]) -> list[dict[str, Tensor]]:
    """`run_cell` of each."""
    return [run_cell(mesh, cell) for cell in cases]


def errors(cell: Cell, parts: list[dict[str, Tensor]]) -> Iterator[tuple[str, float]]:
    """Relative errors of the ranks' results against dense attention in fp64."""
    *inputs, sinks = make_inputs(cell)
    q, k, v, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v, *([sinks.double()] if cell.sinks else []))]
    dense = dense_attention(q, k, v, cell.rows, cell.mask, cell.params, *leaves[3:])
    expected = [dense, *torch.autograd.grad(dense, leaves, dout)]

    def whole(name: str) -> Tensor:
        rows = dense.new_full((len(dense), *parts[0][name].shape[1:]), torch.nan)
        for part in parts:
            rows[part["index"]] = part[name].double()
        return rows

    for name, want in zip(("out", "dq", "dk", "dv"), expected[:4], strict=True):
        found = whole(name)
        if name == "out" and cell.mask.packed:  # copies of other rows
            found[cell.padding_rows()] = 0
        assert not cell.mask.packed or (found[cell.padding_rows()] == 0).all(), f"{name} in padding not zero: {cell}"
        yield name, relative_error(found, want)
    logits = dense_logits(q.detach(), k.detach(), cell.rows, cell.mask, cell.params)
    lse = logits.logsumexp(-1)
    if cell.sinks:
        lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks.double().detach()[:, None]))
        weight = torch.exp(sinks.double().detach()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        terms = weight.t()[..., None] * dense.detach() * dout  # whose sum over rows and V, taken off, is the gradient
        yield "dsinks", relative_error(torch.stack([part["dsinks"] for part in parts]).sum(0), expected[4], terms)
    yield "lse", logits_error(whole("lse"), lse.t())
    for part in parts:
        yield "largest logits", logits_error(part["largest"], logits.amax((1, 2)))


def logits_error(actual: Tensor, expected: Tensor) -> float:
    """Relative error of logits, of any shape; infinite unless -inf stands in the same places."""
    none = expected == -torch.inf
    if not torch.equal(actual == -torch.inf, none):
        return torch.inf
    return relative_error(actual.masked_fill(none, 0.0), expected.masked_fill(none, 0.0))


def limit(cell: Cell) -> float:
    """Relative error that rounding explains."""
    return tolerance(cell.dtype, 4096)
