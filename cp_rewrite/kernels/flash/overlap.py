"""How a kernel and an exchange of rows overlap: what the exchange hands to a kernel's forward, and to its backward.

For kernels whose `Capabilities` say `overlaps_exchange`. Work of the exchange is on a second stream, the kernel's on
the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda

if TYPE_CHECKING:  # a launch holds a `BackwardOverlap`
    from .launches import Launch


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
        """From here on the current stream has all keys, and what a late part wrote."""
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
        """Both parts."""
        _fork(self.stream)
        with cuda.on(self.stream):
            calls[1 - self.parts.early](self.overlaps[1])
        calls[self.parts.early](self.overlaps[0])
        _join(self.stream)
