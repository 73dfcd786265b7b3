"""FlashAttention's fp32 sums of gradients as rows: `csrc/round_sums.cu` on the CPU, and how its order is read off."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cp_rewrite.kernels.cuda import SOURCES
from cp_rewrite.kernels.flash import fa4_internals
from tests.kernels.emulated import COMPILER, HERE, compile_cpp

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
Order = NDArray[np.int16]


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "in pairs"])
def in_pairs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["16 bits", "fp32"])
def out_fp32(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def library(in_pairs: bool, out_fp32: bool, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("round_sums")
    for file in ("rows.cuh", "round_sums.cu"):
        text = re.sub(r'asm\("cvt\.rn\.bf16[^;]*;"[^;]*\);', "y = to_bf16(x);", (SOURCES / file).read_text())
        (folder / file).write_text(re.sub(r'asm\("cvt[^;]*;"[^;]*\);', "", text))
    macros = ["-DDTYPE_BF16", "-DMXINT15", *["-DIN_PAIRS"] * in_pairs, *["-DOUT_FP32"] * out_fp32]
    built = folder / "round_sums.so"
    compile_cpp("-shared", "-fPIC", *macros, f"-I{folder}", HERE / "round_sums.cpp", "-o", built)
    return ctypes.CDLL(str(built))


def there_and_back(library: ctypes.CDLL, x: NDArray[np.float32]) -> NDArray[np.float32]:
    y = np.zeros_like(x)
    library.there_and_back(ctypes.c_uint32(x.size // 8), pointer(x), pointer(y))
    return y


def pointer(x: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.ctypes.data)


def nearest(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The numbers that 8 neighbours in 15 bits each come to."""
    blocks = x.reshape(-1, 8).astype(np.float64)
    largest = np.abs(blocks).max(1, keepdims=True)
    exponents = np.floor(np.log2(np.maximum(largest, 2.0**-113)))
    steps = 2.0 ** (exponents - 13)
    return (np.rint(blocks / steps).clip(1 - 2**14, 2**14 - 1) * steps).reshape(x.shape)


@needs_compiler
def test_numbers_that_share_an_exponent(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((20_000, 8)) * np.exp2(random.integers(-120, 125, (20_000, 1)))
    x[::3] *= np.exp2(random.integers(-20, 1, x[::3].shape))
    x = np.concatenate([x.ravel(), np.zeros(8), np.full(8, 2.0**-149), [-1.0] * 8, [2 - 2.0**-23, 1] * 4])
    x = np.concatenate([x, [np.finfo(np.float32).max, *[-np.finfo(np.float32).max] * 7]]).astype(np.float32)
    y = there_and_back(library, x)
    assert (y == nearest(x)).all()
    error = np.linalg.norm((y - x).reshape(-1, 8).astype(np.float64), axis=1)
    size = np.linalg.norm(x.reshape(-1, 8).astype(np.float64), axis=1)
    assert (error <= 2.0**-12 * np.maximum(size, 2.0**-113)).all()


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_nan(bad: float, library: ctypes.CDLL) -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 5] = bad
    assert np.isnan(there_and_back(library, x)).tolist() == [[False] * 8, [True] * 8, [False] * 8]


