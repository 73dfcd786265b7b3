"""Rows of packed documents to test with, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from cp_rewrite.documents import Documents, Nodes, SpanRuns
from cp_rewrite.masks import PackedMask

LENGTHS = (0, 1, 2, 3, 7, 8, 13, 30)
SIDES = (None, 0, 1, 3, 9)
MASKS = (
    PackedMask(),
    PackedMask(causal=False),
    PackedMask(window=(5, 0)),
    PackedMask(causal=False, window=(6, 6)),
    PackedMask(causal=False, window=(None, 3)),
    PackedMask(packed=False),
    PackedMask(spans=True),
    PackedMask(window=(8, 0), spans=True),
    PackedMask(tree=True),
)
"""One of each kind at least."""


@st.composite
def documents(draw: st.DrawFn, total: int) -> Documents:
    """A row of `total` tokens: documents of any length, gaps between them, padding at the end, or no document; spans
    and trees in them."""
    starts: list[int] = []
    lengths: list[int] = []
    at = 0
    for gap, length in draw(
        st.lists(st.tuples(st.sampled_from((0, 0, 0, 1, 4)), st.sampled_from(LENGTHS)), max_size=9)
    ):
        start = min(at + gap, total)
        starts.append(start)
        lengths.append(min(length, total - start))
        at = starts[-1] + lengths[-1]
    plain = Documents(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64), total)
    return grown(plain, draw(st.integers(0, 1000)))


def grown(documents: Documents, seed: int, longest: int = 7) -> Documents:
    """The documents with spans of up to `longest` tokens, and as trees of any shape."""
    rng = np.random.default_rng(seed)
    spans: list[tuple[int, int]] = []
    nodes: list[tuple[int, int, int]] = []
    for start, end in zip(documents.starts.tolist(), documents.ends.tolist(), strict=True):
        at, root = start, len(nodes)
        while at < end:
            stop = min(end, at + int(rng.integers(1, longest + 1)))
            if rng.random() < 0.5:
                spans.append((at, stop))
            at = stop
        at = start
        while at < end:
            stop = min(end, at + int(rng.integers(1, 2 * longest)))
            nodes.append((at, stop, -1 if len(nodes) == root else int(rng.integers(root, len(nodes)))))
            at = stop
    cuts, columns = np.array(spans, dtype=np.int64).reshape(-1, 2).T, np.array(nodes, dtype=np.int64).reshape(-1, 3).T
    return replace(documents, spans=SpanRuns(cuts[0], cuts[1]), nodes=Nodes(columns[0], columns[1], columns[2]))


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 2, max_total: int = 70) -> tuple[Documents, ...]:
    """Some rows of one length."""
    total = draw(st.integers(1, max_total))
    return tuple(draw(st.lists(documents(total), min_size=1, max_size=max_rows)))


@st.composite
def masks(draw: st.DrawFn) -> PackedMask:
    """Causal, full, windows and chunks of every kind; those of `MASKS` of other kinds."""
    if draw(st.booleans()):
        return draw(st.sampled_from([mask for mask in MASKS if not mask.is_plain]))
    window = draw(st.one_of(st.none(), st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES))))
    chunk, chunk_of = draw(st.sampled_from((None, None, 1, 3, 16))), draw(st.sampled_from(("document", "row")))
    return PackedMask(draw(st.booleans()), window, draw(st.sampled_from((True, True, True, False))), chunk, chunk_of)
