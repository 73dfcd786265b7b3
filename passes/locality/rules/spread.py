"""Where the tokens of a tensor are: which of its rows hold one, and along which dim they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import B, Dims, Fewer, Mixes, T, fewer, with_fewer
from cp_rewrite.passes.locality.claims.tensor_state import Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.values.resolution import Ranks
from cp_rewrite.planning.plan_input import TOKEN_INDEX, PlanInput


def can_spread(rows: Rows) -> bool:
    """Not rows in an order of their own, and no places of rows."""
    factors = [factor for dim in rows.dims for factor in dim or () if not (isinstance(factor, Fewer) and factor.by > 0)]
    return (
        rows.shard_rows is None
        and not rows.key
        and all(factor in (B, T) or isinstance(factor, int) for factor in factors)
    )


def rows_along(call: Call, dim: int) -> tuple[Rows, int]:
    """The rows of an op's first tensor, and the dim, where tokens stand in it alone, in their order.

    Raises:
        Mixes: they do not, rows of the batch have no dim of their own, or the op writes.
    """
    rows = call.rows(call.first)
    dim = dim % max(call.first.ndim, 1)
    if rows is None or not can_spread(rows) or rows.dims[dim] not in ((T,), (B, T)) or call.written:
        raise Mixes(f"{call.name} of something else than tokens")
    if any(entry not in (None, (B,)) for i, entry in enumerate(rows.dims) if i != dim):
        raise Mixes(f"{call.name} of rows of the batch that are no dim of their own")
    return rows, dim


def has_row(ranks: Ranks, dims: Dims) -> Tensor:
    """Which local rows hold one of a tensor with these dims, as `spread`."""
    more = (ranks.token_index, ranks.row_tokens) if fewer(dims) else ()
    return spread(has_row_BT(dims, ranks.has_token, *more), dims)


def has_row_BT(
    dims: Dims, has_token_BT: Tensor, index_BT: Tensor | None = None, row_tokens: Tensor | None = None
) -> Tensor:
    """(B, T) which local rows hold one of a tensor with these dims; one of fewer tokens needs the last two."""
    if index_BT is None or row_tokens is None:
        return has_token_BT
    return has_token_BT & (index_BT < row_tokens - fewer(dims))


def reads_of(dims: Dims) -> tuple[PlanInput, ...]:
    """What `has_row` reads of the plan beside `READ`."""
    return (TOKEN_INDEX,) if fewer(dims) else ()


def spread(has_token_BT: Tensor, dims: Dims) -> Tensor:
    """(B, T) as a tensor that broadcasts against one of these dims.

    (B,) (T,) ·     (B, T, 1)
    (B, T) ·        (B * T, 1)
    (T, 4)          (T * 4,)
    """
    dims = with_fewer(dims, 0)
    while dims and dims[0] is None:  # broadcasting adds them
        dims = dims[1:]
    factors = [factor for dim in dims for factor in dim or (1,)]
    axes = [factor for factor in factors if factor in (B, T)]
    # Without a batch axis the tensor is the same for all rows of the batch.
    x = has_token_BT[0] if axes == [T] else has_token_BT if axes == [B, T] else has_token_BT.t()
    for place, factor in enumerate(factors):
        if factor not in axes:
            x = x.unsqueeze(place)
    return _joined(x, factors, dims)


def _joined(x: Tensor, factors: Sequence[Any], dims: Dims) -> Tensor:
    """Every factor has a dim of `x`: those that stand in one of `dims` become one."""
    if any(dim is not None and len(dim) > 1 for dim in dims):
        sizes = [factor if isinstance(factor, int) else -1 for factor in factors]
        x = x.expand(sizes) if any(size > 1 for size in sizes) else x
    for place, dim in enumerate(dims):
        if dim is not None and len(dim) > 1:
            x = x.flatten(place, place + len(dim) - 1)
    return x
