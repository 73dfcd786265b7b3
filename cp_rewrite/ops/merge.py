"""Softmax results over parts of the keys, put together; and sinks, which are one more key without a value.

Shapes: R rows, H query heads, V head dim of v. `lse` is (H, R); -inf (from some kernels +inf): the row saw no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_rewrite.kernels.rows import merge_steps


def merge_parts(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both: out (R, H, V) and lse, both in fp32 (fp64 for fp64).

    A row that saw no key in a part keeps what it has; one that saw none in both stays at 0 and -inf.
    """
    return merge_steps(torch.stack([out, part.to(out.dtype)]), torch.stack([lse, part_lse]))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one more logit per head, `sinks` (H,), that draws weight and adds no value.

        out' = out · exp(lse - lse'),   lse' = log(exp(lse) + exp(sink))

    Rows that saw no key stay at 0 and -inf. A kernel's backward given out' and lse' yields the gradients of q, k and v.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]).masked_fill(lse == -torch.inf, -torch.inf)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return (out * weight.t()[..., None]).to(out.dtype), total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,): minus the sum over rows of (the sink's weight) · (dout · out). Rows that saw no key are not read."""
    seen = lse != -torch.inf
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(~seen, 0.0))
    return -torch.where(seen, weight * delta, 0.0).sum(1).to(sinks.dtype)
