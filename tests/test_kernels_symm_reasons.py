"""Which rows symmetric memory can carry: decided without a GPU."""

from __future__ import annotations

import torch

from cp_rewrite.kernels import symm


def test_row_reasons() -> None:
    assert symm.row_reasons(torch.bfloat16, 8 * 128, 8 * 96) == []
    assert "16-byte chunks" in symm.row_reasons(torch.float16, 12)[0]
    assert "got float64" in symm.row_reasons(torch.float64, 64)[0]
