"""Every CUDA kernel compiles for every architecture, on a machine without a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from cp_rewrite.kernels import cuda
from cp_rewrite.kernels.flash import fa4_internals
from cp_rewrite.kernels.peers import BESIDE, FEW_BLOCKS, SHAPE, WHOLE_GPU
from tests.helpers import amount

pytestmark = pytest.mark.long

pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
DTYPES = ("DTYPE_BF16", "DTYPE_FP16", "DTYPE_FP32")
_SCANS: list[cuda.Macros] = [
    *(((dtype, "1"), ("STATES", "16"), ("BLOCK", "128")) for dtype in DTYPES),
    ((DTYPES[0], "1"), ("STATES", "4"), ("BLOCK", "128"), ("DT_FP32", "1")),
    ((DTYPES[0], "1"), ("STATES", "64"), ("BLOCK", "64")),
]
VARIANTS: dict[str, list[cuda.Macros]] = {
    "gather_rows.cu": [(("ACCESS", str(n)),) for n in (2, 4, 8, 16)],
    "sum_rows.cu": [*(((dtype, "1"),) for dtype in DTYPES), ((DTYPES[0], "1"), ("ACCESS", "2"))],
    "zero_gaps.cu": [()],
    "route_rows.cu": [()],
    "pack_choices.cu": [()],
    "sort_choices.cu": [()],
    "pick_choices.cu": [()],
    "sum_listed.cu": [*(((dtype, "1"),) for dtype in DTYPES), ((DTYPES[0], "1"), ("ACCESS", "2"))],
    "merge_steps.cu": [((DTYPES[2], "1"), ("ACCESS", str(n))) for n in (4, 16)],
    "signal_wait.cu": [()],
    "push_rows.cu": [shape.macros for shape in (WHOLE_GPU, FEW_BLOCKS)],
    "return_rows.cu": [
        ((dtype, "1"), *mxint15, *shape.macros)
        for shape in (SHAPE, BESIDE)
        for mxint15 in ((), cuda.MXINT15)
        for dtype in DTYPES[: 2 if mxint15 else 3]
    ],
    "selective_pass.cu": [*_SCANS, (*_SCANS[0], ("BACK", "1"))],
    "selective_ends.cu": [*_SCANS, (*_SCANS[0], ("BACK", "1"))],
    "selective_out.cu": _SCANS,
    "selective_back.cu": _SCANS,
    "round_sums.cu": [
        ((dtype, "1"), *cuda.MXINT15, *pairs, *out)
        for dtype in DTYPES[:2]
        for pairs in ((), fa4_internals._IN_PAIRS)
        for out in ((), fa4_internals._OUT_FP32)
    ],
}


def test_every_source_has_variants() -> None:
    assert {path.name for path in cuda.SOURCES.glob("*.cu")} == set(VARIANTS)


@pytest.mark.shared
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", sorted(VARIANTS))
def test_compiles(file: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CP_REWRITE_CACHE", str(tmp_path))
    variants = VARIANTS[file]
    for macros in variants if amount.everything or arch == ARCHITECTURES[1] else variants[:1]:
        assert cuda.compile_kernel(file, arch, macros)[:4] == b"\x7fELF"


def test_cache_is_keyed_by_source_architecture_and_macros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CP_REWRITE_CACHE", str(tmp_path))
    cubin = cuda.compile_kernel("zero_gaps.cu", "sm_80")
    assert cuda.compile_kernel("zero_gaps.cu", "sm_80") == cubin
    assert len(list(tmp_path.iterdir())) == 1
    cuda.compile_kernel("zero_gaps.cu", "sm_90a")
    cuda.compile_kernel("zero_gaps.cu", "sm_80", (("ACCESS", "8"),))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_takes_no_files_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CP_REWRITE_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(cuda, "_compile", lambda *_: b"cubin")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert [cuda.compile_kernel("zero_gaps.cu", arch) for arch in ("sm_80", "sm_90a")] == [b"cubin"] * 2
    assert ["can't be kept in" in str(warning.message) for warning in found] == [True]
    monkeypatch.setenv("CP_REWRITE_CACHE", "/proc/cp_rewrite")
    with pytest.warns(UserWarning, match="Set CP_REWRITE_CACHE"):
        assert cuda.compile_kernel("zero_gaps.cu", "sm_80") == b"cubin"


def test_a_broken_source_names_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("extern int __global__ nonsense(")
    monkeypatch.setattr(cuda, "SOURCES", tmp_path)
    monkeypatch.setenv("CP_REWRITE_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"broken\.cu does not compile for sm_80"):
        cuda.compile_kernel("broken.cu", "sm_80")
