"""The cells that run between GPUs, with every kernel; what runs them, and the report. Runs on gloo all the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.select import ORDER, PAIRS, AttentionSpec, DeviceFacts, device_facts, reasons
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.names import split_exchange
from cp_rewrite.planning.routes.head_deal import HeadDeal
from tests.helpers.conformance import attend_on, device_of, logits_error, make_inputs, run_cell
from tests.helpers.conformance_cells import EXCHANGES as NAMES
from tests.helpers.conformance_cells import LAYOUTS, Cell, te_cells
from tests.helpers.tolerances import relative_error, tolerance

CAUSAL, FULL = PackedMask(), PackedMask(causal=False)
WINDOW, BOTH = PackedMask(window=(200, 0)), PackedMask(causal=False, window=(100, 60))
SPANS, SPANS_IN_WINDOW, TREE = PackedMask(spans=True), PackedMask(window=(200, 0), spans=True), PackedMask(tree=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXCHANGES = ("push", *(name for name in NAMES if not name.startswith("a2a+")))
GRID_EXCHANGES = tuple(name for name in NAMES if name.startswith("a2a+"))
ROWS = ("out", "dq", "dk", "dv")
WHOLE = ("push", "needed", "all_gather")
"""Exchanges under which a query's keys are all there at once."""
SINGLE_GPU_RATIO = 1.2
"""How much larger an error may be than that of the same kernel over the whole row on one GPU, where `sums_travel`."""

# mask, padding, heads, head dims, dtype, further fields of Cell. 16/4 heads stay 4 to 1 when scattered over 4 ranks.
PROBLEMS: tuple[tuple[PackedMask, str, tuple[int, int], tuple[int, int], torch.dtype, dict[str, float]], ...] = (
    (CAUSAL, "dense", (16, 4), (128, 128), BF16, {}),
    (CAUSAL, "dense", (16, 4), (128, 128), BF16, {"deterministic": False}),
    (CAUSAL, "tail of 366", (16, 4), (128, 128), BF16, {}),
    (CAUSAL, "gaps", (16, 4), (128, 128), BF16, {}),
    (FULL, "gaps", (16, 4), (128, 128), BF16, {}),
    (WINDOW, "gaps", (16, 4), (128, 128), BF16, {}),
    (BOTH, "gaps", (16, 4), (128, 128), BF16, {}),
    (BOTH, "dense", (16, 4), (128, 128), BF16, {}),
    (SPANS, "dense", (16, 4), (128, 128), BF16, {}),
    (SPANS_IN_WINDOW, "gaps", (16, 4), (128, 128), BF16, {}),
    (TREE, "dense", (16, 4), (128, 128), BF16, {}),
    (TREE, "gaps", (8, 1), (64, 64), BF16, {}),
    (CAUSAL, "gaps", (16, 4), (128, 128), BF16, {"sinks": True}),
    (CAUSAL, "dense", (16, 4), (128, 128), BF16, {"softcap": 2.0}),
    (CAUSAL, "gaps", (16, 4), (128, 128), FP16, {}),
    (CAUSAL, "gaps", (8, 1), (64, 64), BF16, {}),
    (WINDOW, "gaps", (8, 8), (64, 64), FP16, {}),
    (CAUSAL, "gaps", (6, 6), (96, 96), BF16, {}),
    (CAUSAL, "gaps", (8, 8), (192, 128), BF16, {}),
    (CAUSAL, "gaps", (16, 4), (256, 256), BF16, {}),
)
EXACT: tuple[tuple[PackedMask, str, tuple[int, int], tuple[int, int], torch.dtype, dict[str, float]], ...] = (
    (CAUSAL, "gaps", (8, 2), (64, 64), FP32, {}),
    (BOTH, "tail of 366", (8, 8), (128, 64), BF16, {"sinks": True, "softcap": 2.0}),
)
"""For the reference kernel, which takes every shape and dtype."""


def sweep_cells(world_size: int, kernels: Sequence[str] = (*ORDER, *PAIRS)) -> list[Cell]:
    """Every kernel x problem x exchange on `world_size` ranks and, of 4, on 2; layouts and keep_kv take turns."""
    layouts, keep = itertools.cycle(LAYOUTS), itertools.cycle((False, False, True))
    found: list[Cell] = []
    for ranks in sorted({2, world_size}, reverse=True):
        for kernel in kernels:
            for *problem, fields in EXACT if kernel == "reference" else PROBLEMS:
                for exchange in EXCHANGES + GRID_EXCHANGES * (ranks == 4):
                    cell = Cell(exchange, next(layouts), *problem, ranks, **fields, kernel=kernel)  # type: ignore[arg-type]
                    keeps = next(keep) and not exchange.endswith("p2p")
                    found.append(dataclasses.replace(cell, keep_kv=keeps))
    return found


