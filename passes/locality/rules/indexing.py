"""Ops that read or write by index: embedding, gather, scatter, advanced indexing.

Places that a sort by a key gave are indices too: `sorted_rows` says what is done by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import (
    REPLICATED,
    Dim,
    Mixes,
    Rows,
    Size,
    T,
    TensorState,
    broadcast,
    checked,
    has,
    merge,
    plain,
)

from .sorted_rows import added_in_order, put_by_order, read_in_order

ROWS_HINT = "a shard holds other rows: index by places that all ranks have, as h[:, cu_seqlens[1:] - 1] does"


def embedding(call: Call) -> TensorState:
    weight, index = call.arg("weight"), call.arg("indices")
    rows = call.rows(index)
    if call.state(weight) is not REPLICATED or rows is None:
        raise Mixes("embedding looks up token rows by index: " + ROWS_HINT)
    if call.arg("scale_grad_by_freq"):
        raise Mixes("embedding scales its gradient by how often an id stands in the shard (scale_grad_by_freq)")
    return Rows((*rows.dims, None))


def gather(call: Call) -> TensorState:
    """out[i][j] = x[i][index[i][j]] of dim 1: x and index have the same tokens, in another dim than the indexed one.

    x (T,) ·    index (T,) ·    dim 1    ->    (T,) ·
    x · ·       index · (T,)    dim 1    ->    · (T,)    of a table that all ranks have
    """
    found = read_in_order(call) if call.name == "gather" else added_in_order(call) if "add" in call.name else None
    if found is not None:
        return found
    x, index = call.arg("self"), call.arg("index")
    table = call.rows(index) if call.name == "gather" and call.state(x) is REPLICATED else None
    if table is not None and has(table.dims[call.arg("dim")], T):
        return Rows(table.dims)
    others = [t for t in call.tensors if t is not x and t is not index]
    return _beside(call, [t for t in (x, index, *others) if t.ndim == x.ndim])


def _beside(call: Call, tensors: Sequence[Tensor]) -> Rows:
    """Rows of tensors that are indexed along a dim beside their tokens: all have the same ones."""
    ndim = tensors[0].ndim
    dim = call.arg("dim") % max(ndim, 1)
    for tensor in tensors:
        if rows := call.rows(tensor):
            call.refuse_axis(rows, dim, "indexes")
    aligned = [call.entries(t) for t in tensors]
    merged = [None if i == dim else _equal([entry[i] for entry in aligned]) for i in range(ndim)]
    return Rows(checked(merged))


def _equal(entries: list[tuple[Dim, Size]]) -> Dim:
    """One dim of tensors that must hold the same tokens in it."""
    dims = {dim for dim, _ in entries if has(dim, T)}
    if dims and any(dim not in dims for dim, _ in entries):
        raise Mixes(f"gathers token rows from a tensor that is not cut like them: {ROWS_HINT}")
    return dims.pop() if dims else merge(entries)


def looked_up(call: Call) -> TensorState:
    """isin, bucketize, searchsorted: each entry, by a list that is the same on all ranks.

    x (B,) (T,)    list ·    ->    (B,) (T,)
    """
    x = call.arg("elements", "self")
    rows = call.rows(x)
    others = [other for other in call.tensors if other is not x]
    if rows is None or any(call.state(other) is not REPLICATED or other.ndim > 1 for other in others):
        raise Mixes(f"{call.name} compares over all tokens")
    return plain(rows)


def index_select(call: Call) -> TensorState:
    """x · ·    index (T,)    dim 0    ->    (T,) ·"""
    found = read_in_order(call)
    if found is not None:
        return found
    x, index = call.arg("self"), call.arg("index")
    dim = call.arg("dim") % x.ndim
    rows, picked = call.rows(x), call.rows(index)
    if rows is not None:
        call.refuse_axis(rows, dim, "picks entries of")
    chosen = picked.dims[0] if picked and index.ndim else None
    dims = list(rows.dims) if rows else [None] * x.ndim
    dims[dim] = chosen
    return Rows(checked(dims))


def written(call: Call) -> TensorState:
    """x (T,) ·    index ·    source (T,) ·    dim 1    ->    (T,) ·"""
    found = added_in_order(call) if call.name == "index_add" else None
    if found is not None:
        return found
    x, source = call.arg("self"), call.arg("source")
    if call.state(call.arg("index")) is not REPLICATED:
        raise Mixes(f"{call.name} writes token rows by place")
    return _beside(call, [x] if source is None else [x, source])


def index(call: Call) -> TensorState:
    """x[i, :, j]: indices may come from tokens; token dims of x may only be walked in order (by arange over them).

    x · ·       i (B,) (T,)           x[i]       ->    (B,) (T,) ·
    x (T,) ·    mask ·                x[:, mask] ->    (T,) ·                  features, the same on all ranks
    x (T,) ·    i = arange(T), j ·    x[i, j]    ->    (T,)
    """
    x: Tensor = call.arg("self")
    given: list[Tensor | None] = list(call.arg("indices"))
    if any(i is not None and _picks_tokens(call, x, dim, i) for dim, i in enumerate(given)):
        raise Mixes(
            "picks tokens by a mask, as many as there happen to be: keep all of them (torch.where), or read no more "
            "of those picked than what treats each alone, sums, means and losses"
        )
    used = [(dim, i) for dim, i in enumerate(given) if i is not None]
    call.use_positions(x)
    for dim, i in used:
        _index_one(call, x, dim, i)
    picked = broadcast([call.entries(i) for _, i in used])
    kept: list[Any] = [
        (dim, entry) for dim, (entry, _) in enumerate(call.entries(x)) if dim >= len(given) or given[dim] is None
    ]
    where = _where([dim for dim, _ in used])
    before = [entry for dim, entry in kept if dim < where]
    after = [entry for dim, entry in kept if dim >= where]
    dims = [*before, *picked, *after]
    return Rows(checked(dims)) if any(has(dim, T) for dim in dims) else REPLICATED


def _picks_tokens(call: Call, x: Tensor, dim: int, i: Tensor) -> bool:
    """True if an index is a mask by tokens: not one that all ranks have, of a dim without tokens."""
    if i.dtype not in (torch.bool, torch.uint8):
        return False
    return i.ndim != 1 or call.state(i) is not REPLICATED or call.entries(x)[dim][0] is not None


def _where(indexed: list[int]) -> int:
    """The dim of the result that the indices' begin at: the first indexed one; 0 where these are not side by side."""
    return indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0


