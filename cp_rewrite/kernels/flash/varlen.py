"""The part that variable-length flash kernels share: how the launches of a batch run, beside an exchange of rows too,
and what becomes of rows of no document.

    Parts, ForwardOverlap,         how a kernel and an exchange overlap
    BackwardOverlap, BackwardParts
    Launch, launches_of            how often a kernel is called for a batch, and over what
    run_forward, run_backward      a kernel's launches as one attention

Rows of no document may hold NaN, and a kernel that loads whole tiles would spread it. Where such rows form the end of
the local rows they are left out; where they lie in between, the backward reads copies with zeros there, and the
results are overwritten with exact zeros there.

Kernels overlap with an exchange if their `Capabilities` say `overlaps_exchange`. Work of the exchange is on a second
stream, the kernel's on the current one.

Shapes: R local rows, E expanded rows, H heads (Hq queries, Hkv keys), D and V head dims, N entries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.rows import zero_gaps
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.planning.intervals import Int
from cp_rewrite.planning.names import PieceRow


@dataclass(frozen=True, eq=False)
class Parts:
    """A launch in two parts: the keys of the early one are here, those of the late one arrive while it runs.

    Args:
        cut: (entries, query rows, expanded rows) of part 0; part 1 has the others.
        early: the part (0 or 1) whose keys are here.
        rest: (cu_seqlens_q, cu_seqlens_k) of part 1, from 0.
        early_kv: (k, v) of the early part, where these are not among the keys that the kernel gets.
    """

    cut: tuple[int, int, int]
    early: int
    rest: tuple[Tensor, Tensor]
    early_kv: tuple[Tensor, ...] | None = None

    def split(self, launch: Launch, keys: tuple[Tensor, ...]) -> tuple[tuple[Launch, slice, tuple[Tensor, ...]], ...]:
        """(launch, query rows, its share of the keys) of part 0 and of part 1."""
        shares = [tuple(x[self.keys(part)] for x in keys) for part in (0, 1)]
        if self.early_kv is not None:
            shares[self.early] = self.early_kv
        first, last = self._launches(launch)
        return (first, slice(first.stop), shares[0]), (last, slice(first.stop, launch.stop), shares[1])

    def _launches(self, launch: Launch) -> tuple[Launch, Launch]:
        """Tables of part 0 and part 1; made once per batch."""
        # What is kept holds the memory of `rest`, so that an address names it.
        known, key = launch.kept.get(Parts), (self.cut, self.rest[0].data_ptr(), self.rest[1].data_ptr())
        if known is None or known[0] != key:
            n, rows, _ = self.cut
            more = launch.cu_seqlens_q.shape[0] - n
            cu_q, cu_k = (cu[: n + 1] for cu in (launch.cu_seqlens_q, launch.cu_seqlens_k))
            rest_q, rest_k = (cu[:more] for cu in self.rest)
            first = replace(launch, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, stop=rows, kept={})
            last = replace(launch, cu_seqlens_q=rest_q, cu_seqlens_k=rest_k, stop=launch.stop - rows, kept={})
            known = launch.kept[Parts] = key, (first, last)
        return known[1]

    def keys(self, part: int) -> slice:
        """Expanded rows of part 0 or 1."""
        return slice(self.cut[2], None) if part else slice(self.cut[2])


@dataclass(frozen=True, eq=False)
class ForwardOverlap:
    """A forward in two parts. stream: once the work enqueued there so far is done, all keys are here; None: they are
    now."""

    parts: Parts
    stream: torch.cuda.Stream | None = None

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Both parts; the late one fills the GPU up as the early one ends."""
        _fork(self.stream)
        calls[self.parts.early]()
        with cuda.on(self.stream):
            calls[1 - self.parts.early]()
        self.join()

    def join(self) -> None:
        """Let the current stream wait for all keys, and for what a late part writes."""
        _join(self.stream)


