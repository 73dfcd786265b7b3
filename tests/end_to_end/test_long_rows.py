"""Rows too long for a dense oracle: every exchange against the same attention on one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes.by_exchange import Exchange
from tests.helpers.conformance import attend_on
from tests.helpers.conformance_cells import EXCHANGES, Cell, ranks_of
from tests.helpers.packed import make_schedule, run_rank
from tests.helpers.pool import Pool
from tests.helpers.tolerances import assert_close

ROWS = {
    "unequal": Documents.from_lengths([3001, 1, 1094]),  # 4096 tokens that 2 · ranks does not divide by document
    "many": Documents.from_lengths([1, 0] * 6400, 6500),  # more documents than fit other systems' metadata
}
MASKS = {
    "causal": PackedMask(),
    "two-sided": PackedMask(causal=False, window=(512, 512)),  # clipped by both documents' ends
    "one-sided": PackedMask(window=(128, 0)),
}


def results_on(mesh: DeviceMesh, exchange: str, row: str, mask: str) -> list[Tensor]:
    cell = Cell(exchange, "dual_chunk", MASKS[mask], "none", (4, 2), (16, 8), torch.float32, mesh.size())
    attention = attend_on(mesh, (ROWS[row],), cell, Params(0.25))
    run, indices = attention.run, attention.indices
    real = indices.reshape(-1) >= 0
    index = torch.from_numpy(np.maximum(indices.reshape(-1), 0))
    q, k, v, dout = (x[index] for x in inputs_of(row))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = run(*leaves)
    mine = torch.from_numpy(real)
    return [*(x.detach()[mine] for x in (out, *torch.autograd.grad(out, leaves, dout))), index[mine]]


def inputs_of(row: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[Any] = [(ROWS[row].total, *shape) for shape in ((4, 16), (2, 16), (2, 8), (4, 8))]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("row", "mask"), [("unequal", name) for name in MASKS] + [("many", "causal")])
def test_long_rows_match_one_process(pool: Pool, row: str, mask: str, exchange: str) -> None:
    *inputs, dout = inputs_of(row)
    leaves = [x.requires_grad_() for x in inputs]
    schedule, _ = make_schedule([ROWS[row]], 1, "contiguous", MASKS[mask])
    padding = torch.from_numpy(ROWS[row].document_ids() < 0)
    alone = run_rank(*leaves, schedule, 0, Exchange("local", "", 1), Params(0.25))  # type: ignore[arg-type]
    expected = [alone.detach().clone(), *torch.autograd.grad(alone, leaves, dout)]
    for ranks in ranks_of(exchange):
        parts = pool.run(ranks, results_on, exchange, row, mask)
        for i, name in enumerate(("out", "dq", "dk", "dv")):
            whole = torch.full_like(expected[i], torch.nan)
            for part in parts:
                whole[part[-1]] = part[i]
            if name == "out":  # rows of no document hold copies of others
                assert not whole.isnan().any()
                whole[padding], expected[i][padding] = 0, 0
            assert_close(whole, expected[i], terms=4096, what=f"{name} on {ranks} ranks")
