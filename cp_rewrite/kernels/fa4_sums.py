"""FlashAttention 4's fp32 sums of gradients of keys, where several query heads share them: rounded by a kernel of ours
instead of the library's, so that parts of a sum, which go to the keys' owners in bf16 otherwise, lose half as much.

The library's kernels keep the sums of a tile in an order of their own. It is read off what the library's rounding does
to a tile of known numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cuda

Convert = Callable[..., None]
"""`_bwd_postprocess_convert(accumulated, output, scale, cu_seqlens, seqused, arch, dtype, head_dim, tile, …)`."""

_GROUP, _BLOCK = 16, 128
"""Of `csrc/round_sums.cu`."""
_BASE = 256
"""Whole numbers below are exact in bf16."""
_IN_PAIRS: cuda.Macros = (("IN_PAIRS", "1"),)
_orders: dict[tuple[Any, ...], tuple[Tensor, cuda.Macros]] = {}


def keeps_sums(q_RHD: Tensor, k_EHD: Tensor) -> bool:
    """Are there such sums, of bf16 gradients? The same on all GPUs of one kind."""
    grouped = q_RHD.shape[1] != k_EHD.shape[1]
    return grouped and q_RHD.dtype == torch.bfloat16 and torch.cuda.get_device_capability(q_RHD.device)[0] == 9


def round_sums(
    convert: Convert,
    sums: Tensor,
    out_EHD: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    holder_ptr: Tensor | None,
    *rest: Any,
    **options: Any,
) -> None:
    """Write MXINT15 (`csrc/rows.cuh`) rows of `scale` times the sums.

    Args:
        convert, rest, options: the library's rounding, and its further arguments.
        sums: (Hkv, …) fp32. out_EHD: bf16, rows of 16-byte chunks without holes. cu_seqlens: (n + 1,) int32.
        holder_ptr: (E + 1,) int32; rows whose part of it is empty are rounded to bf16 for good. None: none are.

    Raises:
        RuntimeError: the library's order within a tile is not understood.
    """
    order, in_pairs = _order(convert, out_EHD, *rest, **options)
    tile, heads, columns = order.shape[0], out_EHD.shape[1], out_EHD.shape[2]
    width = _width(columns, options)
    cuda.launch(
        cuda.kernel("round_sums", sums.device, ((cuda.DTYPES[out_EHD.dtype], "1"), *cuda.MXINT15, *in_pairs)),
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


def _order(convert: Convert, out_EHD: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, cuda.Macros]:
    """(tile, D) int16: where in a tile of sums each row's columns are; and whether these lie in pairs. Read once, and
    looked at on the host, then kept."""
    columns, key = out_EHD.shape[2], (out_EHD.device, out_EHD.shape[2], out_EHD.dtype, rest, *sorted(options.items()))
    key = (*key[:4], *(pair for pair in key[4:] if pair[0] != "cu_total_m_blocks"))
    if key not in _orders:
        tile = int(rest[4])
        order = _read_order(convert, out_EHD.new_empty(tile, 2, columns), rest, options)
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
