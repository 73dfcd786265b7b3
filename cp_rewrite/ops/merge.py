"""Softmax results over parts of the keys, put together; sinks, which are one more key without a value; and rows that
saw no key at all.

Shapes: R rows, H query heads, V head dim of v. `lse` is (H, R); -inf (from some kernels +inf): the row saw no key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_rewrite.kernels.inputs import Tables
from cp_rewrite.kernels.rows import merge_steps
from cp_rewrite.planning.columns import PieceRow


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


def finished(out: Tensor, lse: Tensor, tables: Tables, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results of attention: a kernel's, with sinks added and rows of no document filled."""
    out, lse = (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    return (fill_gaps(out, lse) if has_gaps(tables, out.shape[0]) else out), lse


def fill_gaps(out: Tensor, lse: Tensor) -> Tensor:
    """out with copies in local rows of no document, padding and fill: of the last row before that saw a key, of the
    first where there is none. All other rows are the same bit for bit. The host does not wait for the device.

        row       0 1 2 3 4 5
        document  - A A - B -       -: lse -inf
        out of    1 1 2 2 4 4

    A model may divide by what attention gives, or take its logarithm. Such a row counts in no loss, but 0 times a
    gradient that is infinite is not 0: so it holds what is as valid as any token's.
    """
    if out.shape[0] == 0:
        return out
    gap = lse[0] == -torch.inf
    before = torch.where(gap, -1, torch.arange(gap.shape[0], device=gap.device)).cummax(0).values
    return out.index_select(0, torch.where(before < 0, gap.int().argmin(), before))


_known = WeakTensorKeyDictionary()


def has_gaps(tables: Tables, rows: int) -> bool:
    """True if some of the local rows may be of no document: of tables that are no ring's. Found once per batch."""
    known = _known.get(tables.pieces)
    if known is None:
        at = PieceRow(*tables.pieces.unbind(1))
        of_documents = int(((at.q1 - at.q0) * (at.k1 > at.k0)).sum())
        known = _known[tables.pieces] = -1 if tables.sizes_are_bounds else of_documents
    return known < rows
