"""Ranks as a grid: heads are scattered over the inner dim, so that the ranks of one outer place act as one owner.

    4 ranks, inner 2      outer place 0: ranks 0 1      outer place 1: ranks 2 3

After an all-to-all over the inner dim a rank holds the tokens of its whole place, rank after rank. `row_order` sorts
them as every schedule wants them: by position in the row, padding at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.planning.layouts.token_order import outer_order
from cp_rewrite.planning.plan_input import PlanTensor
from cp_rewrite.planning.schedule import Schedule, build

from .route import Arrays, Route, row_index

ORDER = (PlanTensor("row_order"), PlanTensor("row_inverse"))
"""Tables that scattering heads adds to a route."""


def grid_route(plan: BatchPlan, mask: PackedMask, route: Route, rank: int, inner: int) -> Arrays:
    """Kernel tables and tensors of one rank's outer place, whose rows travel by `route`, and its `row_order`."""
    schedule, place = outer_schedule(plan, mask, inner), rank // inner
    return {**schedule.attention(place), **route.arrays(schedule, place), **row_order(plan, place, inner)}


def inner_sizes(ranks: int, heads_kv: int) -> tuple[int, ...]:
    """Over how many of a node's `ranks` heads may be scattered: all; and, with fewer key heads than ranks, so many that
    none gets a copy of another's, and rows travel between the others.

        8 ranks, 2 key heads     8 2        8 ranks, 8 key heads     8
    """
    fewer = next(n for n in range(min(ranks, heads_kv), 0, -1) if ranks % n == 0)
    return (ranks, fewer) if 1 < fewer < ranks else (ranks,)


def outer_schedule(plan: BatchPlan, mask: PackedMask, inner: int) -> Schedule:
    """The schedule of the outer places: each owns the tokens of its `inner` ranks."""
    orders = [outer_order(order, inner) for order in plan.orders]
    return build(plan.rows, orders, mask, inner * plan.local_size)


def row_order(plan: BatchPlan, place: int, inner: int) -> dict[str, NDArray[np.int32]]:
    """Where each row of an outer place stands in the buffer that the inner all-to-all fills, and the inverse.

        gathered rows (two ranks)    tokens 0 1 6 7 | 2 3 4 5       row_order 0 1 4 5 6 7 2 3

    Returns:
        row_order, row_inverse: (inner R,) int32 permutations; row_inverse[row_order[i]] == i.
    """
    size, batch = plan.local_size, len(plan.rows)
    tokens = np.stack([plan.local_indices(place * inner + rank) for rank in range(inner)], axis=1)  # (B, inner, T_l)
    slot = np.arange(inner)[:, None] * batch * size + np.arange(size)  # of batch row 0
    order = np.empty((batch, inner * size), dtype=np.int64)
    for b, row in enumerate(tokens.reshape(batch, -1)):
        sort = np.argsort(np.where(row < 0, plan.rows[0].total, row), kind="stable")
        order[b] = slot.reshape(-1)[sort] + b * size
    inverse = np.empty(order.size, dtype=np.int64)
    inverse[order.reshape(-1)] = np.arange(order.size)
    return {"row_order": row_index(order.reshape(-1)), "row_inverse": row_index(inverse)}
