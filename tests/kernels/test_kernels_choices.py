"""The kernels over experts' choices against loops: in plain torch on the CPU, and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_rewrite.kernels import choices, cuda

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and cuda.reasons():
        pytest.skip("; ".join(cuda.reasons()))
    return torch.device(request.param)


SHAPES = [(0, 2, 4, 2), (1, 1, 1, 1), (7, 3, 2, 4), (33, 2, 5, 3), (1500, 8, 64, 2), (2049, 4, 3, 8), (5000, 6, 128, 1)]
"""N, k, own, ranks."""


def drawn(N: int, k: int, own: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Choices, some of no expert and some twice; and their weights."""
    draw = torch.Generator().manual_seed(N + k)
    chosen = torch.randint(-2, own * ranks + 2, (N, k), generator=draw)
    chosen[::5] = own * ranks - 1
    chosen[3::7] = -1
    return chosen, torch.rand(N, k, generator=draw) + 0.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_route(device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    (N, _, own, ranks), (chosen, weight) = shape, drawn(*shape)
    weight = weight.to(dtype)
    found = choices.route(chosen.to(device), weight.to(device), own, ranks)
    counts, at, token, packed = (x.cpu() for x in found)
    row, tokens, rows = 0, list[int](), list[Tensor]()
    for rank in range(ranks):
        mine = (chosen >= rank * own) & (chosen < (rank + 1) * own)
        sent = mine.any(1).nonzero()[:, 0].tolist()
        assert counts[rank, 0] == len(sent)
        assert torch.equal(counts[rank, 1 : 1 + own], torch.bincount(chosen[mine] - rank * own, minlength=own))
        assert (counts[:, 1 + own + rank] == len(sent)).all()
        expected = torch.full((N,), -1, dtype=torch.int32)
        expected[sent] = torch.arange(row, row + len(sent), dtype=torch.int32)
        assert torch.equal(at[:, rank], expected)
        row, tokens = row + len(sent), tokens + sent
        ids, weights = torch.where(mine, chosen - rank * own, own), torch.where(mine, weight, 0)
        rows.append(torch.cat([ids.to(packed.dtype), weights.view(packed.dtype)], 1)[sent])
    assert token[:row].tolist() == tokens
    assert torch.equal(packed[:row], torch.cat(rows))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sort(device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    (R, k, own, _), (chosen, weight) = shape, drawn(*shape)
    chosen, weight = torch.where((chosen < 0) | (chosen > own), own, chosen), weight.to(dtype)
    bits = torch.int32 if dtype is torch.float32 else torch.int64
    packed = torch.cat([chosen.to(bits), weight.view(bits)], 1)
    sizes = torch.bincount(chosen.flatten(), minlength=own + 1)[:own]
    pairs = int(sizes.sum())
    found = choices.sort(packed.to(device), sizes.cumsum(0).int().to(device), pairs)
    row, weights, at = (x.cpu() for x in found)
    listed = [(i, j) for e in range(own) for i, j in (chosen == e).nonzero().tolist()]
    assert row.tolist() == [i for i, _ in listed]
    assert torch.equal(weights, torch.stack([weight[i, j] for i, j in listed])[:, None] if listed else weights)
    expected = torch.full((R, k), -1)
    for place, (i, j) in enumerate(listed):
        expected[i, j] = place
    assert at.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "m", "columns"), [(0, 2, 8), (5, 1, 1), (70, 3, 36), (300, 8, 2048), (40, 2, 3)])
def test_add_listed(device: torch.device, dtype: torch.dtype, n: int, m: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(n)
    x = torch.randn(n * m + 3, columns, generator=draw).to(dtype)
    at = torch.randint(-1, len(x), (n, m), generator=draw, dtype=torch.int32)
    expected = torch.zeros(n, columns)
    for j in range(m):
        expected += torch.where(at[:, j : j + 1] < 0, 0, x[at[:, j].clamp(min=0).long()].float())
    found = choices.add_listed(x.to(device), at.to(device))
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_pick(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    (N, k, own, ranks), (chosen, weight) = shape, drawn(*shape)
    at = choices.route(chosen, weight, own, ranks).at
    found = torch.rand(max(int(at.max()) + 1, 0) if N else 0, k)
    expected = torch.zeros(N, k)
    for n, j in ((chosen >= 0) & (chosen < own * ranks)).nonzero().tolist():
        expected[n, j] = found[at[n, chosen[n, j] // own], j]
    given = found.to(device), at.to(device), chosen.to(device), own
    assert torch.equal(choices.pick(*given).cpu(), expected)
