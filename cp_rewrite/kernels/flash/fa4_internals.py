"""FlashAttention 4's fp32 sums of gradients of keys, where several query heads share them: written out by a kernel of
ours instead of the library's, which rounds to half precision what is only a part of a sum.

The library's kernels keep the sums of a tile in an order of their own. It is read off what the library's rounding does
to a tile of known numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.kernels import cuda

Convert = Callable[..., None]
"""`_bwd_postprocess_convert(accumulated, output, scale, cu_seqlens, seqused, arch, dtype, head_dim, tile, …)`."""

_GROUP, _BLOCK = 16, 128
"""Of `csrc/round_sums.cu`."""
_BASE = 256
"""Whole numbers below are exact in half precision."""
_IN_PAIRS: cuda.Macros = (("IN_PAIRS", "1"),)
_OUT_FP32: cuda.Macros = (("OUT_FP32", "1"),)
_orders: dict[tuple[Any, ...], tuple[Tensor, cuda.Macros]] = {}


def keeps_sums(q_RHD: Tensor, heads_kv: int) -> bool:
    """Are there such sums? The same on all GPUs of one kind."""
    return q_RHD.shape[1] != heads_kv and torch.cuda.get_device_capability(q_RHD.device)[0] == 9


def round_sums(
    convert: Convert,
    sums: Tensor,
    rounded_EHD: Tensor,
    out_EHD: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    holder_ptr: Tensor | None,
    *rest: Any,
    **options: Any,
) -> None:
    """Write rows of `scale` times the sums.

    Args:
        convert, rest, options: the library's rounding, and its further arguments.
        sums: (Hkv, …) fp32. cu_seqlens: (n + 1,) int32. rounded_EHD: what the library would write.
        out_EHD: fp32, or of that dtype, which then holds MXINT15 (`csrc/rows.cuh`); its rows have no holes.
        holder_ptr: (E + 1,) int32; rows whose part of it is empty are rounded for good. None: none are.

    Raises:
        RuntimeError: the library's order within a tile is not understood.
    """
    order, in_pairs = _order(convert, rounded_EHD, *rest, **options)
    tile, heads, columns = order.shape[0], out_EHD.shape[1], out_EHD.shape[2]
    width = _width(columns, options)
    wide = _OUT_FP32 * (out_EHD.dtype == torch.float32)
    macros = ((cuda.DTYPES[rounded_EHD.dtype], "1"), *cuda.MXINT15, *in_pairs, *wide)
    cuda.launch(
        cuda.kernel("round_sums", sums.device, macros),
        (sums.shape[1] // width // _GROUP, heads),
        _BLOCK,
        sums.device,
        sums.data_ptr(),
        cuda.u64(sums.shape[1]),
        cuda.f32(scale),
        cu_seqlens.data_ptr(),
        cuda.u32(cu_seqlens.shape[0] - 1),
        cuda.u32(tile),
        cuda.u32(width),
        order.data_ptr(),
        cuda.u32(columns // 8),
        out_EHD.data_ptr(),
        cuda.u64(out_EHD.stride(0) // 8),
        0 if holder_ptr is None else holder_ptr.data_ptr(),
    )


def _width(columns: int, options: dict[str, Any]) -> int:
    """Columns of a tile of sums."""
    multiple = int(options.get("hdim_multiple_of", 32))
    return -(-columns // multiple) * multiple


def _order(convert: Convert, rounded_EHD: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, cuda.Macros]:
    """(tile, D) int16: where in a tile of sums each row's columns are; and whether these lie in pairs. Read once, and
    looked at on the host, then kept."""
    fixed = (pair for pair in sorted(options.items()) if pair[0] != "cu_total_m_blocks")
    key = rounded_EHD.device, rounded_EHD.shape[2], rounded_EHD.dtype, rest, *fixed
    if key not in _orders:
        order = _read_order(convert, rounded_EHD.new_empty(int(rest[4]), 2, rounded_EHD.shape[2]), rest, options)
        first, second = order[:, ::2], order[:, 1::2]
        in_pairs = bool((first % 2 == 0).all()) and torch.equal(first + 1, second)
        _orders[key] = order, _IN_PAIRS if in_pairs else ()
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
