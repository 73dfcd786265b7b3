"""What variable-length flash kernels share: the launches of a batch, and what to do with rows of no document.

Such a kernel takes running sums of query and key lengths and one window per launch. Launch 0 is the one of
`Tables.cu_seqlens_*`. Pieces that need another window (documents' ends under a two-sided window) run in launches of
their own over gathered query rows; their keys lie side by side already.

Rows of no document may hold NaN, and a kernel that loads whole tiles would spread it. Where such rows form the end of
the local rows they are left out; where they lie in between, the backward reads cleaned copies, and rows of the results
are overwritten with exact zeros.

Shapes: R local rows, E expanded rows, H heads (Hq queries, Hkv keys), D and V head dims, N entries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .params import Params
from .rows import zero_gaps
from .tables import Tables

_SOME = 256
"""The least length told to a kernel: FA4 compiles other variants for shorter ones, to no gain here."""


@dataclass(frozen=True, eq=False)
class Stages:
    """A forward in two parts, of which one has its keys while those of the other come on another stream.

    Args:
        cut: (entries, query rows, expanded rows) before the cut. early: the part (0 or 1) whose keys are here.
        rest: (cu_seqlens_q, cu_seqlens_k) of the entries after the cut, from 0.
        stream: after what it is told so far, all keys are here; None: they are.
    """

    cut: tuple[int, int, int]
    early: int
    rest: tuple[Tensor, Tensor]
    stream: torch.cuda.Stream | None = None

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Both parts; the late one fills the GPU up as the early one ends."""
        parts[self.early]()
        with torch.cuda.stream(self.stream):
            parts[1 - self.early]()
        self.join()

    def join(self) -> None:
        """Wait for all keys, and for what was told to wait for them."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def of(self, launch: Launch) -> tuple[tuple[Launch, slice, slice], ...]:
        """(launch, query rows, expanded rows) of both parts."""
        n, rows, keys = self.cut
        more = launch.cu_seqlens_q.shape[0] - n
        cu_q, cu_k = (cu[: n + 1] for cu in (launch.cu_seqlens_q, launch.cu_seqlens_k))
        rest_q, rest_k = (cu[:more] for cu in self.rest)
        return (
            (replace(launch, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, stop=rows), slice(rows), slice(keys)),
            (
                replace(launch, cu_seqlens_q=rest_q, cu_seqlens_k=rest_k, stop=launch.stop - rows),
                slice(rows, launch.stop),
                slice(keys, None),
            ),
        )


@dataclass(frozen=True, eq=False)
class Beside:
    """Rows that travel beside a backward, which calls each once, when its stream is told all that comes before.

    Args:
        keys_needed: from here on keys and values are read. gradients_written: dk and dv are.
    """

    keys_needed: Callable[[], None]
    gradients_written: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of the kernel.

    Args:
        cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on the device.
        rows: int64 on the device, the local rows this launch gathers; None: rows [0, stop) as they are.
        stop: query rows that the kernel sees.
        keys: (k0, k1), the expanded rows that it sees.
        window: (left, right), bottom-right aligned; None: no limit.
        max_q, max_k: the longest entry of each side.
        gaps: some rows in [0, stop) belong to no piece of this launch; dirty: to no piece at all, so may hold NaN.
        beside: what a backward calls on its way.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    rows: Tensor | None
    stop: int
    keys: tuple[int, int]
    window: tuple[int | None, int | None]
    max_q: int
    max_k: int
    gaps: bool = False
    dirty: bool = False
    beside: Beside | None = None

    @property
    def causal(self) -> bool:
        return self.window == (None, 0)


Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Params], None]
"""(q, k, v, out, lse, launch, params): writes out (rows, Hq, V) and lse (Hq, rows), -inf where a row sees no key."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Params], None]
"""(dout, q, k, v, out, lse, dq, dk, dv, launch, params): writes dq, dk and dv."""

_launches = WeakTensorKeyDictionary()


def launches_of(tables: Tables, rows: int) -> tuple[Launch, ...]:
    """The launches of a batch, largest first; made once per batch, on the host, and kept as long as its pieces."""
    pieces = tables.pieces
    # Tables that are refilled in place are another batch.
    version = 0 if pieces.is_inference() else pieces._version
    known = _launches.get(pieces)
    if known is None or known[0] is not tables.cu_seqlens_q or known[1] != version:
        known = _launches[pieces] = (tables.cu_seqlens_q, version, _make_launches(tables, rows))
    return known[2]


