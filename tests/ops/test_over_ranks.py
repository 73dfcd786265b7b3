"""Rows of all ranks, and running products, as ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

ops: Any = torch.ops.cp_rewrite


def test_running_products_have_their_gradient_at_zeros() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    x[0, 1] = x[0, 3, 0] = x[1, 4] = 0
    assert torch.equal(ops.running_product(x), x.cumprod(1))
    assert torch.autograd.gradcheck(ops.running_product, x.requires_grad_())


@pytest.mark.slow
def test_ops_pass_opcheck() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    opcheck(ops.rows_of_ranks.default, (x, 1, ""))
    opcheck(ops.sum_rows_of_ranks.default, (x.detach(), 1, ""))
    opcheck(ops.running_product.default, (x.unsqueeze(0),))
