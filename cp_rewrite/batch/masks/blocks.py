"""Compare a BlockMask of a global batch with its documents.

Its lists say in which blocks of queries and keys its function decides, and which are seen whole. They are compared in
full on each batch, by whole blocks. The function is run on pairs: on each batch those in which two packings, windows
or directions differ, with a sample of others; the first time, and always with `verify="every_step"`, on many or all.

    each query with     itself, both its neighbours, its document's first and last token, the tokens before and behind
                        these, the window's ends and the tokens beyond, and as many at random
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask

from .compare import Ints, Place, differing

Bools = NDArray[np.bool_]
_GRID = 1024
"""Tokens at the front of each row of which all pairs are compared the first time."""
_AT_ONCE = 1 << 20
"""Pairs that the function is run on at a time."""


def first_difference(
    given: BlockMask, rows: Sequence[Documents], mask: PackedMask, pairs: str
) -> tuple[Place, bool] | None:
    """(the first pair that is found to be seen otherwise than `mask` says, whether it is seen); None: none is.

    Args:
        pairs: `sampled`, `many` or `all`.
    """
    counts = [given.kv_num_blocks, given.full_kv_num_blocks]
    places = [given.kv_indices, given.full_kv_indices]
    lists = [(c, p) for c, p in zip(counts, places, strict=True) if c is not None and p is not None]
    listed = [listed_blocks(c, p, p.shape[-1]).cpu().numpy() for c, p in lists]
    for row, documents in enumerate(rows):
        for head in range(listed[0].shape[1]):
            tables = [table[row if len(table) > 1 else 0, head] for table in listed]
            decided, whole = tables if len(tables) > 1 else (tables[0], np.zeros_like(tables[0]))
            size = tuple(int(n) for n in given.BLOCK_SIZE)
            found = _odd_block(decided, whole, documents, mask, (size[0], size[1]))
            if found is not None:
                return (row, found[0], found[1]), found[2]
            for q, k in _pairs(documents, mask, pairs):
                block = q // size[0], k // size[1]
                seen = whole[block] | (decided[block] & _run(given, row, head, q, k))
                wrong = differing(seen, documents, mask, q, k)
                if len(wrong):
                    i = int(wrong[0, 0])
                    return (row, int(q[i]), int(k[i])), bool(seen[i])
    return None


def listed_blocks(counts: Tensor, places: Tensor, blocks: int) -> Tensor:
    """(B, H, Q, blocks) bool: is a block of keys among the first `counts` (B, H, Q) of `places` (B, H, Q, K)?"""
    given = torch.arange(places.shape[-1], device=places.device) < counts[..., None]
    table = torch.zeros(*places.shape[:-1], blocks + 1, dtype=torch.bool, device=places.device)
    return table.scatter_(-1, torch.where(given, places, blocks).long(), True)[..., :-1]


def _odd_block(
    decided: Bools, whole: Bools, documents: Documents, mask: PackedMask, size: tuple[int, int]
) -> tuple[int, int, bool] | None:
    """(query, key, whether it is seen) of a block that is left out though a pair in it is seen, or that is seen whole
    though not all its pairs are; None: there is none."""
    ids = mask.documents(documents).document_ids()
    missing = ~decided & ~whole
    for i, j in np.argwhere(missing | whole).tolist():
        q0, k0 = i * size[0], j * size[1]
        q1, k1 = min(q0 + size[0], documents.total), min(k0 + size[1], documents.total)
        if q0 >= q1 or k0 >= k1 or _is_apart(ids, (q0, q1), (k0, k1), mask, whole=bool(whole[i, j])):
            continue
        wrong = differing(bool(whole[i, j]), documents, mask, np.arange(q0, q1)[:, None], np.arange(k0, k1))
        if len(wrong):
            return q0 + int(wrong[0, 0]), k0 + int(wrong[0, 1]), bool(whole[i, j])
    return None


def _is_apart(ids: Ints, q: tuple[int, int], k: tuple[int, int], mask: PackedMask, whole: bool) -> bool:
    """True if it shows at a glance that a block is rightly left out, or rightly seen `whole`."""
    low, high = q[0] - (k[1] - 1), q[1] - 1 - k[0]
    left, right = np.inf if mask.left is None else mask.left, np.inf if mask.right is None else mask.right
    if whole:
        return (
            bool(ids[q[0]] >= 0 and ids[min(q[0], k[0])] == ids[max(q[1], k[1]) - 1]) and -low <= right and high <= left
        )
    ends = ids[[q[0], q[1] - 1]], ids[[k[0], k[1] - 1]]
    no_padding = all((end >= 0).all() for end in ends)
    return high < -right or low > left or bool(no_padding and (ends[0][0] > ends[1][1] or ends[0][1] < ends[1][0]))


def _pairs(documents: Documents, mask: PackedMask, pairs: str) -> list[tuple[Ints, Ints]]:
    """Queries that are tokens of documents, and keys."""
    total = documents.total
    real = np.flatnonzero(mask.documents(documents).document_ids() >= 0)
    if pairs == "all":
        step = max(1, _AT_ONCE // total)
        groups = [real[i : i + step] for i in range(0, len(real), step)]
        return [(np.repeat(q, total), np.tile(np.arange(total), len(q))) for q in groups]
    found = [_telling(documents, mask, real)]
    if pairs == "many":
        front, keys = real[real < _GRID], np.arange(min(_GRID, total))
        found.append((np.repeat(front, len(keys)), np.tile(keys, len(front))))
    return found


def _telling(documents: Documents, mask: PackedMask, q: Ints) -> tuple[Ints, Ints]:
    """Pairs in which packings, windows and directions differ, of each of the queries `q`."""
    known = documents if len(documents.starts) else mask.documents(documents)
    ids = known.document_ids()[q]
    starts, ends = known.starts[ids], known.ends[ids]
    keys = [q, q - 1, q + 1, starts, starts - 1, ends - 1, ends]
    for side in (mask.left, mask.right):
        keys += [] if side is None else [q - side, q - side - 1, q + side, q + side + 1]
    random = np.random.default_rng(documents.total)
    keys += [random.integers(0, documents.total, len(q)) for _ in range(8)]
    k = np.concatenate(keys)
    queries = np.tile(q, len(keys))
    inside = (k >= 0) & (k < documents.total)
    return queries[inside], k[inside]


def _run(given: BlockMask, row: int, head: int, q: Ints, k: Ints) -> Bools:
    """What the mask's own function says of pairs."""
    device = given.kv_num_blocks.device
    where = [torch.full((len(q),), n, device=device) for n in (row, head)]
    index = [torch.from_numpy(x).to(device) for x in (q, k)]
    return torch.vmap(given.mask_mod)(*where, *index).cpu().numpy()
