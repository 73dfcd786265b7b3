"""The shape that all token arguments of a batch share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cp_rewrite.arguments import named_values
from cp_rewrite.batch.active.marks import batch_number
from cp_rewrite.sharding import Sharding


def shape_of(sharding: Sharding, batch: Mapping[str, Any]) -> tuple[int, int]:
    """(rows of the batch, tokens of each), which all arguments in `tokens` must share.

    Raises:
        KeyError, TypeError, ValueError: they do not; a name is missing, no tensor, or was cut before.
    """
    named_values("batch", batch)
    missing = [name for name in sharding.tokens if batch.get(name) is None]
    if missing:
        raise KeyError(f"tokens names {missing}, but the batch has no such tensor; it has {sorted(batch)}")
    for name, dim in sharding.tokens.items():
        if not isinstance(batch[name], Tensor):
            raise TypeError(f"batch[{name!r}] must be a tensor, got {type(batch[name]).__name__}")
        if batch_number(batch[name]) is not None:
            raise ValueError(f"batch[{name!r}] was cut before: shard() takes the global batch, once")
        if dim >= batch[name].ndim:
            raise ValueError(f"tokens[{name!r}] is dim {dim}, but batch[{name!r}] has shape {tuple(batch[name].shape)}")
    totals = {name: batch[name].shape[dim] for name, dim in sharding.tokens.items()}
    for name, dim in sharding.tokens.items():
        if set(totals.values()) == {1} and batch[name].shape[dim + 1 :].numel() > 1:
            raise ValueError(
                f"tokens[{name!r}] is dim {dim}, of which batch[{name!r}], of shape {tuple(batch[name].shape)}, has "
                f"one entry: its token dim is {dim + 1}, if these are rows of tokens"
            )
    if len(set(totals.values())) > 1:
        raise ValueError(f"token dims must have one length, got {totals}: check the dims in tokens")
    first, dim = next(iter(sharding.tokens.items()))
    rows = batch[first].shape[dim - 1] if dim else 1
    other = [n for n, d in sharding.tokens.items() if rows > 1 and (d == 0 or batch[n].shape[d - 1] != rows)]
    if other:
        shapes = {name: tuple(batch[name].shape) for name in other}
        raise ValueError(
            f"batch[{first!r}] has {rows} rows, but {shapes} differ: expand them to ({rows}, T), or check the dims in "
            "tokens"
        )
    total = next(iter(totals.values()))
    if not rows or not total:
        raise ValueError(f"the batch has {rows} rows of {total} tokens: nothing to cut")
    return rows, total