def _fork(stream: torch.cuda.Stream | None) -> None:
    """Begin a part on another stream. Deterministic torch fills new memory with NaN, that of the results too: the part
    must not write before that fill has run."""
    if stream is not None:
        stream.wait_stream(cuda.current_stream(stream.device))


def _join(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        cuda.current_stream(stream.device).wait_stream(stream)


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class BackwardOverlap:
    """Where a backward writes gradients of keys, and what it calls between the steps that it enqueues.

    Args:
        grads: (dk, dv), as long as the keys that the backward gets.
        keys_needed: called once, before anything is enqueued that reads keys or values, or writes dk or dv.
        gradients_written: called once, when all that writes dk and dv is enqueued.
        mxint15: dk and dv are parts of further sums, and are written as MXINT15 (`csrc/rows.cuh`): for kernels with
            `unrounded_gradients`.
        holder_ptr: (E + 1,) int32, of `push_route`; keys for which it grows by no more than `own` are held by no other
            rank: their gradients are whole sums and are rounded. None: all are parts.
        own: 1 where the lists of these keys hold this rank's own copy of each, else 0.
    """

    grads: tuple[Tensor, Tensor]
    keys_needed: Callable[[], None] = _nothing
    gradients_written: Callable[[], None] = _nothing
    mxint15: bool = False
    holder_ptr: Tensor | None = None
    own: int = 0

    def of_keys(self, keys: slice, *, calls: bool) -> BackwardOverlap:
        """The same for one launch over some of the keys; without `calls` it calls nothing."""
        stop = min(keys.stop, self.grads[0].shape[0])
        if calls and not keys.start and stop == self.grads[0].shape[0]:
            return self
        grads = self.grads[0][keys], self.grads[1][keys]
        ptr = None if self.holder_ptr is None else self.holder_ptr[keys.start : stop + 1]
        called = (self.keys_needed, self.gradients_written) if calls else (_nothing, _nothing)
        return BackwardOverlap(grads, *called, self.mxint15, ptr, self.own)


@dataclass(frozen=True, eq=False)
class BackwardParts:
    """A backward in two parts. Blocks of the late one go first as soon as its keys are here.

    Args:
        overlaps: of the early and of the late part. The late one's calls come first, on its stream.
        stream: of the late part; None: the current one.
    """

    parts: Parts
    overlaps: tuple[BackwardOverlap, BackwardOverlap]
    stream: torch.cuda.Stream | None = None

    def run(self, calls: Sequence[Callable[[BackwardOverlap], None]]) -> None:
        """Run both parts."""
        _fork(self.stream)
        with cuda.on(self.stream):
            calls[1 - self.parts.early](self.overlaps[1])
        calls[self.parts.early](self.overlaps[0])
        _join(self.stream)


_SHORTEST = 256
"""`max_q` and `max_k` are at least this: FA4 compiles further variants for shorter ones, which gain nothing here."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of the kernel.

    Args:
        cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on the device.
        rows: int64 on the device, the local rows this launch gathers; None: rows [0, stop) as they are.
        stop: query rows that the kernel sees.
        keys: (k0, k1): it sees the expanded rows [k0, k1).
        window: (left, right), bottom-right aligned; None: no limit.
        max_q, max_k: the longest entry of each side.
        gaps: some rows in [0, stop) belong to no piece of this launch.
        dirty: some of these belong to no piece of any launch, so they may hold NaN.
        overlap: what a backward calls between its steps, for kernels that overlap with an exchange.
        kept: what was found out about this launch by one layer, for the others.
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
    overlap: BackwardOverlap | None = None
    kept: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @property
    def causal(self) -> bool:
        return self.window == (None, 0)


_launches = WeakTensorKeyDictionary()


def launches_of(tables: Tables, rows: int) -> tuple[Launch, ...]:
    """The launches of a batch, number 0 first; made once per batch, on the host, and kept as long as its pieces.

    A kernel takes running sums of query and key lengths and one window per launch. Launch 0 is the one of
    `Tables.cu_seqlens_*`. Pieces that need another window (documents' ends under a two-sided window) run in launches of
    their own over gathered query rows; their keys lie side by side already.
    """
    pieces = tables.pieces
    # The version counts writes: tables that are refilled in place hold another batch.
    version = 0 if pieces.is_inference() else pieces._version
    known = _launches.get(pieces)
    if known is None or known[0] is not tables.cu_seqlens_q or known[1] != version:
        known = _launches[pieces] = (tables.cu_seqlens_q, version, _make_launches(tables, rows))
    return known[2]


def _make_launches(tables: Tables, rows: int) -> tuple[Launch, ...]:
    if tables.sizes_are_bounds:
        return (_fixed_launch(tables, rows),)
    pieces = PieceRow(*tables.pieces.numpy().T)
    pieces = pieces.take((pieces.q1 > pieces.q0) & (pieces.k1 > pieces.k0))
    found = [_main_launch(tables, pieces, rows)]
    for number in np.unique(pieces.launch):
        if number:
            found.append(_gathered_launch(pieces.take(pieces.launch == number), tables.cu_seqlens_q.device))
    return tuple(found)


def _fixed_launch(tables: Tables, rows: int) -> Launch:
    """One launch over all rows that serves every batch of a capacity; some rows may belong to no piece."""
    first = tables.first_launch
    cu_seqlens, keys = (tables.cu_seqlens_q, tables.cu_seqlens_k), (0, sys.maxsize)
    window = _window(first.left, first.right)
    return Launch(*cu_seqlens, None, rows, keys, window, first.max_q, first.max_k, True, True)


def _main_launch(tables: Tables, all_pieces: PieceRow[Int], rows: int) -> Launch:
    """Launch 0.

    local rows    a a a b b b c c . .      a, b, c: pieces; . : no document's
    all pieces of launch 0                 stop = 8, no gaps: the rows at the end are left out
    b of another launch                    stop = 10, gaps: b and the end are entries without keys
    """
    pieces = all_pieces.take(all_pieces.launch == 0)
    covered, stop = _covered(pieces)
    gaps, dirty = stop != covered, False
    cu_q, cu_k = tables.cu_seqlens_q, tables.cu_seqlens_k
    if gaps:
        dirty, stop = _covered(all_pieces)[0] != rows, rows
    elif stop < rows:
        # Only the last rows are not in this launch: the entries before them are the pieces.
        cu_q, cu_k = cu_q[: len(pieces.q0) + 1], cu_k[: len(pieces.q0) + 1]
    first = tables.first_launch
    keys = (0, int(pieces.k1.max(initial=0)))
    sizes = max(first.max_q, _SHORTEST), max(first.max_k, _SHORTEST)
    return Launch(cu_q, cu_k, None, stop, keys, _window(first.left, first.right), *sizes, gaps, dirty)


def _covered(pieces: PieceRow[Int]) -> tuple[int, int]:
    """(query rows in pieces, one past the last of them)."""
    return int((pieces.q1 - pieces.q0).sum()), int(pieces.q1.max(initial=0))


def _gathered_launch(pieces: PieceRow[Int], device: torch.device) -> Launch:
    """A launch of a number above 0, over the query rows of its pieces put behind one another."""
    q_lengths, k_lengths = pieces.q1 - pieces.q0, pieces.k1 - pieces.k0
    start = np.cumsum(q_lengths) - q_lengths  # of each piece among the gathered rows
    rows = np.repeat(pieces.q0 - start, q_lengths) + np.arange(int(q_lengths.sum()))
    if (pieces.k0[1:] != pieces.k1[:-1]).any():
        raise ValueError("the keys of one launch must lie side by side in the expanded rows")
    return Launch(
        _running_sum(q_lengths, device),
        _running_sum(k_lengths, device),
        torch.from_numpy(rows).to(device, non_blocking=True),
        len(rows),
        (int(pieces.k0[0]), int(pieces.k1[-1])),
        _window(int(pieces.left[0]), int(pieces.right[0])),
        max(int(q_lengths.max()), _SHORTEST),
        max(int(k_lengths.max()), _SHORTEST),
    )


def _running_sum(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(total).to(device, non_blocking=True)


def _window(left: int, right: int) -> tuple[int | None, int | None]:
    return (None if left < 0 else left), (None if right < 0 else right)


Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Params], None]
"""(q, k, v, out, lse, launch, params): writes out (rows, Hq, V) and lse (Hq, rows), -inf where a row sees no key. The
heads of lse may lie apart."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Launch, Params], None]
"""(dout, q, k, v, out, lse, dq, dk, dv, launch, params): writes dq, dk and dv. lse: as of `Forward`."""


def functions(forward: Forward, backward: Backward) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`forward` and `backward` of a kernel module, with the arguments and results of `reference`'s."""
    return partial(run_forward, forward), partial(run_backward, backward)


def run_forward(
    kernel: Forward, q_RHD: Tensor, k_EHD: Tensor, v_EHV: Tensor,
    tables: Tables, params: Params, overlap: ForwardOverlap | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (R, Hq, V), exact zeros in rows of no piece; lse (Hq, R) fp32, -inf there. `into`: (out, lse) to write
    instead of new ones, and only rows of pieces; heads of out are dense, lse is contiguous."""
    rows, heads = q_RHD.shape[:2]
    if into is None:
        out = q_RHD.new_empty(rows, heads, v_EHV.shape[2])
        lse = q_RHD.new_empty(heads, rows, dtype=torch.float32)
    else:
        out, lse = into
    launches = launches_of(tables, rows)
    # A cut is made where one launch does all; it may leave out the last entries, which have no keys.
    if overlap is not None and overlap.parts.cut[0] + 1 >= launches[0].cu_seqlens_q.shape[0]:
        assert overlap.parts.early_kv is None
        overlap.join()
        overlap = None
    for number, launch in enumerate(launches):
        k, v = _rows(k_EHD, launch.keys), _rows(v_EHV, launch.keys)
        if launch.rows is not None:
            q = q_RHD.index_select(0, launch.rows)
            part = out.new_empty(q.shape[0], *out.shape[1:]), lse.new_empty(heads, q.shape[0])
            kernel(q, k, v, *part, launch, params)
            out.index_copy_(0, launch.rows, part[0])
            lse.index_copy_(1, launch.rows, part[1])
        elif overlap is not None:
            parts = overlap.parts.split(launch, (k, v))
            overlap.run([partial(kernel, q_RHD[q], *x, out[q], lse[:, q], part, params) for part, q, x in parts])
        elif launch.stop:
            seen = 0, launch.stop
            part = lse if launch.stop == rows else lse[:, : launch.stop]
            kernel(_rows(q_RHD, seen), k, v, _rows(out, seen), part, launch, params)
        if into is None and number == 0 and (launch.gaps or launch.stop < rows):
            zero_gaps(out, lse, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return out, lse


def run_backward(
    kernel: Backward, dout_RHV: Tensor, q_RHD: Tensor, k_EHD: Tensor, v_EHV: Tensor, out_RHV: Tensor, lse_HR: Tensor,
    tables: Tables, params: Params, overlap: BackwardOverlap | BackwardParts | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq (R, Hq, D), exact zeros in rows of no piece; dk (E, Hkv, D) and dv (E, Hkv, V), views of one (E, C) buffer and
    zeros past the last key, or `overlap.grads`, where rows that no piece reads keep what they hold. `into`: dq is
    written there, and only in rows of pieces."""
    rows = q_RHD.shape[0]
    dq = torch.empty_like(q_RHD, memory_format=torch.contiguous_format) if into is None else into
    launches = launches_of(tables, rows)
    if isinstance(overlap, BackwardParts):
        _run_in_parts(kernel, dout_RHV, q_RHD, k_EHD, v_EHV, out_RHV, lse_HR, dq, tables, params, overlap)
        return dq, *overlap.overlaps[1].grads
    inside = overlap is not None and len(launches) == 1 and launches[0].stop > 0
    if overlap is not None and not inside:
        overlap.keys_needed()
    dk, dv = _grad_rows(k_EHD, v_EHV, params.unrounded) if overlap is None else overlap.grads
    last = max((launch.keys[1] for launch in launches), default=0)
    if overlap is None and last < dk.shape[0]:
        dk[last:], dv[last:] = 0, 0
    for number, launch in enumerate(launches):
        k, v, grad_k, grad_v = (_rows(x, launch.keys) for x in (k_EHD, v_EHV, dk, dv))
        if overlap is not None:
            launch = replace(launch, overlap=overlap.of_keys(slice(*launch.keys), calls=inside))
        q, dout = _clean(q_RHD, tables, launch), _clean(dout_RHV, tables, launch)
        out, lse, grad = out_RHV, lse_HR, dq
        if launch.rows is not None:
            out, lse = out.index_select(0, launch.rows), lse.index_select(1, launch.rows)
            grad = dq.new_empty(q.shape)
        elif launch.stop < rows:
            out, lse, grad = out[: launch.stop], lse[:, : launch.stop], dq[: launch.stop]
        if q.shape[0]:
            kernel(dout, q, k, v, out, lse, grad, grad_k, grad_v, launch, params)
        if launch.rows is not None:
            dq.index_copy_(0, launch.rows, grad)
        if into is None and number == 0 and (launch.gaps or launch.stop < rows):
            zero_gaps(dq, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    if overlap is not None and not inside:
        overlap.gradients_written()
    return dq, dk, dv


def _run_in_parts(
    kernel: Backward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor,
    tables: Tables, params: Params, overlap: BackwardParts,
) -> None:  # fmt: skip
    """`run_backward` of a batch of one launch, in two parts: writes dq, and gradients of keys where `overlap` says."""
    (launch,) = launches_of(tables, q.shape[0])
    q, dout = _clean(q, tables, launch), _clean(dout, tables, launch)

    def over(part: Launch, rows: slice, keys: tuple[Tensor, ...]) -> Callable[[BackwardOverlap], None]:
        def run(at: BackwardOverlap) -> None:
            at = at.of_keys(slice(keys[0].shape[0]), calls=True)
            inputs = dout[rows], q[rows], keys[0], keys[1], out[rows], lse[:, rows]
            kernel(*inputs, dq[rows], *at.grads, replace(part, overlap=at), params)

        return run

    overlap.run([over(*part) for part in overlap.parts.split(launch, (_rows(k, launch.keys), _rows(v, launch.keys)))])
    if launch.gaps or launch.stop < dq.shape[0]:
        zero_gaps(dq, None, tables.cu_seqlens_q, tables.cu_seqlens_k)


def _clean(x: Tensor, tables: Tables, launch: Launch) -> Tensor:
    """The rows of x that a launch reads, without NaN in rows that belong to no piece."""
    if launch.rows is not None:
        return x.index_select(0, launch.rows)
    if not launch.dirty:
        return _rows(x, (0, launch.stop))
    x = x.clone(memory_format=torch.contiguous_format)
    zero_gaps(x, None, tables.cu_seqlens_q, tables.cu_seqlens_k)
    return x


def _rows(x: Tensor, part: tuple[int, int]) -> Tensor:
    """Rows [first, stop) of x; x itself where these are all, for a view takes the host almost as long as a launch."""
    first, stop = part
    return x if first == 0 and stop >= x.shape[0] else x[first:stop]


def _grad_rows(k_EHD: Tensor, v_EHV: Tensor, fp32: bool) -> tuple[Tensor, Tensor]:
    k_width, v_width = k_EHD.shape[1] * k_EHD.shape[2], v_EHV.shape[1] * v_EHV.shape[2]
    buffer = k_EHD.new_empty(k_EHD.shape[0], k_width + v_width, dtype=torch.float32 if fp32 else None)
    return buffer[:, :k_width].view(k_EHD.shape), buffer[:, k_width:].view(v_EHV.shape)
