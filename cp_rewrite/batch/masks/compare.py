"""Compare a mask of a global batch with its documents, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.masks import MaskMismatch, PackedMask

from .argument import DROPPED

_ROWS = 1024
"""Queries that are compared at a time."""
Place = tuple[int, int, int]
"""(row of the batch, query, key)"""


def compact(value: Tensor) -> Tensor:
    """A mask without the copies that `expand` made along its first dims."""
    for dim in range(value.ndim - 2):
        if value.stride(dim) == 0:
            value = value.narrow(dim, 0, 1)
    return value


def is_added(value: Tensor) -> bool | None:
    """True if a tensor, of any shape, is an additive mask, or one of flags (True or 1: seen); None: it is neither."""
    if value.dtype == torch.bool:
        return False
    if value.dtype.is_complex:
        return None
    if value.dtype.is_floating_point:
        others = value.numel() - int((value == 0).sum())
        for number in dict.fromkeys(torch.tensor(DROPPED, dtype=torch.float64).to(value.dtype).tolist()):
            others -= int((value == number).sum()) if others else 0
        if not others:
            return True
    return False if bool(((value == 0) | (value == 1)).all()) else None


def first_difference(seen: Tensor, rows: Sequence[Documents], mask: PackedMask) -> tuple[Place, bool] | None:
    """(the first pair of which `seen`, (B or 1, H, T, T) bool, says another thing than `mask`; what it says); None:
    there is none.

    What queries of no document see is left out: no document depends on it.
    """
    for row, documents in enumerate(rows):
        for table in seen[row if len(seen) > 1 else 0]:
            for start, expected in _expected(documents, mask, table.device):
                found = table[start : start + len(expected)]
                if not torch.equal(found, expected):
                    q, k = (found != expected).nonzero()[0].tolist()
                    return (row, start + q, k), bool(found[q, k])
    return None


def _expected(documents: Documents, mask: PackedMask, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """(first query, (N, T) bool: the keys that it and the next ones see), for all tokens of documents."""
    whole = mask.documents(documents)
    for begin, end in zip(whole.starts.tolist(), whole.ends.tolist(), strict=True):
        for start in range(begin, end, _ROWS):
            stop = min(start + _ROWS, end)
            keep = torch.zeros(stop - start, documents.total, dtype=torch.bool, device=device)
            inside = torch.ones(stop - start, end - begin, dtype=torch.bool, device=device)
            # Query i of these stands at start - begin + i among its document's keys.
            if mask.right is not None:
                inside = inside.tril(start - begin + mask.right)
            if mask.left is not None:
                inside = inside.triu(start - begin - mask.left)
            keep[:, begin:end] = inside
            yield start, keep


def mismatch(name: str, mask: PackedMask, place: Place, seen: bool) -> MaskMismatch:
    """The error of a mask that says another thing than the packing. `seen`: it lets the query see the key."""
    row, q, k = place
    return MaskMismatch(
        f"batch[{name!r}] {'lets' if seen else 'does not let'} query {q} see key {k} in row {row}; '{mask}', of the "
        f"documents that the packing tells, says otherwise. Mend the mask or the packing; where the mask means another "
        f"thing, say it: masks={{{name!r}: cp.PackedMask(…)}}; None, if it is no mask"
    )
