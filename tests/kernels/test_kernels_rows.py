"""The row kernels against plain loops, in plain torch on the CPU and compiled on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_rewrite.kernels import rows
from cp_rewrite.planning.intervals import sum_lists

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and rows.cuda.reasons():
        pytest.skip("; ".join(rows.cuda.reasons()))
    torch.manual_seed(0)
    return torch.device(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "size", "columns"), [(5, 2, 8), (300, 1000, 2048), (33, 70, 3), (9, 50, 20), (4, 0, 8)]
)
def test_gather_rows(device: torch.device, dtype: torch.dtype, count: int, size: int, columns: int) -> None:
    src = torch.randn(count, columns, device=device).to(dtype)
    index = torch.randint(count, (size,), device=device, dtype=torch.int32)
    assert torch.equal(rows.gather_rows(src, index), src[index.long()])


def test_gather_rows_of_a_strided_source(device: torch.device) -> None:
    src = torch.randn(40, 96, device=device)[:, 32:64]
    index = torch.randint(40, (100,), device=device, dtype=torch.int32)
    assert torch.equal(rows.gather_rows(src, index), src[index.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "columns", "most"), [(3, 8, 2), (500, 2048, 3), (40, 3, 5), (70, 36, 1)])
def test_sum_rows(device: torch.device, dtype: torch.dtype, size: int, columns: int, most: int) -> None:
    x = torch.randn(size * most + 5, columns).to(dtype)
    owners = torch.full((len(x),), size)
    owners[torch.randperm(len(x))[: size * most]] = torch.randint(size, (size * most,))
    read = owners < size
    owner, source = owners[read], torch.arange(len(x))[read]
    expected = torch.zeros(size, columns)
    for row, j in zip(owner.tolist(), source.tolist(), strict=True):  # the same order, so the same bits
        expected[row] += x[j].float()
    ptr, lists = sum_lists(owner.numpy(), size)
    lists = np.where(lists < 0, -1, source.numpy()[lists])
    arguments = x.to(device), torch.from_numpy(ptr).int().to(device), torch.from_numpy(lists).int().to(device)
    assert torch.equal(rows.sum_rows(*arguments).cpu(), expected)
    odd = torch.nn.functional.pad(arguments[2], (1, 0))[1:]  # no pair is aligned
    assert torch.equal(rows.sum_rows(*arguments[:2], odd).cpu(), expected)


@pytest.mark.parametrize("columns", [1, 3, 64])
def test_zero_gaps(device: torch.device, columns: int) -> None:
    cu_q = torch.tensor([0, 3, 5, 5, 9, 12], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 3, 3, 7, 7, 9], dtype=torch.int32, device=device)
    out = torch.full((12, 2, columns), torch.nan, device=device, dtype=torch.bfloat16)
    lse = torch.full((2, 12), torch.nan, device=device)
    gaps = torch.tensor([i in (3, 4, 5, 6, 7, 8) for i in range(12)])
    out[~gaps.to(device)], lse[:, ~gaps.to(device)] = 1, 1
    rows.zero_gaps(out, lse, cu_q, cu_k)
    assert torch.equal(out.float().cpu(), (~gaps).float()[:, None, None].expand(12, 2, columns))
    assert torch.equal(lse.cpu(), torch.where(gaps, -torch.inf, 1.0).expand(2, 12))


@pytest.mark.parametrize("dim", [8, 128, 3])
def test_merge_steps(device: torch.device, dim: int) -> None:
    steps, size, heads = 5, 37, 3
    outs = torch.randn(steps, size, heads, dim)
    lses = torch.randn(steps, heads, size) * 20
    unseen = torch.rand(steps, heads, size) < 0.4
    unseen[:, :, 0] = True
    lses[unseen] = torch.where(torch.rand(int(unseen.sum())) < 0.5, -torch.inf, torch.inf)
    outs[unseen.transpose(1, 2)] = torch.nan
    clean = lses.double().masked_fill(unseen, -torch.inf)
    weight = torch.exp(clean - clean.amax(0).clamp(min=-1e30)).transpose(1, 2)[..., None]
    total = weight.sum(0)
    expected = (torch.where(weight > 0, outs.double(), 0.0) * weight).sum(0) / total.where(total > 0, 1.0)
    out, lse = rows.merge_steps(outs.to(device), lses.to(device))
    torch.testing.assert_close(out.cpu(), expected.float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.cpu(), clean.logsumexp(0).float(), rtol=2e-6, atol=2e-6)
    assert not out[0].any()
    assert (lse[:, 0] == -torch.inf).all()
