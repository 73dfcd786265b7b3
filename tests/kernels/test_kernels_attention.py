"""The CUDA attention kernels against the fp32 oracle: masks, head dims, padding, repeatability."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels import reference, rows
from cp_rewrite.kernels.flash import aten_flash, fa3, fa4
from cp_rewrite.kernels.select import AttentionSpec, Params, Tables, device_facts, reasons
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.local_rows import split_kv
from cp_rewrite.planning.routes.gathered import gathered_route
from tests.helpers.kernel_cases import Case, make_case
from tests.helpers.packed import make_schedule, tensors
from tests.helpers.tolerances import relative_error, tolerance

pytestmark = pytest.mark.gpu

BACKENDS = {"fa4": fa4, "fa3": fa3, "aten_flash": aten_flash}
# Lengths around tiles and far from them, padding inside, at the end, and neither.
ROWS = {
    "dense": Documents.from_lengths([700, 33, 1, 1500, 301, 128]),
    "tail": Documents.from_lengths([700, 33, 1, 1500], 2600),
    "gaps": Documents.from_cu_seqlens([0, 640, 673, 674, 2000], 2600, [0, 704, 768, 800, 2200]),
}
CAUSAL, FULL, WINDOW = PackedMask(), PackedMask(False), PackedMask(True, (200, 0))
BOTH = PackedMask(False, (100, 60))


def _skip_unless_able(name: str, case: Case, params: Params) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (_, heads, dim), (_, heads_kv, dim_v) = case.q.shape, case.v.shape
    spec = AttentionSpec(
        case.q.dtype, dim, dim_v, heads, heads_kv, deterministic=params.deterministic, softcap=params.softcap
    )
    why = reasons(name, spec, device_facts(torch.device("cuda")))
    if why:
        pytest.skip(f"{name}: {'; '.join(why)}")


def _case(row: str, mask: PackedMask, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> Case:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return make_case(ROWS[row], mask, rank=1, layout="dual_chunk", heads=heads, dims=dims, dtype=dtype, device=device)


def _run(name: str, case: Case, params: Params) -> tuple[Tensor, ...]:
    module = BACKENDS[name]
    out, lse = module.forward(case.q, case.k, case.v, case.tables, params)
    return out, lse, *module.backward(case.dout, case.q, case.k, case.v, out, lse, case.tables, params)


@pytest.mark.parametrize(
    ("row", "mask", "heads", "dims", "dtype"),
    [
        ("dense", CAUSAL, (8, 2), (128, 128), torch.bfloat16),
        ("dense", CAUSAL, (8, 2), (128, 128), torch.float16),
        ("dense", CAUSAL, (4, 4), (128, 128), torch.bfloat16),
        ("dense", FULL, (8, 2), (128, 128), torch.bfloat16),
        ("dense", WINDOW, (8, 2), (128, 128), torch.bfloat16),
        ("dense", BOTH, (8, 2), (128, 128), torch.bfloat16),
        ("dense", CAUSAL, (8, 2), (64, 64), torch.bfloat16),
        ("dense", CAUSAL, (8, 2), (96, 96), torch.bfloat16),
        ("dense", CAUSAL, (4, 4), (192, 128), torch.bfloat16),
        ("dense", CAUSAL, (8, 2), (256, 256), torch.bfloat16),
        ("tail", CAUSAL, (8, 2), (128, 128), torch.bfloat16),
        ("gaps", CAUSAL, (8, 2), (128, 128), torch.bfloat16),
        ("gaps", BOTH, (8, 2), (128, 128), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_against_the_oracle_with_poisoned_padding(
    name: str, row: str, mask: PackedMask, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    params = Params(dims[0] ** -0.5, deterministic=True)
    case = _case(row, mask, heads, dims, dtype)
    _skip_unless_able(name, case, params)
    clean = _run(name, case.poisoned(0.0), params)
    poisoned = _run(name, case.poisoned(torch.nan), params)
    expected = case.oracle(params)
    for what, first, second in zip(("out", "lse", "dq", "dk", "dv"), clean, poisoned, strict=True):
        assert torch.equal(first, second), f"{what} changes with what the padding rows hold"
    valid = ~case.padding
    for what, got, want in zip(("out", "dq"), (poisoned[0], poisoned[2]), (expected[0], expected[2]), strict=True):
        assert not got.cpu()[case.padding].any(), f"{what} is not zero in padding rows"
        assert relative_error(got.cpu()[valid], want[valid]) <= tolerance(dtype), what
    for what, got, want in zip(("dk", "dv"), poisoned[3:], expected[3:], strict=True):
        assert relative_error(got.cpu(), want) <= tolerance(dtype), what
    lse = poisoned[1].cpu()
    assert (lse[:, case.padding] == -torch.inf).all()
    torch.testing.assert_close(lse[:, valid], expected[1][:, valid], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", BACKENDS)
def test_one_missing_key_is_seen(name: str) -> None:
    """Short rows of one head, where an off-by-one of the mask is far above rounding."""
    case = make_case(
        Documents.from_lengths([40, 24]), CAUSAL, heads=(1, 1), dims=(64, 64), dtype=torch.bfloat16,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    params = Params(0.125)
    _skip_unless_able(name, case, params)
    for got, want in zip(_run(name, case, params), case.oracle(params), strict=True):
        torch.testing.assert_close(got.cpu().float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", BACKENDS)
def test_deterministic_backward_repeats_bitwise(name: str) -> None:
    params = Params(128**-0.5, deterministic=True)
    case = _case("dense", CAUSAL, (8, 2), (128, 128), torch.bfloat16)
    _skip_unless_able(name, case, params)
    first = _run(name, case, params)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, _run(name, case, params), strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_synchronisation(name: str) -> None:
    params = Params(128**-0.5)
    case = _case("gaps", BOTH, (8, 2), (128, 128), torch.bfloat16)
    _skip_unless_able(name, case, params)
    _run(name, case, params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(name, case, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_reference_runs_on_the_gpu() -> None:
    case = _case("gaps", CAUSAL, (8, 2), (64, 64), torch.float32)
    params = Params(0.125)
    out, lse = reference.forward(case.q, case.k, case.v, case.tables, params)
    expected = case.oracle(params)
    torch.testing.assert_close(out.cpu(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fa4", "aten_flash"])
@pytest.mark.parametrize(("layout", "mask", "limit"), [("balanced", CAUSAL, 1.2), ("dual_chunk", FULL, 1.3)])
def test_error_is_hardly_larger_than_that_of_one_launch(name: str, layout: str, mask: PackedMask, limit: float) -> None:
    """Four ranks' pieces, one after another on one GPU, against one launch over the whole row: both have an error
    against fp32. Kernels round the gradients of each piece's keys, so keys of many pieces (dual_chunk: up to 8) come
    out a little worse."""
    documents, (heads, heads_kv, dim) = Documents.from_lengths([1500, 40, 900, 1656]), (8, 2, 128)
    one = make_case(documents, mask, world_size=1, heads=(heads, heads_kv), dims=(dim, dim), dtype=torch.bfloat16,
                    device="cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    params = Params(dim**-0.5)
    _skip_unless_able(name, one, params)
    schedule, indices = make_schedule([documents], 4, layout, mask)
    own = [torch.from_numpy(index[0]).cuda() for index in indices]
    kv = torch.cat([one.k.flatten(1), one.v.flatten(1)], 1)
    total = torch.zeros(kv.shape, device="cuda")
    out, dq = torch.zeros_like(one.q), torch.zeros_like(one.q)
    for rank, tokens in enumerate(own):
        tables = Tables(*tensors(schedule, rank, "all_gather")[0])
        tables = Tables(tables.cu_seqlens_q.cuda(), tables.cu_seqlens_k.cuda(), tables.pieces, tables.launches)
        kv_rows = torch.from_numpy(gathered_route(schedule, rank)["kv_rows"]).cuda().long()
        expanded = rows.gather_rows(kv, torch.cat(own)[kv_rows].int())
        k, v = split_kv(expanded, heads_kv, dim, dim)
        valid = tokens >= 0
        part = _run(name, Case(one.q[tokens], k, v, one.dout[tokens], tables, ~valid.cpu()), params)
        out[tokens[valid]], dq[tokens[valid]] = part[0][valid], part[2][valid]
        total.index_add_(0, torch.cat(own)[kv_rows], torch.cat([part[3].flatten(1), part[4].flatten(1)], 1).float())
    dk, dv = split_kv(total.bfloat16(), heads_kv, dim, dim)
    expected, whole = one.oracle(params), _run(name, one, params)
    for what, i, got in (("out", 0, out), ("dq", 2, dq), ("dk", 3, dk), ("dv", 4, dv)):
        alone = relative_error(whole[i].cpu(), expected[i])
        assert relative_error(got.cpu(), expected[i]) <= limit * alone, f"{what}: one launch has {alone:.2e}"
