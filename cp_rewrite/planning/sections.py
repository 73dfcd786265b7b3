"""Sections: runs of tokens whose queries all find their keys in one way.

documents          a section each                            keys [first, its own token]
spans in them      causal runs and spans, in turn            keys [first, its own token], or [first, end) of a span
nodes of a tree    a section each                            keys of its ancestors, then [first, its own token]

    document with a span of 3      0 1 [2 3 4] 5 6           sections [0, 2) [2, 5) full [5, 7), first 0 of all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask

from .intervals import Int, expand_ranges


@dataclass(frozen=True, eq=False)
class Paths:
    """The runs of keys before the sections of trees: of section i runs ptr[i] … ptr[i + 1] - 1, the root's first.

    Args:
        ptr: (N + 1,) int64. starts, stops: (M,) int64, tokens [start, stop) of the batch.
        tokens: (N,) int64: how many keys they are.
    """

    ptr: Int
    starts: Int
    stops: Int
    tokens: Int


@dataclass(frozen=True, eq=False)
class Sections:
    """N sections, disjoint and ascending, none empty: tokens [starts[i], ends[i]).

    Args:
        first: (N,) int64: the first key of the section's document, or node.
        full: (N,) bool: a span: queries see its keys up to the end.
        paths: the keys before `first`; None: there are none.
    """

    starts: Int
    ends: Int
    first: Int
    full: NDArray[np.bool_]
    paths: Paths | None = None

    @property
    def before(self) -> Int:
        """(N,) int64 keys before each section's first token."""
        own = self.starts - self.first
        return own if self.paths is None else own + self.paths.tokens


def sections_of(documents: Documents, mask: PackedMask) -> Sections:
    """The sections of one row under a mask.

    Raises:
        ValueError: the mask has spans or trees, and the row names none, or a span that its window would cut.
    """
    if mask.tree:
        return _nodes(documents, mask)
    docs = mask.documents(documents)
    real = docs.lengths > 0
    starts, ends = docs.starts[real], docs.ends[real]
    if not mask.spans:
        return Sections(starts, ends, starts, np.zeros(len(starts), dtype=np.bool_))
    spans = mask.spans_of(documents)
    # All bounds of documents and spans, each with the document and the span that begin there or went on.
    cuts = np.unique(np.concatenate([starts, ends, spans.starts, spans.ends]))
    at, to = cuts[:-1], cuts[1:]
    doc = np.searchsorted(starts, at, side="right") - 1
    inside = (doc >= 0) & (at < np.append(ends, 0)[doc])
    at, to, doc = at[inside], to[inside], doc[inside]
    span = np.searchsorted(spans.starts, at, side="right") - 1
    full = (span >= 0) & (at < np.append(spans.ends, 0)[span])
    return Sections(at, to, starts[doc], full)


def flat_sections(rows: Sequence[Documents], mask: PackedMask) -> Sections:
    """The sections of all rows of a batch, as tokens of the batch: token t of row b is b T + t."""
    parts = [sections_of(row, mask) for row in rows]
    if len(parts) == 1:
        return parts[0]
    shift = np.arange(len(rows)) * rows[0].total
    starts, ends, first = (
        np.concatenate([column + by for column, by in zip(columns, shift, strict=True)])
        for columns in ([p.starts for p in parts], [p.ends for p in parts], [p.first for p in parts])
    )
    paths = [part.paths for part in parts if part.paths is not None]
    joined = None
    if paths:
        counts = np.concatenate([np.diff(path.ptr) for path in paths])
        joined = Paths(
            np.append(0, np.cumsum(counts)),
            np.concatenate([path.starts + by for path, by in zip(paths, shift, strict=True)]),
            np.concatenate([path.stops + by for path, by in zip(paths, shift, strict=True)]),
            np.concatenate([path.tokens for path in paths]),
        )
    return Sections(starts, ends, first, np.concatenate([part.full for part in parts]), joined)


def _nodes(documents: Documents, mask: PackedMask) -> Sections:
    nodes = mask.nodes_of(documents)
    node, ancestor = nodes.ancestors
    ptr = np.searchsorted(node, np.arange(len(nodes.starts) + 1))
    paths = Paths(ptr, nodes.starts[ancestor], nodes.ends[ancestor], nodes.tokens_before)
    return Sections(nodes.starts, nodes.ends, nodes.starts, np.zeros(len(nodes.starts), dtype=np.bool_), paths)


def path_runs(paths: Paths, section: Int) -> tuple[Int, Int, Int]:
    """(index, starts, stops), by index: the runs of keys before each of the sections at `section`, (N,) int64."""
    counts = np.diff(paths.ptr)[section]
    run = expand_ranges(paths.ptr[section], counts)
    return np.repeat(np.arange(len(section)), counts), paths.starts[run], paths.stops[run]