def _index_one(call: Call, x: Tensor, dim: int, i: Tensor) -> None:
    """Check one index: of a dim without tokens it may be anything, of a token dim only the rows' own places."""
    axis = call.entries(x)[dim][0]
    rows = call.rows(i)
    if rows is not None and axis is not None and rows.shard_rows == axis:
        return
    if axis is None:
        call.use_positions(i)
        return
    arange = call.walked_by(rows)
    walked = [entry for entry in rows.dims if entry is not None] if rows and arange else []
    if arange is None or walked != [axis]:
        if has(axis, T):
            raise Mixes(f"indexes the token dim: {ROWS_HINT}")
        raise Mixes("indexes the batch dim while rows of the batch are cut in different orders")
    call.events.indexed.append(arange)


def index_put(call: Call) -> TensorState:
    """x[mask] = number is a masked_fill; writes at computed places are refused where tokens are cut."""
    x, values = call.arg("self"), call.arg("values")
    given: list[Tensor | None] = list(call.arg("indices"))
    masks = [i for i in given if i is not None]
    put = put_by_order(call, x, masks, values)
    if put is not None:
        return put
    call.use_positions(x, *masks, values)
    if len(masks) == 1 and given[0] is not None and masks[0].dtype == torch.bool and values.numel() == 1:
        mask = [*call.entries(masks[0]), *[(None, 1)] * (x.ndim - masks[0].ndim)]
        rows = call.entries(x)
        return Rows(checked([_equal([rows[i], mask[i]]) if i < masks[0].ndim else rows[i][0] for i in range(x.ndim)]))
    rows = call.rows(x)
    if rows is None or any(call.state(t) is not REPLICATED for t in [*masks, values]):
        raise Mixes("writes token rows to computed places")
    indexed = [dim for dim, i in enumerate(given) if i is not None]
    for dim in indexed:
        call.refuse_axis(rows, dim, "writes by index to")
    token, kept = rows.token_dim, [dim for dim in range(x.ndim) if dim not in indexed]
    behind = sum(dim >= token for dim in kept)  # the token dim, counted from the result's last
    behind += max(i.ndim for i in masks) if token < _where(indexed) else 0
    takes_dims = any(i.dtype == torch.bool and i.ndim > 1 for i in masks)
    if takes_dims or (values.ndim >= behind and values.shape[-behind] != 1):
        raise Mixes("writes token rows to computed places")
    return plain(rows)