def in_tiles(rows: NDArray[np.float32], cu_seqlens: NDArray[np.int32], order: Order, width: int) -> NDArray[np.float32]:
    """(heads, tiles, tile * width): rows (E, heads, D) as FlashAttention keeps them; NaN elsewhere."""
    tile, entries = len(order), len(cu_seqlens) - 1
    sums = np.full((rows.shape[1], (len(rows) + (entries + 1) * tile - 1) // tile, tile * width), np.nan, np.float32)
    for entry, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for row in range(begin, end):
            at = begin // tile * tile + entry * tile + row - begin
            sums[:, at // tile, order[at % tile].astype(np.int64)] = rows[row]
    return sums


def round_all(
    library: ctypes.CDLL,
    sums: NDArray[np.float32],
    cu_seqlens: NDArray[np.int32],
    order: Order,
    holder_ptr: NDArray[np.int32] | None,
    own: int,
    out: NDArray[Any],
) -> None:
    """All blocks of the kernel, one after the other, scaling by 0.3."""
    heads, tiles, size = sums.shape
    tile, dim = order.shape
    library.round_all(
        *(ctypes.c_uint32(n) for n in (tiles * tile // 16, heads)),
        pointer(sums),
        ctypes.c_uint64(tiles * size),
        ctypes.c_float(0.3),
        pointer(cu_seqlens),
        *(ctypes.c_uint32(n) for n in (len(cu_seqlens) - 1, tile, size // tile)),
        pointer(order),
        ctypes.c_uint32(dim // 8),
        pointer(out),
        ctypes.c_uint64(out.shape[1] // 8),
        pointer(holder_ptr),
        ctypes.c_uint32(own),
    )


@needs_compiler
@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 32, 33]) | st.integers(0, 100), min_size=1, max_size=9),
    heads=st.integers(1, 3),
    columns=st.sampled_from([(8, 32), (32, 32), (64, 64)]),
    tile=st.sampled_from([16, 32, 48]),
    hold=st.booleans(),
    own=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_rows_are_the_scaled_sums(
    library: ctypes.CDLL,
    in_pairs: bool,
    out_fp32: bool,
    lengths: list[int],
    heads: int,
    columns: tuple[int, int],
    tile: int,
    hold: bool,
    own: int,
    seed: int,
) -> None:
    """Whatever the order within a tile; entries begin at tiles of their own; rows outside of all are left alone."""
    random = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total, (dim, width) = int(cu_seqlens[-1]), columns
    if in_pairs:
        order = np.repeat(2 * random.permutation(tile * width // 2), 2) + np.arange(tile * width) % 2
    else:
        order = random.permutation(tile * width)
    order = order.reshape(tile, width)[:, :dim].astype(np.int16)
    rows = random.standard_normal((total, heads, dim)).astype(np.float32)
    sums = in_tiles(rows, cu_seqlens, order, width)
    holder_ptr = (
        np.concatenate([[5], 5 + np.cumsum(random.integers(own, own + 2, total))]).astype(np.int32) if hold else None
    )
    stride = heads * dim + 16
    out = np.full((total + 2, stride), 7, np.float32 if out_fp32 else np.uint16)
    round_all(library, sums, cu_seqlens, order, holder_ptr, own, out)
    assert (out[:, heads * dim :] == 7).all()
    assert (out[total:] == 7).all()
    scaled = np.float32(0.3) * rows
    found = np.ascontiguousarray(out[:total, : heads * dim]).reshape(scaled.shape)
    if out_fp32:
        assert (found == scaled).all()
        return
    held = np.ones(total, bool) if holder_ptr is None else np.diff(holder_ptr) > own
    parts = np.zeros_like(scaled)
    library.add_parts(ctypes.c_uint32(parts.size // 8), pointer(found), pointer(parts))
    assert (parts == nearest(scaled))[held].all()
    as_bf16 = (found.astype(np.uint32) << 16).view(np.float32)
    assert (as_bf16 == torch.from_numpy(scaled).bfloat16().float().numpy())[~held].all()


def rounding_of(order: Order) -> Callable[..., None]:
    """The library's rounding, with that order in its tiles."""

    def convert(
        sums: torch.Tensor, out: torch.Tensor, scale: float, cu_seqlens: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        assert cu_seqlens.tolist() == [0, order.shape[0]]
        out.copy_(scale * sums[:, torch.from_numpy(order).long()].movedim(0, 1))

    return convert


REST = (None, 90, "bf16", 64, 48, 256, 2, True)
OPTIONS: dict[str, Any] = {"cluster_size": 1, "cu_total_m_blocks": "of a batch", "hdim_multiple_of": 64}


def test_the_order_in_a_tile_is_read_off() -> None:
    random = np.random.default_rng(1)
    apart = random.permutation(48 * 64)
    in_pairs = np.repeat(2 * random.permutation(48 * 32), 2) + np.arange(48 * 64) % 2
    odd = (in_pairs + 1) % (48 * 64)  # pairs, but not where 8 bytes can be read
    like = torch.empty(5, 3, 64, dtype=torch.bfloat16)
    for kind, (order, macros) in enumerate(((apart, ()), (in_pairs, fa4_internals._IN_PAIRS), (odd, ()))):
        order = order.reshape(48, 64).astype(np.int16)
        for batch in ("one", "another"):
            options = OPTIONS | {"cu_total_m_blocks": batch, "kind": kind}
            found = fa4_internals._order(rounding_of(order), like, *REST, **options)
            assert (found.places.numpy() == order).all()
            assert (found.width, found.macros) == (64, macros)


@pytest.mark.parametrize("wrong", ["twice", "seqused", "cluster", "tile"])
def test_an_order_that_is_not_understood_is_told(wrong: str) -> None:
    order = np.arange(48 * 64).reshape(48, 64).astype(np.int16)
    rest, options, out = REST, dict(OPTIONS), torch.empty(48, 2, 64, dtype=torch.bfloat16)
    if wrong == "twice":
        order[3, 4] = order[5, 6]
    elif wrong == "seqused":
        rest = (torch.zeros(1), *REST[1:])
    elif wrong == "cluster":
        options["cluster_size"] = 2
    else:
        order, out = order[:40], out[:40]
    with pytest.raises(RuntimeError, match="not understood"):
        fa4_internals._read_order(rounding_of(order), out, rest, options)
