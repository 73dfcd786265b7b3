"""Rows that are sorted by a key, worked on in groups, and put back, as in a mixture of experts by grouped products.

    expert     1 0 1 0            sort -> 0 0 1 1, perm 1 3 0 2
    x[perm]    rows 1 3 0 2       each row times its expert's weight (grouped_mm by running group sizes)
    y[inverse] rows 0 1 2 3       inverse[perm] = arange
    zeros.index_add(0, perm, y)   the same; with perm // k the k rows of each token are added up

The order depends on the shard's other rows, but each row's value does not, and in the end every row is back in place.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor

from cp_rewrite.passes.graph.nodes import op_name
from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import REPLICATED, B, GroupSizes, Mixes, Order, Rows, T, TensorState

from .rule import States, on_rows, over, same_dims

_along = on_rows(same_dims, over("runs over"))


def sort(call: Call) -> States:
    """Sort of one key per row: the sorted keys, and where each came from. Of such places: the inverse."""
    state = call.rows(call.first)
    if state is None or call.first.ndim != 1 or (state.dims[0] in ((T,), (B, T)) and _reads_values(call)):
        return _along(call)
    axis = state.dims[0]
    if _is_permutation(state) and not call.arg("descending"):
        assert state.shard_rows is not None
        return [Rows((state.shard_rows,), shard_rows=state.shard_rows), Rows((state.shard_rows,), shard_rows=axis)]
    if axis is None or any(isinstance(factor, Order) for factor in axis):
        raise Mixes("sort runs over rows that are sorted already")
    call.use_positions(call.first)
    order = call.facts.new_order(axis)
    return [Rows(((order,),), key=True), Rows(((order,),), shard_rows=axis)]


def _reads_values(call: Call) -> bool:
    """True where floats are sorted for themselves, as in `quantile`: not for the order that they give."""
    node = call.facts.node
    if node is None or not call.first.is_floating_point() or op_name(node) == "argsort":
        return False
    # Dynamo keeps what nothing reads in the graph of a region.
    read = [user for user in node.users if user.users]
    return op_name(node) != "sort" or any(user.target is operator.getitem and user.args[1] == 0 for user in read)


def follow_order(call: Call, states: Sequence[TensorState]) -> TensorState | None:
    """Pointwise ops on places, keys and group sizes that keep what they are; None for others."""
    state = states[0] if len(states) == 1 else None
    if isinstance(state, GroupSizes):
        return state
    if not isinstance(state, Rows):
        return None
    if state.key and call.name == "_to_copy":
        return state
    if state.shard_rows is not None and call.name == "floor_divide":
        *token, per_token = state.shard_rows
        if token and isinstance(per_token, int) and call.args[1] == per_token:
            return Rows(state.dims, shard_rows=tuple(token))
    return None


def group_sizes(call: Call) -> TensorState:
    """histc of sorted keys with one bin per key."""
    state, bins = call.state(call.first), call.arg("bins")
    order = state.dims[0][0] if isinstance(state, Rows) and state.key and state.dims[0] else None
    if not isinstance(order, Order) or (call.arg("min"), call.arg("max")) != (0, bins - 1):
        raise Mixes(f"{call.name} counts over all tokens")
    return GroupSizes(order)


def cumsum(call: Call) -> States:
    """Running sum of group sizes: where each group ends."""
    state = call.state(call.first)
    return GroupSizes(state.order, ends=True) if isinstance(state, GroupSizes) else _along(call)


def grouped_product(call: Call) -> TensorState:
    """Rows in the order of their keys, each times the weight of its key."""
    rows, weight, ends = call.tensors[:3]
    state, sizes = call.state(rows), call.state(ends)
    if isinstance(state, Rows) and isinstance(sizes, GroupSizes) and sizes.ends:
        if state.dims == ((sizes.order,), None) and call.state(weight) is REPLICATED:
            return Rows(state.dims)
    raise Mixes("a grouped product whose groups are not those that its rows are sorted by")


def put_by_order(call: Call, x: Tensor, indices: Sequence[Tensor], values: Tensor) -> TensorState | None:
    """index_put by an order; None for others.

    inverse[perm] = arange: for each row, its place in the order. out[perm] = y: sorted rows, put back in place.
    """
    perm, written = call.rows(indices[0]) if len(indices) == 1 else None, call.rows(values)
    if perm is None or written is None or not _is_permutation(perm) or x.ndim != values.ndim:
        return None
    if call.arg("accumulate"):
        raise Mixes("adds to the places of rows")
    assert perm.shard_rows is not None
    back = call.rows(x)
    if written.dims == (perm.dims[0], *[None] * (x.ndim - 1)) and back and back.dims[0] == perm.shard_rows:
        call.use_positions(values)
        return Rows((perm.shard_rows, *[None] * (x.ndim - 1)))
    arange = call.walked_by(written)
    if arange is None or written.dims != (perm.shard_rows,):
        return None
    call.events.indexed.append(arange)
    return Rows((perm.shard_rows,), shard_rows=perm.dims[0])


def read_in_order(call: Call) -> Rows | None:
    """gather and index_select of dim 0 by an order's places; None for others.

    x (T,) ·    index sorted rows ·    ->    sorted rows ·
    """
    x, index = call.first, call.arg("index")
    rows, places = call.rows(x), _places(call, index)
    if rows is None or places is None or call.arg("dim") % x.ndim or index.ndim not in (1, x.ndim):
        return None
    if rows.dims != (places.shard_rows, *[None] * (x.ndim - 1)):
        return None
    call.use_positions(x)
    call.named.add(id(index))
    return Rows((places.dims[0], *rows.dims[1:]))


def added_in_order(call: Call) -> Rows | None:
    """index_add and scatter_add of sorted rows to the tokens that they are of; None for others.

    x (T,) ·    index, source sorted rows ·    ->    (T,) ·
    """
    x, index, source = call.first, call.arg("index"), call.arg("src", "source")
    back, written, places = call.rows(x), call.rows(source), _places(call, index)
    if back is None or written is None or places is None or call.arg("dim") % x.ndim:
        return None
    kept = back.dims == (places.shard_rows, *[None] * (x.ndim - 1)) and written.dims == (places.dims[0], *back.dims[1:])
    if not kept or call.name == "scatter_reduce" or index.ndim not in (1, source.ndim):
        return None
    if index.ndim > 1 and call.sizes(index) != call.sizes(source):
        return None
    call.use_positions(source)
    call.named.add(id(index))
    return Rows(back.dims)


def _places(call: Call, index: Tensor) -> Rows | None:
    """An index that holds the place of every token equally often, in an order, and the same in each column."""
    rows = call.rows(index)
    if rows is None or rows.shard_rows is None or rows.dims[0] is None or any(dim is not None for dim in rows.dims[1:]):
        return None
    order = rows.dims[0][0]
    return rows if isinstance(order, Order) and order.axis[: len(rows.shard_rows)] == rows.shard_rows else None


def _is_permutation(rows: Rows) -> bool:
    """True if the values are places of all rows, each once, in an order."""
    order = rows.dims[0][0] if len(rows.dims) == 1 and rows.dims[0] else None
    return isinstance(order, Order) and rows.shard_rows == order.axis
