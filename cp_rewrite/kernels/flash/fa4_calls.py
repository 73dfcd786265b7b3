"""Calls of FlashAttention 4's compiled kernels, noted once per batch and made again for its other layers.

What `_flash_attn_fwd` and `_flash_attn_bwd` give to these kernels: tensors of the layer, in places that `_FORWARD`,
`_PREPROCESS` and `_KERNEL` name; sums that the backward makes for itself; and what is the same for all layers. Only for
versions that `fa4_internals.py` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .overlap import BackwardOverlap

FlashCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""(a compiled kernel, its arguments)."""

_FORWARD = 5
"""Arguments of the forward's kernel that are the layer's: q, k, v, out, lse."""
_PREPROCESS = 6
"""Arguments of the backward's first kernel: out, dout, sums of out * dout, lse, lse in base 2, fp32 dq."""
_KERNEL = 9
"""Arguments of its main kernel: q, k, v, dout, lse in base 2, sums of out * dout, fp32 dq, dk and dv or their sums."""
_ROUNDING = 2
"""Arguments of its last ones: fp32 sums, where they are written."""


class _NotingCache:
    """A compile cache of the library's, whose kernels note their calls."""

    def __init__(self, cache: Any, calls: list[FlashCall]) -> None:
        self._cache, self._calls = cache, calls

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, compiled: Any) -> None:
        self._cache[key] = compiled

    def __getitem__(self, key: Any) -> Callable[..., None]:
        compiled = self._cache[key]

        def call(*args: Any) -> None:
            compiled(*args)
            self._calls.append((compiled, args))

        return call


def noting(function: Any, calls: list[FlashCall], helpers: Mapping[str, Any] | None = None) -> Any:
    """A function of the library over a copy of its globals: it notes in `calls` what kernels of its own it calls.
    helpers: further globals that are replaced."""
    itself = SimpleNamespace(compile_cache=_NotingCache(function.compile_cache, calls))
    library = {**function.__globals__, function.__name__: itself, **(helpers or {})}
    copy = FunctionType(function.__code__, library, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def key_of(tensors: Sequence[Tensor], *others: Any) -> tuple[Any, ...]:
    """Equal for calls over one launch that give the same arguments to the same kernels."""
    return (*((x.shape, x.stride()) for x in tensors), tensors[0].dtype, *others)


def aligned(tensors: Sequence[Tensor]) -> bool:
    """True if kernels take them as they are: the library copies others. Not for lse, of which any rows will do."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def without_grad(*tensors: Tensor) -> list[Tensor]:
    """Tensors as a kernel takes them."""
    return [x.detach() if x.requires_grad else x for x in tensors]


def forward_call(calls: Sequence[FlashCall], tensors: Sequence[Tensor], lengths: Sequence[Tensor]) -> FlashCall | None:
    """(kernel, arguments after the layer's own) of a noted forward over q, k, v, out, lse; None: can't be repeated."""
    if len(calls) != 1:
        return None
    kernel, args = calls[0]
    return (kernel, args[_FORWARD:]) if _same(args, tensors) and _shared(args[_FORWARD:], lengths) else None


@dataclass
class BackwardCalls:
    """Record of what a backward called. calls: of the library's kernels, in order. writes: of ours in place of its
    rounding of dk and dv: (sums, where they are written, overlap)."""

    calls: list[FlashCall] = field(default_factory=list)
    writes: list[Callable[[Tensor, Tensor, BackwardOverlap | None], None]] = field(default_factory=list)

    def again(self, tensors: Sequence[Tensor], lengths: Sequence[Tensor]) -> BackwardAgain | None:
        """How to call it for another layer. tensors: q, k, v, out, dout that it was called with. lengths: cu_seqlens_*.
        None: it can't be repeated."""
        q, k, v, out, dout = tensors
        rounded = len(self.calls) - 2 + len(self.writes)
        if rounded not in (1, 3):  # dq; and dk and dv, of grouped heads
            return None
        (first, before), (kernel, args), *rounding = self.calls
        shapes = before[5].shape, before[2].shape, args[7].shape if rounded == 3 else None
        fitting = (
            _same((*before[:2], *args[:4]), (out, dout, q, k, v, dout))
            and before[4].shape == shapes[1]
            and (rounded == 1 or args[8].shape == shapes[2])
            and all(_shared(rest, lengths) for rest in (before[_PREPROCESS:], args[_KERNEL:]))
            and all(_shared(rest[_ROUNDING:], lengths) for _, rest in rounding)
        )
        if not fitting:
            return None
        ends = [(compiled, rest[_ROUNDING:]) for compiled, rest in rounding]
        return BackwardAgain(shapes, (first, before[_PREPROCESS:]), (kernel, args[_KERNEL:]), ends, self.writes)


@dataclass(frozen=True)
class BackwardAgain:
    """Kernels of a backward, each with the arguments that are not a layer's own.

    Args:
        shapes: of fp32 dq; of the sums of out * dout; of the sums of dk, and of dv, None where the kernel writes these.
        ends: the roundings that the library does: dq's is the last. writes: of `BackwardCalls`.
    """

    shapes: tuple[torch.Size, torch.Size, torch.Size | None]
    first: FlashCall
    kernel: FlashCall
    ends: Sequence[FlashCall]
    writes: Sequence[Callable[[Tensor, Tensor, BackwardOverlap | None], None]]

    def __call__(self, inputs: Sequence[Tensor], grads: Sequence[Tensor], overlap: BackwardOverlap | None) -> None:
        """inputs: q, k, v, out, dout, lse. grads: dq, dk, dv, which are written."""
        (q, k, v, out, dout, lse), (dq, *keys) = inputs, grads
        fp32: Any = {"dtype": torch.float32, "device": q.device}
        of_dq, of_rows, of_keys = self.shapes
        sums_dq = torch.empty(of_dq, **fp32)
        dots, lse_2 = torch.empty(2, *of_rows, **fp32).unbind()
        sums = keys if of_keys is None else torch.zeros(2, *of_keys, **fp32).unbind()
        kernel, rest = self.first
        kernel(out, dout, dots, lse, lse_2, sums_dq, *rest)
        if overlap is not None:
            overlap.keys_needed()
        kernel, rest = self.kernel
        kernel(*without_grad(q, k, v), dout, lse_2, dots, sums_dq, *sums, *rest)
        for write, x, y in zip(self.writes, sums, keys, strict=False):
            write(x, y, overlap)
        *of_dk_dv, (round_dq, last) = self.ends
        for (kernel, rest), x, y in zip(of_dk_dv, sums, keys, strict=False):
            kernel(x, y, *rest)
        if overlap is not None:
            overlap.gradients_written()
        round_dq(sums_dq, dq, *last)


def _same(found: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """True if the library passed tensors on as they were given, and no copies."""
    return all(x.data_ptr() == y.data_ptr() for x, y in zip(found, given, strict=False))


def _shared(rest: Sequence[Any], lengths: Sequence[Tensor]) -> bool:
    """True if no argument is a layer's own: no tensor but those of the batch."""
    return all(any(x is known for known in lengths) for x in rest if isinstance(x, Tensor))
