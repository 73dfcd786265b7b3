"""Rows of packed documents to test with, drawn by hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask

LENGTHS = (0, 1, 2, 3, 7, 8, 13, 30)
SIDES = (None, 0, 1, 3, 9)


@st.composite
def documents(draw: st.DrawFn, total: int) -> Documents:
    """A row of `total` tokens: documents of any length, gaps between them, padding at the end, or no document."""
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
    return Documents(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64), total)


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 2, max_total: int = 70) -> tuple[Documents, ...]:
    """Some rows of one length."""
    total = draw(st.integers(1, max_total))
    return tuple(draw(st.lists(documents(total), min_size=1, max_size=max_rows)))


@st.composite
def masks(draw: st.DrawFn) -> PackedMask:
    """Causal, full, windows and chunks of every kind."""
    window = draw(st.one_of(st.none(), st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES))))
    chunk, chunk_of = draw(st.sampled_from((None, None, 1, 3, 16))), draw(st.sampled_from(("document", "row")))
    return PackedMask(draw(st.booleans()), window, draw(st.sampled_from((True, True, True, False))), chunk, chunk_of)
