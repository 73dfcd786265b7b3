"""Nodes of trees and spans as batches tell them, and what is no tree and no span."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cp_rewrite.documents import Documents, Nodes, SpanRuns
from cp_rewrite.masks import PackedMask


def test_every_source_of_nodes_tells_the_same() -> None:
    """A prompt of 3 tokens with completions of 2 and 2."""
    sources = [
        Nodes.from_ranges([0, 0, 0, 1, 1, 2, 2, -1], [3, 3, 3, 2, 2, 3, 3, -1]),
        Nodes.from_ranges([0, 1, 2, 3, 4, 5, 6, -1], [7, 7, 7, 5, 5, 7, 7, -1]),
        Nodes.from_completions([4, 4, 4, 4, 4, 4, 4, -1], [0, 0, 0, 1, 1, 2, 2, 0]),
        Nodes.from_parents([3, 3, 3, 0, 0, 2, 2, -1], [3, 9, 3, 3]),
    ]
    for nodes in sources:
        assert nodes.starts.tolist() == [0, 3, 5]
        assert nodes.ends.tolist() == [3, 5, 7]
        assert nodes.parents.tolist() == [-1, 0, 0]
        assert nodes.tokens_before.tolist() == [0, 3, 3]
        assert nodes.of_tokens(8).tolist() == [0, 0, 0, 1, 1, 2, 2, -1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Nodes.from_ranges([0, 1, 1], [2, 3, 3]), "ranges must be nested"),
        (lambda: Nodes.from_ranges([0, 1, 0], [2, 2, 2]), "tin must grow"),
        (lambda: Nodes.from_ranges([0, -1], [2, 2]), "both are negative in padding"),
        (lambda: Nodes.from_completions([1, 1, 1], [0, 2, 0]), "they must be contiguous"),
        (lambda: Nodes.from_parents([0, 1, 0], [0, 0]), "they must be contiguous"),
        (lambda: Nodes.from_parents([0, 1], [0]), "are given of 1 nodes"),
        (lambda: Nodes.from_parents([0, 1], [0, -1]), "a root is its own parent"),
        (lambda: Nodes.from_parents([0, 1], [0, 2, 2]), "which no token has"),
        (lambda: Nodes.from_parents([0, 1], [1, 1]), "must stand behind its parent"),
        (lambda: Nodes.from_completions([1, 1], [1, 0]), "behind a completion of its own"),
        (lambda: Nodes.from_completions([1, 1], [0, -1]), "they count from 1"),
    ],
)
def test_what_is_no_tree(make: Callable[[], Nodes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


DOCUMENTS = Documents.from_lengths([4, 3], 8)


def spanned(spans: SpanRuns) -> Documents:
    return Documents(DOCUMENTS.starts, DOCUMENTS.lengths, DOCUMENTS.total, spans)


def test_spans_of_ids_end_with_their_document() -> None:
    spans = SpanRuns.of_ids([0, 1, 2, 2, 2, 0, 1, 0], 0).inside(DOCUMENTS)
    assert spans.starts.tolist() == [1, 2, 4, 6]
    assert spans.ends.tolist() == [2, 4, 5, 7]


@pytest.mark.parametrize(
    ("spans", "mask", "message"),
    [
        (
            SpanRuns.of_value([0, 0, 1, 1, 1, 0, 0, 0], (1,), False),
            PackedMask(spans=True),
            "goes on behind its document",
        ),
        (SpanRuns.of_ids([0, 0, 0, 0, 0, 0, 1, 1], 0), PackedMask(spans=True), "goes on behind its document"),
        (SpanRuns.of_ids([1, 0, 1, 0, 0, 0, 0, 0], 0), PackedMask(spans=True), "2 separate runs of the document"),
        (SpanRuns.of_value([1, 0, 1, 1, 0, 1, 1, 1], (0,), True), PackedMask(spans=True), "is no prefix"),
        (
            SpanRuns.of_ids([1, 1, 1, 0, 0, 0, 0, 0], 0),
            PackedMask(window=(1, 0), spans=True),
            "a window of 2 would cut",
        ),
    ],
)
def test_what_is_no_span(spans: SpanRuns, mask: PackedMask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.spans_of(spanned(spans))


def test_masks_need_what_they_read() -> None:
    with pytest.raises(ValueError, match="Sharding\\(spans="):
        PackedMask(spans=True).materialize(DOCUMENTS)
    with pytest.raises(ValueError, match="packing=Tree"):
        PackedMask(tree=True).materialize([3])
    assert np.array_equal(PackedMask(window=(2, 0)).materialize([3]), PackedMask().materialize([3]))
