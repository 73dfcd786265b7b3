"""Batches that drawn masks are compared on: rows of documents with spans, types and trees of every shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .expressions import Batch

Int = NDArray[np.int64]
TOKENS = 13
MARK = 9
SEGMENTS = 15
"""Numbers that nodes may have where they tell their parents."""
PER_TOKEN: tuple[str, ...] = (
    "input_ids", "doc_ids", "counted_ids", "position_ids", "ended_ids", "started_ids", "span_ids", "types", "flags",
    "prompt", "completion", "tin", "tout", "end", "segment",
)  # fmt: skip


def draw_batch(rng: np.random.Generator, rows: int = 2, tokens: int = TOKENS) -> Batch:
    """Some that no host accepts among them. `cu_seqlens` describes the first row."""
    made = [_row(rng, tokens) for _ in range(rows)]
    batch = {name: torch.from_numpy(np.stack([row[name] for row in made])) for name in PER_TOKEN}
    batch = {name: x.bool() if name == "flags" else x.long() for name, x in batch.items()}
    parents = torch.from_numpy(np.stack([row["parents"] for row in made]))
    return batch | {"cu_seqlens": torch.from_numpy(made[0]["cu_seqlens"]), "parents": parents}


def _row(rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    pad = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0
    real = tokens - pad
    lengths = _cut(rng, real, int(rng.integers(1, 4)))
    doc = np.repeat(rng.permutation(9)[: len(lengths)], lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    if rng.random() < 0.4:  # the row begins inside of a document
        position[: lengths[0]] += int(rng.integers(1, 8))
    spans, types, flags = _spans(rng, lengths)
    prompt, completion, tin, tout, end = _trees(rng, lengths)
    segment, parents = _parents(rng, lengths)
    tail = {"doc_ids": -1, "prompt": -1, "tin": -1, "tout": -1, "end": -1, "segment": -1}
    counted = np.repeat(np.arange(len(lengths)) + 1, lengths)
    columns = {"input_ids": rng.integers(0, 9, real), "doc_ids": doc, "counted_ids": counted, "position_ids": position,
               "span_ids": spans, "types": types, "flags": flags, "prompt": prompt, "completion": completion,
               "tin": tin, "tout": tout, "end": end, "segment": segment}  # fmt: skip
    odd = int(rng.integers(-1, 3))  # what padding holds where it may hold anything
    ends = {"counted_ids": 0, "position_ids": 0, **tail}
    row = {name: np.array([*values, *[ends.get(name, odd)] * pad], dtype=np.int64) for name, values in columns.items()}
    # Positions and tokens know no padding: each of its tokens, which hold position 0, is a document.
    first = row["position_ids"] == 0
    text = rng.integers(0, MARK, tokens)
    started = np.where(first & (np.arange(tokens) > 0), MARK, text)
    ended = np.where(np.append(first[1:], rng.random() < 0.5), MARK, text)
    cu = np.cumsum([0, *lengths])  # may end early
    return row | {"ended_ids": ended, "started_ids": started, "cu_seqlens": cu, "parents": parents}


def _cut(rng: np.random.Generator, total: int, most: int) -> list[int]:
    cuts = np.sort(rng.choice(np.arange(1, total), size=min(most - 1, total - 1), replace=False)) if total > 1 else []
    return np.diff([0, *cuts, total]).astype(int).tolist()


def _spans(rng: np.random.Generator, lengths: list[int]) -> tuple[list[int], list[int], list[bool]]:
    """Span id, type and flag of each token."""
    spans: list[int] = []
    types: list[int] = []
    flags: list[bool] = []
    number = 0
    for n in lengths:
        number = 0 if rng.random() < 0.3 else number
        for k, part in enumerate(_cut(rng, n, int(rng.integers(1, 4)))):
            number += 1
            on = bool(rng.random() < 0.6)
            spans += [number if on else -int(rng.integers(0, 2))] * part
            flags += [on] * part
            prefix = rng.random() < 0.7
            kind = (0 if k == 0 and rng.random() < 0.8 else 1) if prefix else int(rng.integers(-1, 3))
            types += [kind] * part
    return spans, types, flags


def _trees(rng: np.random.Generator, lengths: list[int]) -> tuple[list[int], ...]:
    """A prompt with completions and a tree of any shape for each document. Per token: its prompt, its completion, its
    node (depth first), the node behind that subtree, and the first token there."""
    prompt: list[int] = []
    completion: list[int] = []
    tin: list[int] = []
    ends: list[int] = []
    number = 0
    for which, n in zip(rng.permutation(9), lengths, strict=False):
        parts = _cut(rng, n, int(rng.integers(1, 5)))
        prompt += [int(which)] * n
        names = rng.permutation(5) + 1
        bare = rng.random() < 0.15
        for k, part in enumerate(parts):
            completion += [int(names[k]) if k or bare else 0] * part
        depth: list[int] = []
        for k in range(len(parts)):
            depth.append(0 if k == 0 else int(rng.integers(1, depth[-1] + 2)))
        behind = [
            next((m for m in range(k + 1, len(parts)) if depth[m] <= depth[k]), len(parts)) for k in range(len(parts))
        ]
        for k, part in enumerate(parts):
            tin += [number + k] * part
            ends += [number + behind[k]] * part
        number += len(parts)
    first = [tin.index(n) if n in tin else len(tin) for n in range(number + 1)]
    return prompt, completion, tin, ends, [first[e] for e in ends]


def _parents(rng: np.random.Generator, lengths: list[int]) -> tuple[list[int], Int]:
    """A tree of any shape for each document, in any order that has parents first: the node of each token, and the
    parent of each number that a node may have."""
    numbers = rng.permutation(SEGMENTS)
    parents = rng.integers(0, SEGMENTS, SEGMENTS)
    segments: list[int] = []
    used = 0
    for n in lengths:
        parts = _cut(rng, n, int(rng.integers(1, 6)))
        mine = numbers[used : used + len(parts)]
        used += len(parts)
        for k, part in enumerate(parts):
            deep = rng.random() < 0.5
            parents[mine[k]] = mine[0 if k == 0 else k - 1 if deep else int(rng.integers(0, k))]
            segments += [int(mine[k])] * part
    return segments, parents
