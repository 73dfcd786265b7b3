"""Kernels are tried on a few tokens before they are trusted: once on a machine for each shape, beside the reference in
fp64. What can't be compiled, or is wrong, gives way to the next kernels of its recurrence, and these to the reference.

Compilers of kernels have given wrong gradients without an error (Triton 3.4 to 3.7.0 on Hopper). Ranks that run
different kernels, or the reference, exchange the same summaries.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.states.select import OURS, kernels_for, verdict_of
from cp_rewrite.kernels.states.side_by_side import compile_side_by_side
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.layouts.token_order import TokenOrder
from cp_rewrite.planning.plan_input import STATES, States
from cp_rewrite.planning.states import state_tables

from . import by_kernels
from .maps import INPUTS, Options, fake_out

_ops: Any = torch.ops.cp_rewrite
_LIMIT = 3e-2
"""Relative norm of a difference in half precision; what is wrong differs by more than a tenth."""
_ROWS = 300
_CHANNELS = {"selective_scan": 520}
"""Channels that are tried at most: of more, other blocks do the same, and the reference's gradients take GB."""
_TUNED_ROWS = 2048
"""Tokens on which Triton tunes: what it chooses then holds for rows of any length."""


def right_kernels(kind: str, inputs: Sequence[Tensor], runs: int, how: Options) -> str | None:
    """The first kernels here for a recurrence of such inputs, in so many sequences, that give what the reference gives.
    None: there are none."""
    most = _CHANNELS.get(kind, sys.maxsize)
    shapes = tuple(tuple(min(size, most) for size in x.shape[x.ndim > 2 and 2 :]) for x in inputs)
    for kernels in kernels_for(kind, inputs, runs):
        if _agree(kernels, kind, how, tuple(x.dtype for x in inputs), shapes, inputs[0].device):
            return kernels
    return None


@cache
def _agree(
    kernels: str, kind: str, how: Options, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...],
    device: Any,
) -> bool:  # fmt: skip
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    with verdict_of(kernels, kind, how, dtypes, shapes, gpu) as known:
        if known.right:
            return True
        if kernels != OURS:
            print(
                f"cp_rewrite: kernels of {kind} ({kernels}) are tuned and tried on this {gpu}, once for each shape; "
                "compiling them takes a minute or more",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        # What a compiled graph rules out of dispatch holds in its own thread. Another one begins on the first GPU.
        with ThreadPoolExecutor(1, initializer=_work_on, initargs=(device,)) as apart:
            wrong = apart.submit(_what_is_wrong, kernels, kind, how, dtypes, shapes, device).result()
        if not wrong:
            known.keep()
    if wrong:
        libraries = "cuda-core" if kernels == OURS else "triton, fla-core or flash-qla"
        warnings.warn(
            f"kernels of {kind} ({kernels}) {wrong} on this GPU: others run, or the reference, which are slower. "
            f"Another version of {libraries} may be right",
            stacklevel=2,
        )
    return not wrong


def _work_on(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _what_is_wrong(
    kernels: str, kind: str, how: Options, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], device: Any
) -> str:
    """Empty: nothing."""
    try:
        error = max(_errors(kernels, kind, how, dtypes, shapes, device))
    except Exception as failed:  # compilers of kernels raise what they like
        return f"failed with {type(failed).__name__}: {failed},"
    return f"differ from the reference by {error:.1e}" if error >= _LIMIT else ""


def _errors(
    kernels: str, kind: str, how: Options, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], device: Any
) -> list[float]:
    """Relative norms of differences of results, states that enter, and all gradients. What moves a state is not
    compared: kernels give none of first pieces, which nothing enters."""
    if kernels != OURS:
        facts = kernels, kind, how, dtypes, shapes, device
        if device.type == "cuda":
            compile_side_by_side(f"{__name__}:{run_tuned.__name__}", *facts)
        run_tuned(*facts)
    inputs, tables, dout = _problem(kind, how, dtypes, shapes, device, _ROWS)
    found = _by_kernels(kernels, kind, how, inputs, tables, dout)
    wide, given = [x.double() for x in inputs], [how.scale, how.l2norm]  # which no kernels take
    expected = getattr(_ops, f"{kind}_on_pieces")(*wide, tables, *(given if INPUTS[kind][0] == "q" else []), "")
    back = _ops.states_on_pieces_backward(dout.double(), *expected[1:], wide, tables, kind, *given, "")
    pairs = zip(found, [*expected[:2], *back], strict=True)
    errors = [float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs]
    return [error if error == error else float("inf") for error in errors]


def run_tuned(
    kernels: str, kind: str, how: Options, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], device: Any
) -> None:
    """Launch all kernels, those for few sequences and those for many, on tokens for which Triton tunes them."""
    _work_on(device)
    for documents in (2, 64):
        _by_kernels(kernels, kind, how, *_problem(kind, how, dtypes, shapes, device, _TUNED_ROWS, documents))


def _by_kernels(
    kernels: str, kind: str, how: Options, inputs: Sequence[Tensor], tables: Sequence[Tensor], dout: Tensor
) -> list[Tensor]:
    named = SimpleNamespace(**{x.name: table for x, table in zip(STATES, tables, strict=True)})
    out, entries, moves, kept = by_kernels.forward(kernels, kind, inputs, named, how, "")
    return [out, entries, *by_kernels.backward(kernels, kind, dout, entries, moves, kept, inputs, named, how, "")]


def _problem(
    kind: str, how: Options, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], device: Any, rows: int,
    documents: int = 2,
) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
    """Inputs, tables and a gradient of the result, of a row of documents, the first one a short one, in three pieces,
    last piece first."""
    inputs = _draw(kind, how, dtypes, shapes, device, rows)
    first, second = rows // 3, 3 * rows // 4 + 5
    order = TokenOrder(rows, (np.array([[second, rows], [first, second], [0, first]]),))
    short, others = rows // (5 * documents), documents - 1
    lengths = [short, *(len(part) for part in np.array_split(np.empty(rows - short), others))]
    plan = BatchPlan((Documents.from_lengths(lengths),), (order,), 1)
    arrays = state_tables(plan, States(resets=True), 0)
    tables = [torch.from_numpy(arrays[x.name]).to("cpu" if x.on_host else device) for x in STATES]
    shape = fake_out(kind, *inputs).shape
    dout = torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device)
    return inputs, tables, dout.to(inputs[0].dtype)


def _draw(
    kind: str, how: Options, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]], device: Any, length: int
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    found: list[Tensor] = []
    for name, dtype, shape in zip(INPUTS[kind], dtypes, shapes, strict=True):
        rows = () if name == "A" else (1, length)
        x = torch.randn(*rows, *shape, generator=generator, device=device)
        if name in ("g", "A"):  # little is forgotten, so that what moves a state tells
            x = -0.01 * F.softplus(x)
            if x.ndim > 3:  # but for one channel, which forgets all at once
                x[..., -1, -1] *= 1000
        elif name in ("q", "k") and not how.l2norm:  # states of longer keys grow without end
            x = F.normalize(x, dim=-1)
        elif name == "dt":
            x = 0.2 * F.softplus(x)
        elif name == "beta":
            x = x.sigmoid()
        found.append(x.to(dtype))
    return found
