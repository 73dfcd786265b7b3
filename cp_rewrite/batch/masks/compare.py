"""Compare what a mask says of pairs of tokens with what a PackedMask says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.masks import MaskMismatch, PackedMask

from .argument import DROPPED

_ROWS = 1024
"""Queries of which all pairs are compared at a time."""
Ints = NDArray[np.int64]
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


def differing(seen: Any, documents: Documents, mask: PackedMask, q: Ints, k: Ints, known: Any = True) -> Ints:
    """Indices (N, ndim) of `seen`, to whose shape `q` and `k` broadcast, where it says another thing than `mask` of a
    pair that is `known`.

    What queries of no document see is left out: no document depends on it.
    """
    real = mask.documents(documents).document_ids()[q] >= 0
    return np.argwhere((seen != mask.sees(documents, q, k)) & real & known)


def first_difference(seen: Tensor, rows: Sequence[Documents], mask: PackedMask) -> tuple[Place, bool] | None:
    """(the first pair of which `seen`, (B or 1, H, T, T) bool, says another thing than `mask`, a plain one; what it
    says); None: there is none. Queries of no document are left out."""
    for row, documents in enumerate(rows):
        tables = seen[row if len(seen) > 1 else 0]
        for start, expected in _expected(documents, mask):
            part = tables[:, start : start + len(expected)].cpu().numpy()
            found = np.argwhere(part != expected)
            if len(found):
                head, q, k = found[0].tolist()
                return (row, start + q, k), bool(part[head, q, k])
    return None


def _expected(documents: Documents, mask: PackedMask) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """(first query, (N, T) bool: the keys that it and the next ones see), for all tokens of documents.

    As `PackedMask.sees` says it, a diagonal at a time: what a query of a document sees of it goes by their distance.
    """
    whole = mask.documents(documents)
    for begin, end in zip(whole.starts.tolist(), whole.ends.tolist(), strict=True):
        for start in range(begin, end, _ROWS):
            stop = min(start + _ROWS, end)
            keep = np.zeros((stop - start, documents.total), dtype=np.bool_)
            distances = np.arange(stop - 1 - begin, start - end, -1)  # of the last query and the first key, and down
            keep[::-1, begin:end] = sliding_window_view(mask.reaches(distances), end - begin)
            yield start, keep


def mismatch(name: str, mask: PackedMask, place: Place, seen: bool) -> MaskMismatch:
    """The error of a mask that says another thing than the packing. `seen`: it lets the query see the key."""
    row, q, k = place
    return MaskMismatch(
        f"batch[{name!r}] {'lets' if seen else 'does not let'} query {q} see key {k} in row {row}; '{mask}', of the "
        f"documents that the packing tells, says otherwise. Mend the mask or the packing; where the mask means another "
        f"thing, say it: masks={{{name!r}: cp.PackedMask(…)}}; None, if it is no mask"
    )