def te_sweep(world_size: int) -> list[Cell]:
    """TransformerEngine's cases at full size: torch's flash for all it can, FA4, which compiles for every shape and
    kind of mask, for head dims of qk and v that differ."""
    exchanges = EXCHANGES + GRID_EXCHANGES * (world_size == 4)
    found = te_cells("s 4096", "aten_flash", exchanges)
    for cell in te_cells("s 4096", "fa4", exchanges):
        if cell.dims[0] != cell.dims[1] and (cell.mask.window is None or not cell.mask.causal):
            found.append(dataclasses.replace(cell, dtype=BF16))
    return found


def sums_travel(cell: Cell) -> bool:
    """Are gradients of keys summed in fp32 by the kernel, and do these travel unrounded (`Capabilities`)?"""
    grouped = cell.heads[0] != cell.heads[1]
    return cell.kernel == "fa4" and cell.exchange in WHOLE and grouped


def unable(cell: Cell, facts: DeviceFacts) -> list[str]:
    """Why the cell can't run: what its kernel says of the heads that scattering leaves it, what writes to peers' memory
    need; empty: it can."""
    heads, heads_kv = cell.heads
    if split_exchange(cell.exchange)[0]:
        inner = cell.world_size if cell.exchange == "a2a" else cell.world_size // 2
        deal = HeadDeal.best(heads, heads_kv, inner)
        heads, heads_kv = deal.local, deal.local_kv
    window = (cell.mask.left, cell.mask.right) != (None, 0)
    spec = AttentionSpec(cell.dtype, *cell.dims, heads, heads_kv, not cell.mask.looks_ahead, window,
                         deterministic=cell.deterministic, softcap=cell.softcap)  # fmt: skip
    found = reasons(cell.kernel, spec, facts)
    return found + cuda.reasons() if cell.exchange == "push" else found


@dataclass(frozen=True)
class Outcome:
    """One cell on one rank. error: the worst over the limit; ratio: the worst over that of one GPU's whole row."""

    cell: Cell
    error: float
    ratio: float
    seconds: float
    failure: str = ""