def functions(forward: Forward, backward: Backward) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`forward` and `backward` of a kernel module, with the arguments and results of `reference`'s."""
    return partial(run_forward, forward), partial(run_backward, backward)


def run_forward(
    kernel: Forward,
    q_RHD: Tensor,
    k_EHD: Tensor,
    v_EHV: Tensor,
    tables: Tables,
    params: Params,
    stages: Stages | None = None,
) -> tuple[Tensor, Tensor]:
    """out (R, Hq, V), exact zeros in rows of no piece; lse (Hq, R) fp32, -inf there."""
    rows, heads = q_RHD.shape[:2]
    out = q_RHD.new_empty(rows, heads, v_EHV.shape[2])
    lse = q_RHD.new_empty(heads, rows, dtype=torch.float32)
    launches = launches_of(tables, rows)
    # A cut is made where one launch does all; it may leave out the last entries, which have no keys.
    if stages is not None and stages.cut[0] + 1 >= launches[0].cu_seqlens_q.shape[0]:
        stages.join()
        stages = None
    for number, launch in enumerate(launches):
        k, v = k_EHD[slice(*launch.keys)], v_EHV[slice(*launch.keys)]
        if launch.rows is not None:
            q = q_RHD.index_select(0, launch.rows)
            part = out.new_empty(q.shape[0], *out.shape[1:]), lse.new_empty(heads, q.shape[0])
            kernel(q, k, v, *part, launch, params)
            out.index_copy_(0, launch.rows, part[0])
            lse.index_copy_(1, launch.rows, part[1])
        elif stages is not None:
            parts = stages.of(launch)
            stages.run([_over(kernel, q_RHD[q], k[e], v[e], out[q], lse[:, q], part, params) for part, q, e in parts])
        elif launch.stop:
            seen = slice(launch.stop)
            _over(kernel, q_RHD[seen], k, v, out[seen], lse[:, seen], launch, params)()
        if number == 0 and (launch.gaps or launch.stop < rows):
            zero_gaps(out, lse, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return out, lse


def _over(
    kernel: Forward, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch, params: Params
) -> Callable[[], None]:
    """The kernel over some rows, told later. It wants an lse of its own where these are not all rows."""
    part = lse if lse.is_contiguous() else lse.new_empty(lse.shape)

    def run() -> None:
        kernel(q, k, v, out, part, launch, params)
        if part is not lse:
            lse.copy_(part)

    return run


def run_backward(
    kernel: Backward,
    dout_RHV: Tensor,
    q_RHD: Tensor,
    k_EHD: Tensor,
    v_EHV: Tensor,
    out_RHV: Tensor,
    lse_HR: Tensor,
    tables: Tables,
    params: Params,
    beside: Callable[[Tensor, Tensor], Beside] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (R, Hq, D), exact zeros in rows of no piece; dk (E, Hkv, D) and dv (E, Hkv, V), views of one (E, C) buffer.
    `beside`, made from dk and dv, is for kernels that know `Launch.beside`."""
    rows = q_RHD.shape[0]
    dq = torch.empty_like(q_RHD, memory_format=torch.contiguous_format)
    dk, dv = _grad_rows(k_EHD, v_EHV)
    launches = launches_of(tables, rows)
    last = max((launch.keys[1] for launch in launches), default=0)
    if last < dk.shape[0]:
        dk[last:], dv[last:] = 0, 0
    told = None if beside is None else beside(dk, dv)
    inside = told is not None and len(launches) == 1 and launches[0].stop > 0
    if inside:
        launches = (replace(launches[0], beside=told),)
    elif told is not None:
        told.keys_needed()
    for number, launch in enumerate(launches):
        keys = slice(*launch.keys)
        outputs = dk[keys], dv[keys]
        q, dout = _clean(q_RHD, tables, launch), _clean(dout_RHV, tables, launch)
        out, lse, grad = out_RHV, lse_HR, dq
        if launch.rows is not None:
            out, lse = out.index_select(0, launch.rows), lse.index_select(1, launch.rows)
            grad = dq.new_empty(q.shape)
        elif launch.stop < rows:
            out, lse, grad = out[: launch.stop], lse[:, : launch.stop].contiguous(), dq[: launch.stop]
        if q.shape[0]:
            kernel(dout, q, k_EHD[keys], v_EHV[keys], out, lse, grad, *outputs, launch, params)
        if launch.rows is not None:
            dq.index_copy_(0, launch.rows, grad)
        if number == 0 and (launch.gaps or launch.stop < rows):
            zero_gaps(dq, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    if told is not None and not inside:
        told.gradients_written()
    return dq, dk, dv


def _clean(x: Tensor, tables: Tables, launch: Launch) -> Tensor:
    """The rows of x that a launch reads, without NaN in rows that belong to no piece."""
    if launch.rows is not None:
        return x.index_select(0, launch.rows)
    if not launch.dirty:
        return x[: launch.stop]
    x = x.clone(memory_format=torch.contiguous_format)
    zero_gaps(x, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return x


def _grad_rows(k_EHD: Tensor, v_EHV: Tensor) -> tuple[Tensor, Tensor]:
    size = k_EHD.shape[0]
    k_width, v_width = k_EHD.shape[1] * k_EHD.shape[2], v_EHV.shape[1] * v_EHV.shape[2]
    buffer = k_EHD.new_empty(size, k_width + v_width)
    return buffer[:, :k_width].view(k_EHD.shape), buffer[:, k_width:].view(v_EHV.shape)


def _make_launches(tables: Tables, rows: int) -> tuple[Launch, ...]:
    if tables.launches.shape[0] > 1 and int(tables.launches[1, 2]) == -1:
        return (_fixed_launch(tables, rows),)
    pieces: NDArray[np.int64] = tables.pieces.numpy()
    pieces = pieces[(pieces[:, 1] > pieces[:, 0]) & (pieces[:, 3] > pieces[:, 2])]
    found = [_main_launch(tables, pieces, rows)]
    for number in np.unique(pieces[:, 6]):
        if number:
            found.append(_gathered_launch(pieces[pieces[:, 6] == number], tables.cu_seqlens_q.device))
    return tuple(found)


def _fixed_launch(tables: Tables, rows: int) -> Launch:
    """Over all rows, some of which may belong to no piece, whatever the batch."""
    left, right, max_q, max_k = tables.launches[0].tolist()
    keys = (0, sys.maxsize)
    window = _window(left, right)
    return Launch(tables.cu_seqlens_q, tables.cu_seqlens_k, None, rows, keys, window, max_q, max_k, True, True)


def _main_launch(tables: Tables, all_pieces: NDArray[np.int64], rows: int) -> Launch:
    pieces = all_pieces[all_pieces[:, 6] == 0]
    covered, stop = _covered(pieces)
    gaps, dirty = stop != covered, False
    cu_q, cu_k = tables.cu_seqlens_q, tables.cu_seqlens_k
    if gaps:
        dirty, stop = _covered(all_pieces)[0] != rows, rows
    elif stop < rows:
        # Only the last rows are not in this launch: the entries before them are the pieces.
        cu_q, cu_k = cu_q[: len(pieces) + 1], cu_k[: len(pieces) + 1]
    left, right, max_q, max_k = tables.launches[0].tolist()
    keys = (0, int(pieces[:, 3].max(initial=0)))
    sizes = max(max_q, _SOME), max(max_k, _SOME)
    return Launch(cu_q, cu_k, None, stop, keys, _window(left, right), *sizes, gaps, dirty)


def _covered(pieces: NDArray[np.int64]) -> tuple[int, int]:
    """(query rows in pieces, one past the last of them)."""
    return int((pieces[:, 1] - pieces[:, 0]).sum()), int(pieces[:, 1].max(initial=0))


def _gathered_launch(pieces: NDArray[np.int64], device: torch.device) -> Launch:
    q_lengths, k_lengths = pieces[:, 1] - pieces[:, 0], pieces[:, 3] - pieces[:, 2]
    start = np.cumsum(q_lengths) - q_lengths
    rows = np.repeat(pieces[:, 0] - start, q_lengths) + np.arange(int(q_lengths.sum()))
    if (pieces[1:, 2] != pieces[:-1, 3]).any():
        raise ValueError("the keys of one launch must lie side by side in the expanded rows")
    return Launch(
        _running_sum(q_lengths, device),
        _running_sum(k_lengths, device),
        torch.from_numpy(rows).to(device, non_blocking=True),
        len(rows),
        (int(pieces[0, 2]), int(pieces[-1, 3])),
        _window(int(pieces[0, 4]), int(pieces[0, 5])),
        max(int(q_lengths.max()), _SOME),
        max(int(k_lengths.max()), _SOME),
    )


def _running_sum(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(total).to(device, non_blocking=True)


def _window(left: int, right: int) -> tuple[int | None, int | None]:
    return (None if left < 0 else left), (None if right < 0 else right)
