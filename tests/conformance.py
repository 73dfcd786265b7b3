"""The cells of the conformance table, and what runs one: every exchange through the op layer, NaN in all padding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.active import ActivePlan, PlanInput
from cp_rewrite.documents import Documents
from cp_rewrite.heads import HeadDeal
from cp_rewrite.kernels.params import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import HeadScatter, attend
from cp_rewrite.ops.max_logits import max_logits
from cp_rewrite.plan import plan_batch
from cp_rewrite.sharding import split_exchange
from tests.packed import dense_attention, dense_logits
from tests.tolerances import relative_error, tolerance

EXCHANGES = ("all_gather", "needed", "p2p", "a2a", "a2a+all_gather", "a2a+needed", "a2a+p2p")
LAYOUTS = ("contiguous", "head_tail", "dual_chunk", "balanced")
MASKS = (
    PackedMask(),
    PackedMask(causal=False),
    PackedMask(window=(5, 0)),
    PackedMask(causal=False, window=(6, 6)),
    PackedMask(causal=False, window=(None, 3)),
    PackedMask(packed=False),
)
PACKS = {
    # Lengths that nothing divides, of 0 and of 1; more capacity than documents; gaps after each document; two rows.
    "none": (Documents.from_lengths([13, 0, 1, 7, 29, 2, 1]),),
    "tail": (Documents.from_lengths([21, 1, 17], 60),),
    "between": (Documents.from_cu_seqlens([0, 5, 6, 6, 29], 48, [0, 8, 9, 16, 48]),),
    "two rows": (Documents.from_lengths([9, 30, 1], 44), Documents.from_cu_seqlens([0, 3, 20], 44, [0, 4, 44])),
    "empty ranks": (Documents.from_lengths([3]),),
}
LONG_PACKS = {
    # Around kernels' tiles and far from them.
    "dense": (Documents.from_lengths([700, 33, 1, 1500, 301, 128]),),
    "tail of 366": (Documents.from_lengths([700, 33, 1, 1500], 2600),),
    "gaps": (Documents.from_cu_seqlens([0, 640, 673, 674, 2000], 2600, [0, 704, 768, 800, 2200]),),
}
TE_SIZES = {"s 256": 256, "s 4096": 4096}


def te_packs(name: str, size: int) -> dict[str, tuple[Documents, ...]]:
    """TransformerEngine's batches: two documents of up to `size` tokens, without and with padding to that."""
    lengths = [size * 3001 // 4096, size * 1777 // 4096]
    padded = Documents.from_cu_seqlens([0, lengths[0], sum(lengths)], 2 * size, [0, size, 2 * size])
    return {f"b 2, {name}": (Documents.from_lengths(lengths),), f"b 2, {name}, padded": (padded,)}


ROWS = PACKS | LONG_PACKS | te_packs("s 256", 256) | te_packs("s 4096", 4096)
TE_SHAPES = (
    ((12, 12), (128, 128)), ((32, 4), (128, 128)), ((12, 2), (128, 128)), ((32, 32), (128, 128)),
    ((128, 128), (192, 128)), ((12, 12), (192, 128)), ((128, 128), (128, 64)), ((12, 12), (128, 64)),
    ((64, 8), (64, 64)),
)  # fmt: skip
HEADS = ((4, 4), (8, 2), (4, 1), (12, 2), (3, 3), (6, 2))
DIMS = ((8, 8), (24, 16), (16, 8), (64, 64), (192, 128), (128, 64), (256, 256))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Cell:
    """One case: what is attended to, and how."""

    exchange: str
    layout: str
    mask: PackedMask
    padding: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    world_size: int
    sinks: bool = False
    softcap: float = 0.0
    kernel: str = "reference"
    keep_kv: bool = False
    deterministic: bool = True

    @property
    def rows(self) -> tuple[Documents, ...]:
        """The batch."""
        return ROWS[self.padding]

    @property
    def params(self) -> Params:
        return Params(self.dims[0] ** -0.5, self.softcap, self.deterministic)

    def padding_rows(self) -> Tensor:
        """(B T,) bool: rows of no document."""
        return torch.from_numpy(np.concatenate([row.document_ids() < 0 for row in self.rows]))

    def __str__(self) -> str:
        named = {"sinks": self.sinks, "soft cap": self.softcap, "keep_kv": self.keep_kv}
        extras = [name for name, on in named.items() if on]
        columns = (
            self.exchange, self.layout, self.mask, self.padding, f"{self.heads[0]}/{self.heads[1]}",
            f"{self.dims[0]}/{self.dims[1]}", str(self.dtype).removeprefix("torch."), self.world_size,
            ", ".join(extras) or "–",
        )  # fmt: skip
        return " | ".join(map(str, columns))


HEADER = "exchange | layout | mask | padding | heads | head dims | dtype | ranks | extras"


def cells() -> list[Cell]:
    """Every exchange x layout x mask x padding, shapes taking turns; then every exchange x heads x dims x dtype."""
    shapes = itertools.cycle(itertools.product(HEADS, DIMS[:3], DTYPES))
    extras = itertools.cycle([(False, 0.0), (False, 0.0), (True, 0.0), (False, 2.0), (True, 2.0)])
    found = [
        Cell(exchange, layout, mask, padding, *next(shapes), ranks, *next(extras))
        for exchange in EXCHANGES
        for layout, mask, padding in itertools.product(LAYOUTS, MASKS, PACKS)
        for ranks in _ranks(exchange)
    ]
    layouts, masks, paddings = itertools.cycle(LAYOUTS), itertools.cycle(MASKS), itertools.cycle(PACKS)
    found += [
        Cell(exchange, next(layouts), next(masks), next(paddings), heads, dims, dtype, _ranks(exchange)[-1])
        for exchange, heads, dims, dtype in itertools.product(EXCHANGES, HEADS, DIMS, DTYPES)
    ]
    return found


def te_cells(name: str, kernel: str = "reference", exchanges: tuple[str, ...] = EXCHANGES) -> list[Cell]:
    """TransformerEngine's shapes x masks x padding on 2 ranks and a grid of 4; dtypes and exchanges take turns."""
    size = TE_SIZES[name]
    masks = (
        PackedMask(),
        PackedMask(causal=False),
        PackedMask(window=(size // 8, 0)),
        PackedMask(window=(size // 32, 0)),
        PackedMask(causal=False, window=(size // 8, size // 8)),
    )
    dtypes, turns = itertools.cycle((torch.bfloat16, torch.float16)), itertools.cycle(exchanges)
    return [
        Cell(exchange, "dual_chunk", mask, padding, heads, dims, next(dtypes), ranks, kernel=kernel)
        for (heads, dims), mask, padding in itertools.product(TE_SHAPES, masks, te_packs(name, size))
        for exchange in (next(turns), next(turns))
        for ranks in ((4,) if exchange.startswith("a2a+") else (2,))
    ]


def _ranks(exchange: str) -> tuple[int, ...]:
    return (4,) if exchange.startswith("a2a+") else (2, 3, 4)


@functools.cache
def grid_mesh(kind: str, outer: int, inner: int) -> DeviceMesh:
    """Made once per process: every mesh makes process groups."""
    return DeviceMesh(kind, torch.arange(outer * inner).view(outer, inner), mesh_dim_names=("outer", "inner"))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


@dataclass(frozen=True)
class RankAttention:
    """A rank's part of one cell. run: q, k, v and sinks -> out. largest: q, k, v -> the largest logit per head.
    indices: (B, T_l) tokens of this rank, -1 for none."""

    run: Callable[..., Tensor]
    largest: Callable[[Tensor, Tensor, Tensor], Tensor]
    indices: NDArray[np.int64]


def attend_on(
    mesh: DeviceMesh | int, rows: tuple[Documents, ...], cell: Cell, params: Params, device: torch.device | None = None
) -> RankAttention:
    """Plan and tables of one cell. `local` is the exchange of a mesh of 1, `pull` is `needed` between GPUs."""
    if not isinstance(mesh, int):
        device = device_of(mesh)
        if cell.exchange.startswith("a2a+"):
            mesh = grid_mesh(mesh.device_type, 2, mesh.size() // 2)
    annotated: Any = "needed" if cell.exchange in ("local", "pull") else cell.exchange
    sharding = cp.Sharding(mesh, {"x": 1}, cp.DocumentIds("x"), cast(Any, cell.layout), annotated)
    plan = plan_batch(rows, sharding.world_size, cell.layout, cell.mask)
    active = ActivePlan(sharding, plan, device or torch.device("cpu"))
    inputs = [active.tensor(key) for key in PlanInput.of_site(cell.mask, cell.exchange)]
    where, heads = _way(sharding, cell)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(q, k, v, inputs[:4], inputs[4:], where, params, cell.kernel, cell.keep_kv, sinks, heads)[0]

    def largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return max_logits(q, k, v, inputs[:4], inputs[4:], where, params, heads)

    return RankAttention(run, largest, active.indices())


def _way(sharding: cp.Sharding, cell: Cell) -> tuple[tuple[str, str, int], HeadScatter | None]:
    """`where` and `heads` of `attend`."""
    scattered, outer = split_exchange(cell.exchange)
    if not scattered:
        return (outer, sharding.group_name, sharding.world_size), None
    heads = HeadScatter(HeadDeal.best(*cell.heads, sharding.grid[1]), cell.dims, sharding.grid_groups[1])
    return (outer, sharding.grid_groups[0], sharding.grid[0]), heads


def make_inputs(cell: Cell, device: str | torch.device = "cpu") -> list[Tensor]:
    """q, k, v, dout of all rows, in the cell's dtype, and sinks."""
    generator = torch.Generator(device).manual_seed(0)
    (hq, hkv), (d, v), size = cell.heads, cell.dims, len(cell.rows) * cell.rows[0].total
    shapes = [(size, hq, d), (size, hkv, d), (size, hkv, v), (size, hq, v), (hq,)]
    made = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    return [x.to(cell.dtype) for x in made[:4]] + made[4:]


def run_cell(mesh: DeviceMesh, cell: Cell) -> list[Tensor]:
    """out, dq, dk, dv of this rank, sinks' gradient if any, largest logits, and the flat global rows of the first."""
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
    q, k, v = (x.requires_grad_() for x in local[:3])
    leaves = [q, k, v] + [inputs[4].requires_grad_()] * cell.sinks
    runs: list[list[Tensor]] = []
    for _ in range(2 if cell.deterministic else 1):
        out = attention.run(*leaves)
        runs.append([out, *torch.autograd.grad(out, leaves, local[3])])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True)), f"two runs differ: {cell}"
    assert all((x[holes] == 0).all() for x in runs[0][:4]), f"padding is not exact zero: {cell}"
    return [*(x.detach()[~holes] for x in runs[0][:4]), *runs[0][4:], attention.largest(q, k, v), index[~holes]]


def run_cells(mesh: DeviceMesh, cases: list[Cell]) -> list[list[Tensor]]:
    """`run_cell` of each."""
    return [run_cell(mesh, cell) for cell in cases]


def errors(cell: Cell, parts: list[list[Tensor]]) -> Iterator[tuple[str, float]]:
    """Relative errors of the ranks' results against dense attention in fp64."""
    *inputs, sinks = make_inputs(cell)
    q, k, v, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v, *([sinks.double()] if cell.sinks else []))]
    dense = dense_attention(q, k, v, cell.rows, cell.mask, cell.params, *leaves[3:])
    expected = [dense, *torch.autograd.grad(dense, leaves, dout)]
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        whole = torch.full_like(expected[i], torch.nan)
        for part in parts:
            whole[part[-1]] = part[i].double()
        assert not cell.mask.packed or (whole[cell.padding_rows()] == 0).all(), f"{name} in padding not zero: {cell}"
        yield name, relative_error(whole, expected[i])
    if cell.sinks:
        yield "dsinks", relative_error(torch.stack([part[4] for part in parts]).sum(0), expected[4])
    largest = dense_logits(q.detach(), k.detach(), cell.rows, cell.mask, cell.params).amax((1, 2))
    for part in parts:
        yield "largest logits", logits_error(part[-2], largest)


def logits_error(actual: Tensor, expected: Tensor) -> float:
    """Relative error of the largest logits (Hq,); infinite unless -inf stands for the same heads."""
    none = expected == -torch.inf
    if not torch.equal(actual == -torch.inf, none):
        return torch.inf
    return relative_error(actual.masked_fill(none, 0.0), expected.masked_fill(none, 0.0))


def limit(cell: Cell) -> float:
    """What rounding explains."""
    return tolerance(cell.dtype, 4096)