def run_sweep(mesh: DeviceMesh, cells: Sequence[Cell], found: list[Outcome]) -> None:
    """All cells, on every rank; outcomes go to `found`. Each half of four ranks runs half of those of two."""
    for cell in [cell for cell in cells if cell.world_size == mesh.size()]:
        found.append(_outcome(mesh, cell))
    small = [cell for cell in cells if cell.world_size < mesh.size()]
    if small:
        halves = _halves(mesh.device_type)
        for cell in small[mesh.get_local_rank() // 2 :: 2]:
            found.append(_outcome(halves, cell))


@functools.cache
def _halves(kind: str) -> DeviceMesh:
    return DeviceMesh(kind, [[0, 1], [2, 3]], mesh_dim_names=("half", "cp"))["cp"]


def _outcome(mesh: DeviceMesh, cell: Cell) -> Outcome:
    start = time.perf_counter()
    error, ratio, failure = math.inf, math.nan, ""
    try:
        error, ratio, failure = _compare(mesh, cell)
    except Exception as caught:
        failure = f"{type(caught).__name__}: {str(caught).strip()[:300]}"
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()  # a broken context ends the sweep here
    return Outcome(cell, error, ratio, time.perf_counter() - start, failure)


def _compare(mesh: DeviceMesh, cell: Cell) -> tuple[float, float, str]:
    """(worst error over its limit, worst error over that of one process with the same kernel, what failed)."""
    device = device_of(mesh)
    expected = whole_row(_problem(cell, "reference"), True, device)
    alone = None if cell.kernel == "reference" else whole_row(_problem(cell, cell.kernel), False, device)
    found = _without_copies(_joined(mesh, run_cell(mesh, cell), expected), cell)
    worst, ratios, failed, limit = 0.0, list[float](), list[str](), tolerance(cell.dtype)
    for name, want in expected.items():
        error = (logits_error if name in ("lse", "largest") else relative_error)(found[name], want)
        if not error <= limit:
            failed.append(f"{name} {error:.1e} > {limit:.1e}")
        worst = max(worst, error / limit)
        if name in ROWS:
            if found[name][cell.padding_rows().to(device)].any():
                failed.append(f"{name} is not zero in padding")
            if alone is not None:
                ratios.append(error / relative_error(alone[name], want))
    if sums_travel(cell) and not max(ratios) <= SINGLE_GPU_RATIO:
        failed.append(f"{max(ratios):.2f} times the error of one GPU")
    return worst, max(ratios, default=math.nan), ", ".join(failed)


def _joined(mesh: DeviceMesh, parts: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ranks' results as those of the whole row, on every rank."""
    found: dict[str, Tensor] = {}
    for name in like:
        if name == "largest":
            found[name] = parts[name]
            continue
        whole = torch.zeros_like(like[name], memory_format=torch.contiguous_format)
        if name == "dsinks":
            whole += parts[name]
        else:
            whole[parts["index"]] = parts[name].float()
        dist.all_reduce(whole, group=mesh.get_group())
        found[name] = whole
    return found


def _problem(cell: Cell, kernel: str) -> Cell:
    """The cell on one process: the same for all exchanges and layouts."""
    return dataclasses.replace(cell, exchange="local", layout="contiguous", world_size=1, kernel=kernel, keep_kv=False)


@functools.lru_cache(maxsize=4)
def whole_row(problem: Cell, exact: bool, device: torch.device) -> dict[str, Tensor]:
    """Results of `run_cell`, in fp32, for the whole row by one process; `exact`: computed in fp32 too."""
    *inputs, sinks = make_inputs(problem, device)
    q, k, v, dout = (x.float() if exact else x for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v, *([sinks] if problem.sinks else []))]
    attention = attend_on(1, problem.rows, problem, problem.params, device)
    out, lse = attention.run(*leaves)
    found = dict(zip((*ROWS, "dsinks"), (out, *torch.autograd.grad(out, leaves, dout)), strict=False))
    found |= {"lse": lse.t(), "largest": attention.largest()}
    whole = {name: x.detach().float() for name, x in found.items()}
    return _without_copies(whole, problem)


def _without_copies(found: dict[str, Tensor], cell: Cell) -> dict[str, Tensor]:
    """`out` with 0 in padding, where it holds copies of other rows."""
    out, padding = found["out"], cell.padding_rows().to(found["out"].device)
    assert out[padding].isfinite().all()
    return found | {"out": out.masked_fill(padding.view(-1, *[1] * (out.ndim - 1)), 0)}


def report(world_size: int, outcomes: Sequence[Outcome], left_out: Sequence[tuple[Cell, list[str]]]) -> Iterator[str]:
    """Lines: a table by kernel and exchange, the cells that no kernel of that name runs, and every failure."""
    groups: dict[tuple[str, str], dict[Cell, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        exchange = outcome.cell.exchange + ", sums" * sums_travel(outcome.cell)
        groups[outcome.cell.kernel, exchange][outcome.cell].append(outcome)
    yield f"{world_size} ranks; error: worst over its limit; ratio: worst over one process with the same kernel"
    yield f"{'kernel':<11}{'exchange':<16}{'cells':>6}{'pass':>6}{'error':>7}{'ratio':>7}{'seconds':>9}  worst ratio at"
    for (kernel, exchange), by_cell in sorted(groups.items()):
        passed = sum(not any(o.failure for o in ranks) for ranks in by_cell.values())
        every = [o for ranks in by_cell.values() for o in ranks]
        ratios = [o for o in every if not math.isnan(o.ratio)]
        worst = max(ratios, key=lambda o: o.ratio, default=None)
        seconds = sum(max(o.seconds for o in ranks) for ranks in by_cell.values())
        ratio, at = ("–", "") if worst is None else (f"{worst.ratio:.2f}", str(worst.cell))
        yield (
            f"{kernel:<11}{exchange:<16}{len(by_cell):>6}{passed:>6}{max(o.error for o in every):>7.2f}{ratio:>7}"
            f"{seconds:>9.1f}  {at}"
        )
    by_reason: dict[tuple[str, str], int] = defaultdict(int)
    for cell, why in left_out:
        by_reason[cell.kernel, "; ".join(why)] += 1
    for (kernel, why), count in sorted(by_reason.items()):
        yield f"left out: {count} cells of {kernel}: {why}"
    for failure in failures(outcomes):
        yield f"FAILED: {failure}"


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per failed cell, of the first rank on which it did."""
    found = {outcome.cell: outcome for outcome in reversed(outcomes) if outcome.failure}
    return [f"{cell.kernel} | {cell}: {outcome.failure}" for cell, outcome in found.items()]


def split_able(cells: Sequence[Cell], device: torch.device) -> tuple[list[Cell], list[tuple[Cell, list[str]]]]:
    """(cells that can run on this device, the others and why)."""
    why = [(cell, unable(cell, device_facts(device))) for cell in cells]
    return [cell for cell, found in why if not found], [(cell, found) for cell, found in why if found]
