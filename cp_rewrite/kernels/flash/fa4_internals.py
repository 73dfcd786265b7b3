"""Insides of FlashAttention 4 that we use, because it has no interface for them: all that relies on them is here.

Three things are used, of exactly the versions in `VERSIONS`, whose source was read; of others none is
(`was_read`). `tests/kernels/test_flash_internals.py` has a test of each fact, to be run before a version is added.

1. `_flash_attn_bwd` calls `_bwd_preprocess` before it reads keys, and `_bwd_postprocess_convert` last, which rounds dq,
   dk and dv from fp32: `run_backward` calls an exchange between them.
2. Where several query heads share a key, on Hopper, these fp32 values are sums of dk and dv over all of the rank's
   queries: `_write_sums` writes them by a kernel of ours. The library would round to half precision what is only a part
   of a sum over ranks. The order of a tile's sums is the library's own; it is read off what its rounding does to a tile
   of known numbers (`_order`).
3. Before its compiled kernels both functions run Python that takes longer than all of their launches. Its results are
   the same for all layers of a batch: the kernels that the first call found, and the arguments that are not a layer's
   own, are kept with the batch's `Launch`, and further calls go to these kernels at once (`noting`, `forward_call`,
   `BackwardCalls`). Arguments that are the layer's stand in places that `_FORWARD`, `_PREPROCESS` and `_KERNEL` name;
   beside them are sums that the backward makes for itself.

The third stands first in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.select import Capabilities

from .varlen import BackwardOverlap

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


VERSIONS = ("4.0.0b36",)
"""Versions of the package `flash-attn-4`."""

Convert = Callable[..., None]
"""`_bwd_postprocess_convert(accum, output, scale, cu_seqlens, seqused, arch, dtype, hdim, block_size, …)`."""

_GROUP, _BLOCK = 16, 128
"""Constants of `csrc/round_sums.cu`: rows that a block takes, and its threads."""
_BASE = 256
"""Whole numbers below are exact in half precision."""
_IN_PAIRS: cuda.Macros = (("IN_PAIRS", "1"),)
_OUT_FP32: cuda.Macros = (("OUT_FP32", "1"),)
_orders: dict[tuple[Any, ...], _Order] = {}


@cache
def was_read() -> bool:
    """True if the installed version is one of `VERSIONS`."""
    try:
        return version("flash-attn-4") in VERSIONS
    except PackageNotFoundError:  # built from source under another name
        return False


def capabilities() -> Capabilities:
    """Abilities by the first two of the three things above, or none where the installed version was not read."""
    return Capabilities(overlaps_exchange=True, unrounded_on=frozenset({9})) if was_read() else Capabilities()


def run_backward(
    backward: Any, overlap: BackwardOverlap | None, *inputs: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any
) -> BackwardCalls:
    """The library's `_flash_attn_bwd`, with calls of `overlap` between its steps, and with other kinds of dk and dv.

        sums of out * dout, fp32 dq cleared | keys_needed | kernel | dk, dv rounded | gradients_written | dq rounded

    The first and the last step take long where rows and heads are many. The library's function runs over a copy of its
    globals with two helpers replaced: nothing of the library is changed.

    Args:
        backward: `_flash_attn_bwd`. inputs, options: its arguments.
        dk, dv: of q's dtype, or fp32, which is then not rounded; MXINT15 with `overlap.mxint15`.
    Returns:
        what it called, to call it again.
    """
    library = backward.__globals__
    convert: Convert = library["_bwd_postprocess_convert"]
    unrounded = dk.dtype == torch.float32
    # The library checks the dtype of dk and dv. It sees memory of the right shape, in which it does not write.
    seen_dk, seen_dv = (x.view(dq.dtype)[..., : x.shape[2]] if unrounded else x for x in (dk, dv))
    last: list[Callable[[], None]] = []
    noted = BackwardCalls()

    def preprocess(*args: Any, **kwargs: Any) -> None:
        noting(library["_bwd_preprocess"], noted.calls)(*args, **kwargs)
        if overlap is not None:
            overlap.keys_needed()

    def postprocess(sums: Tensor, output: Tensor, scale: float, cu_seqlens: Tensor, *rest: Any, **kwargs: Any) -> None:
        rounding = partial(noting(convert, noted.calls), sums, output, scale, cu_seqlens, *rest, **kwargs)
        if output is dq:
            last.append(rounding)
        elif unrounded or (overlap is not None and overlap.mxint15):
            write = partial(_write_sums, _order(convert, output, *rest, **kwargs), output.dtype, scale, cu_seqlens)
            write(sums, dk if output is seen_dk else dv, overlap)
            noted.writes.append(write)
        else:
            rounding()

    helpers = {"_bwd_preprocess": preprocess, "_bwd_postprocess_convert": postprocess}
    noting(backward, noted.calls, helpers)(*inputs, dq=dq, dk=seen_dk, dv=seen_dv, **options)
    if overlap is not None:
        overlap.gradients_written()
    for convert_dq in last:
        convert_dq()
    return noted


class _Order(NamedTuple):
    """Where columns are in a tile of sums. places: (tile, D) int16. width: columns of a tile. macros: of the kernel."""

    places: Tensor
    width: int
    macros: cuda.Macros


def _write_sums(
    order: _Order,
    dtype: torch.dtype,
    scale: float,
    cu_seqlens: Tensor,
    sums: Tensor,
    out_EHD: Tensor,
    overlap: BackwardOverlap | None,
) -> None:
    """Write rows of `scale` times the sums, in place of the library's rounding to `dtype`.

    Args:
        sums: (Hkv, …) fp32. cu_seqlens: (n + 1,) int32.
        out_EHD: fp32, or of `dtype`: then it receives MXINT15 (`csrc/rows.cuh`). Rows are dense.
        overlap: which rows are parts of further sums.
    """
    heads, columns = out_EHD.shape[1], out_EHD.shape[2]
    out_fp32 = _OUT_FP32 * (out_EHD.dtype == torch.float32)
    macros = ((cuda.DTYPES[dtype], "1"), *cuda.MXINT15, *order.macros, *out_fp32)
    cuda.launch(
        cuda.kernel("round_sums", sums.device, macros),
        (sums.shape[1] // order.width // _GROUP, heads),
        _BLOCK,
        sums.device,
        sums.data_ptr(),
        sums.shape[1],
        scale,
        cu_seqlens.data_ptr(),
        cu_seqlens.shape[0] - 1,
        order.places.shape[0],
        order.width,
        order.places.data_ptr(),
        columns // 8,
        out_EHD.data_ptr(),
        out_EHD.stride(0) // 8,
        0 if overlap is None or overlap.holder_ptr is None else overlap.holder_ptr.data_ptr(),
        0 if overlap is None else overlap.own,
    )


def _width(columns: int, options: dict[str, Any]) -> int:
    """Columns of a tile of sums."""
    multiple = int(options.get("hdim_multiple_of", 32))
    return -(-columns // multiple) * multiple


def _order(convert: Convert, rounded_EHD: Tensor, *rest: Any, **options: Any) -> _Order:
    """Where the library's rounding, called with these further arguments, reads the columns of `rounded_EHD`, which is
    not touched. Found once, and looked at on the host, then kept.

    Raises:
        RuntimeError: the library's order within a tile is not understood.
    """
    fixed = (pair for pair in sorted(options.items()) if pair[0] != "cu_total_m_blocks")
    columns = rounded_EHD.shape[2]
    key = rounded_EHD.device, columns, rounded_EHD.dtype, rest, *fixed
    if key not in _orders:
        places = _read_order(convert, rounded_EHD.new_empty(int(rest[4]), 2, columns), rest, options)
        first, second = places[:, ::2], places[:, 1::2]
        in_pairs = bool((first % 2 == 0).all()) and torch.equal(first + 1, second)
        _orders[key] = _Order(places, _width(columns, options), _IN_PAIRS if in_pairs else ())
    return _orders[key]


def _read_order(convert: Convert, out: Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Both digits of each place in a tile, as if they were the sums of two heads."""
    tile, size = out.shape[0], out.shape[0] * _width(out.shape[2], options)
    places = torch.arange(size, device=out.device)
    sums = torch.zeros(2, 2 * size, device=out.device)  # room for one more tile, as the library leaves it
    sums[:, :size] = torch.stack([places % _BASE, places // _BASE])
    cu_seqlens = torch.tensor([0, tile], dtype=torch.int32, device=out.device)
    convert(sums, out, 1.0, cu_seqlens, *rest, **(options | {"cu_total_m_blocks": None}))
    order = (out[:, 0].float() + _BASE * out[:, 1].float()).long()
    alone = order.unique().numel() == order.numel() and int(order.max()) < size <= 2**15
    if rest[0] is not None or options.get("cluster_size", 1) != 1 or tile % _GROUP or not alone:
        raise RuntimeError("FlashAttention's order of fp32 sums within a tile is not understood: use another version")
    return order.short()
